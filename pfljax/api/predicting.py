"""What the clients of a trained run predict, and the models that they predict with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pfljax.contract.errors import ArgumentError, few, warn
from pfljax.contract.types import Algorithm, Prediction, PyTree
from pfljax.data.sources.arrays import as_arrays
from pfljax.data.sources.source import Scaling
from pfljax.exchange.lifting import Use
from pfljax.models.ensembles import ensemble
from pfljax.models.model import Model
from pfljax.models.standardizing import named_statistics, standardizing
from pfljax.run.experiment import Experiment
from pfljax.stores import serving
from pfljax.training import dependence
from pfljax.training.outcome import Outcome

# deviations between 0 and a mean, from which float32 loses three digits of a standardized number
MOST_OFFSET = 1e4
# Models with at most this weight do not count as models that a client predicts with.
NEGLIGIBLE = 1e-6


class Predictor:
    """The trained models of a run.

    Attributes:
        experiment: The run.
        outcome: What training has left.
        missing: Why the clients' examples are missing; None: they are present.
    """

    def __init__(
        self, experiment: Experiment, outcome: Outcome, missing: ArgumentError | None = None
    ):
        self.experiment = experiment
        self.outcome = outcome
        self.missing = missing

    def predict(self, x: Any, clients: Sequence[int]) -> np.ndarray:
        """Returns the predictions of clients (n, B, ...) for x (B, *features) as users pass it.

        Raises:
            ArgumentError: if x is not accepted, or the clients need their examples to predict, which are missing.
        """
        inputs = self._inputs(x)
        problem = self.experiment.problem._replace(plan=self.outcome.plan)
        if not len(jax.tree.leaves(inputs)[0]):  # networks need not accept an empty batch
            model = problem.model
            shape = jax.eval_shape(model.predict, model.network.shapes, model.example_input).shape
            return np.zeros((len(clients), 0, *shape[1:]), np.float32)

        self._check_examples()

        def use_of(algorithm: Algorithm) -> Use:
            return serving.outputs(problem, algorithm, inputs)

        predictions = self.outcome.serve(use_of, clients)
        warn_of_infinite(predictions, clients)
        return predictions

    def export(self, number: int, client: int | str) -> tuple[Any, Any]:
        """Returns the module and the variables of client `number`, whom the user calls `client`.

        Raises:
            ArgumentError: if it predicts with more than the outputs of its models.
        """
        self._check_examples()
        model, algorithm, prediction = self._prediction(number)
        if algorithm.apply is not None:
            text = "predicts with more than the outputs of its models, which no module computes"
            raise ArgumentError("client", f"{text}; use result.predict", client)

        # The models that count, or all that have a weight if these are several.
        weights = np.asarray(prediction.weights)
        largest = weights.reshape(len(weights), -1).max(axis=1)
        used = np.flatnonzero(largest > NEGLIGIBLE)
        if len(used) > 1:
            used = np.flatnonzero(largest > 0)
        exported: list[tuple[Any, Any]] = []
        for position in used:
            params = jax.tree.map(lambda leaf, row=position: leaf[row], prediction.models)
            exported.append(model.network.exported(params))
        drops_last = drops_last_axis(model)
        # All clients of a method have the same form of outputs, also those that use one of several models.
        is_single = len(weights) == 1 or not drops_last
        if len(exported) == 1 and is_single:
            module, variables = exported[0]
        else:
            module, variables = ensemble(exported, weights[used], model.task, drops_last)

        scaling = self.experiment.federation.scaling
        if scaling is None:
            return module, variables
        ratio = largest_offset(scaling)
        if ratio > MOST_OFFSET:
            mean = f"has a mean of {ratio:.0e} deviations"
            text = f"{mean}, so the exported module, in float32, is inexact"
            warn("x", f"{text}; train on x less its mean, or use result.predict")
        return standardizing(module, variables, named_statistics(scaling.mean, scaling.std))

    def _prediction(self, number: int) -> tuple[Model, Algorithm, Prediction]:
        """The network of a client, its method, and what it predicts with."""
        experiment = self.experiment
        problem = experiment.problem._replace(plan=self.outcome.plan)

        def use_of(algorithm: Algorithm) -> Use:
            del algorithm
            return unchanged if problem.groups else without_inputs

        served = self.outcome.serve(use_of, [number])
        prediction = jax.tree.map(lambda leaf: leaf[0], served)
        if not problem.groups:
            return problem.model, experiment.algorithm(problem.plan), prediction
        mixed = experiment.mixed(problem, experiment.method)
        group = int(prediction.inputs)
        unpacked = mixed.unpacked(group, prediction.models)
        return problem.groups.models[group], mixed.algorithms[group], unpacked

    def _check_examples(self) -> None:
        """Raises `ArgumentError` if clients need their examples to predict, which are missing."""
        if self.missing is None or not self._reads_examples:
            return
        text = f"{self.experiment.name} reads their examples before it predicts"
        raise ArgumentError("clients", f"{text}; they {self.missing.text}") from self.missing

    @functools.cached_property
    def _reads_examples(self) -> bool:
        """Whether clients need their examples to predict."""
        return reads_examples(self.experiment)

    def _inputs(self, x: Any) -> PyTree:
        """Checks x as users pass it. Returns the network's inputs."""
        federation = self.experiment.federation
        inputs = self.experiment.inputs
        expected = jax.tree.map(expected_shape, inputs)
        if any(map(np.ma.is_masked, jax.tree.leaves(x))):
            text = "has masked entries; accepted: numbers everywhere, such as x.filled(0)"
            raise ArgumentError("x", text)
        arrays = as_arrays(in_order(x, federation.feature_names))["x"]
        try:
            shapes = jax.tree.map(lambda leaf, x: np.shape(x), inputs, arrays)
        except (TypeError, ValueError) as error:
            text = f"is no array, or not as many arrays; accepted: {expected}"
            raise ArgumentError("x", text) from error
        num = len(np.atleast_1d(jax.tree.leaves(arrays)[0]))
        if shapes != jax.tree.map(lambda leaf: (num, *leaf.shape), inputs):
            raise ArgumentError("x", f"has shape {shapes}; accepted: {expected}")
        for leaf in jax.tree.leaves(arrays):
            check_numbers(leaf)

        # The network's inputs: scaled, in its types, or their features behind frozen layers.
        if federation.scaling is None:
            jax.tree.map(check_pixels, arrays, federation.train.x)
            scaled = arrays
        else:
            scaled = federation.scaling(arrays)
        network_inputs = jax.tree.map(lambda leaf, x: as_type(x, leaf.dtype), inputs, scaled)
        features = self.experiment.features
        return features.compute(network_inputs) if features else network_inputs


def expected_shape(leaf: Any) -> str:
    """The shape of a batch of examples as text, such as "(B, 28, 28)"."""
    return f"(B, {', '.join(map(str, leaf.shape))})"


def unchanged(prediction: Prediction, _: Any) -> Prediction:
    """The prediction as it is."""
    return prediction


def without_inputs(prediction: Prediction, _: Any) -> Prediction:
    """The prediction without what the method gives to `Algorithm.apply`."""
    return prediction._replace(inputs=())


def reads_examples(experiment: Experiment) -> bool:
    """Whether what clients predict depends on their own examples, other than on their number.

    So it does if they train or look up neighbors before they predict, and if their predictions cannot be traced.
    """
    depends = dependence.trace_predictions(experiment)
    return depends is None or depends.on_examples


def drops_last_axis(model: Model) -> bool:
    """Whether predictions lack the last axis of the network's outputs: that of a regression's only value."""

    def outputs(params: PyTree, x: PyTree) -> Any:
        return model.network.forward(params, x, None)[0]

    shape = jax.eval_shape(outputs, model.network.shapes, model.example_input).shape
    return len(shape) > len(model.output_shape)


def warn_of_infinite(predictions: np.ndarray, clients: Sequence[int]) -> None:
    """Warns of predictions (n, B, ...) of clients (n,) that are not finite."""
    rows = predictions.reshape(*predictions.shape[:2], -1)
    finite = np.isfinite(rows).all(axis=2)
    if finite.all():
        return
    number, row = np.argwhere(~finite)[0]
    first = f"predictions are not finite, first of client {clients[number]} for row {row}"
    text = f"{first}; tokens may be unknown to the network, numbers too large"
    warn("x", f"{text}, or training may have diverged")


def largest_offset(scaling: Scaling) -> float:
    """The largest mean, in deviations, of an array that is scaled."""
    means = jax.tree.leaves(scaling.mean)
    deviations = jax.tree.leaves(scaling.std)
    offsets = [
        float(np.max(np.abs(mean) / std)) for mean, std in zip(means, deviations, strict=True)
    ]
    return max(offsets)


def in_order(x: Any, names: Sequence[str]) -> Any:
    """A table of examples with its columns in the order of the clients' features, if both have names.

    Raises:
        ArgumentError: if it lacks one of these, or has others.
    """
    columns = getattr(x, "columns", None)
    if columns is None or not names:
        return x
    columns_by_name = {str(column): column for column in columns}
    if list(columns_by_name) == list(names):
        return x
    if sorted(map(str, columns)) != sorted(names):
        lacking = few([name for name in names if name not in columns_by_name]) or "none"
        others = few([name for name in columns_by_name if name not in names]) or "no others"
        accepted = f"accepted: the columns {few(list(names))}"
        raise ArgumentError("x", f"lacks {lacking} and has {others}; {accepted}")
    return x[[columns_by_name[name] for name in names]]


def check_pixels(x: np.ndarray, examples: Any) -> None:
    """Raises `ArgumentError` for pixels from 0 to 255 where the clients' examples are other numbers."""
    if x.dtype == np.uint8 and examples.dtype.kind == "f" and x.max(initial=0) > 1:
        text = "is uint8, but the clients' examples are floats"
        accepted = "accepted: x like `clients.examples`, such as x / 255"
        raise ArgumentError("x", f"{text}; {accepted}")


def check_numbers(x: np.ndarray) -> None:
    """Raises `ArgumentError` if an array of x has something other than finite numbers."""
    if x.dtype.kind not in "biuf":
        raise ArgumentError("x", f"is {x.dtype}; accepted: numbers")
    with np.errstate(over="ignore"):
        as_computed = x.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(as_computed).all(axis=tuple(range(1, x.ndim))))
    if bad.size:
        text = f"is NaN or infinite in {bad.size} rows; the first is row {bad[0]}"
        raise ArgumentError("x", text)


def as_type(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Numbers in the type that a network takes. Raises `ArgumentError` for fractions where it takes integers."""
    if not np.issubdtype(dtype, np.integer):
        return x.astype(dtype)
    limits = np.iinfo(dtype)
    if x.size:
        is_whole = np.all(x == np.floor(x))
        in_range = limits.min <= x.min() and x.max() <= limits.max
        if not is_whole or not in_range:
            text = f"has numbers that are no {np.dtype(dtype)}; accepted: integers, as in training"
            raise ArgumentError("x", text)
    return x.astype(dtype)
