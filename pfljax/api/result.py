"""The result of training: scores, history, predictions and figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfljax import report
from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError, few, warn
from pfljax.contract.types import PyTree, State, Topology
from pfljax.data import Federation
from pfljax.data.sources.arrays import as_arrays
from pfljax.data.sources.source import Scaling
from pfljax.evaluation import collaboration
from pfljax.folder import files
from pfljax.models import weights
from pfljax.models.standardizing import named_statistics, standardizing
from pfljax.run.experiment import Experiment
from pfljax.settings.fields import checked
from pfljax.stores import serving
from pfljax.training.loop import Outcome

# deviations between 0 and a mean, from which float32 loses three digits of a standardized number
MOST_OFFSET = 1e4
ALONE = 1e-6  # models with at most this weight do not count as models that a client predicts with


@dataclasses.dataclass(frozen=True)
class Collaboration:
    """Which models each client used, at every evaluated round.

    Attributes:
        rounds: Evaluated rounds. Shape (T,).
        index: Indices of the J models that each client used. Shape (T, K, J).
        weights: Weights of these models; they sum to 1 over J. Shape (T, K, J).
        group: Each client's true group. Shape (K,). None: unknown.
        topology: Unless "shared", the models are the clients' own.
        arrays: All arrays of collaboration.npz, such as "affinity" (T, K, K). With `eval_clients`, they cover only
            the n clients listed in "clients", and n replaces K in all shapes.
    """

    rounds: np.ndarray
    index: np.ndarray
    weights: np.ndarray
    group: np.ndarray | None
    topology: Topology
    arrays: dict[str, np.ndarray] = dataclasses.field(repr=False)

    def matrix(self, evaluation: int = -1) -> np.ndarray:
        """Returns the weight (K, N) that each client gave to each model at one evaluation.

        Args:
            evaluation: Number of the evaluation, as in `rounds`; negative: from the end. Default: the last.

        Raises:
            ArgumentError: if there is no such evaluation, or if only a sample of the clients is scored.
        """
        if "clients" in self.arrays:
            raise ArgumentError(
                "eval_clients", "a matrix needs all clients; use index and weights instead"
            )
        num = len(self.rounds)
        whole = isinstance(evaluation, int | np.integer) and not isinstance(evaluation, bool)
        if not whole or not -num <= evaluation < num:
            raise ArgumentError(
                "evaluation", f"accepted: whole numbers, {-num} to {num - 1}", evaluation
            )
        index = self.index[evaluation]
        weights = self.weights[evaluation]
        is_own = Topology(self.topology).first_is_own
        num_models = len(index) if is_own else int(self.index.max()) + 1
        return collaboration.dense(index, weights, num_models)


class Result:
    """The result of training.

    Attributes:
        experiment: The method and the clients that it was trained on.
        out: The run's folder, or None.
    """

    def __init__(self, experiment: Experiment, outcome: Outcome, out: Path | None):
        self.experiment = experiment
        self.out = out
        self._outcome = outcome
        history = outcome.history
        self._rows = [dict(row) for row in history.rows]
        self._results = history.results_arrays()
        self._collaboration = history.collaboration_arrays()

    def __repr__(self) -> str:
        classifies = self.experiment.federation.task == "classification"
        score = f"accuracy {self.accuracy:.3f}" if classifies else f"loss {self.loss:.4f}"
        last = self._rows[-1]["round"]
        return f"Result({self.experiment.name}, round {last}: {score} of {self.summary['scored']})"

    @property
    def summary(self) -> dict:
        """The content of summary.json."""
        return self._outcome.summary

    @property
    def history(self) -> list[dict]:
        """One entry per evaluated round: round, seconds, losses, accuracies, traffic, and the method's own metrics.

        The first entry describes the initial models, round 0. Its "train_loss" is the initial models' loss on the
        training examples, and it has no method-specific metrics.
        """
        return self._rows

    @property
    def results(self) -> dict[str, Any]:
        """The content of results.npz: per-client accuracy and loss of each split, such as "accuracy_test" (T, K).

        Beside these are the evaluated "rounds" (T,), and "scored", which says in words what model was scored.
        With `eval_clients`, the shape is (T, n), for the clients listed in "clients" (n,).
        """
        return self._results

    def to_pandas(self) -> Any:
        """Returns the scores as a pandas DataFrame with one row per evaluated round, client and split.

        The columns are "round", "client", "split" ("train", "validation" or "test"), "group" (the client's true
        group, if it is known), "size" (its number of examples in the split), "name" (its id in
        the data, if that is not its number), "loss" and, for classification, "accuracy".
        Scores are NaN for a client without examples in the split. For example,
        `frame[frame.split == "test"].groupby(["round", "group"]).accuracy.mean()` returns the mean accuracy of each
        group over rounds.

        Raises:
            ArgumentError: if pandas is not installed.
        """
        return frame_of(self._results, self.experiment.federation)

    @property
    def accuracy(self) -> float:
        """Test accuracy after the last round, averaged with weights proportional to clients' test examples."""
        return self._rows[-1].get("accuracy", float("nan"))

    @property
    def loss(self) -> float:
        """Test loss after the last round, averaged in the same way."""
        return self._rows[-1]["loss"]

    @property
    def per_client_accuracy(self) -> np.ndarray:
        """Each client's test accuracy after the last round. Shape (K,), or (n,) with `eval_clients`."""
        if "accuracy_test" not in self._results:
            raise ArgumentError(
                "per_client_accuracy", "regression has no accuracy; use results['loss_test']"
            )
        return self._results["accuracy_test"][-1]

    @property
    def collaboration(self) -> Collaboration:
        """Which models each client used, at every evaluated round."""
        arrays = self._collaboration
        return Collaboration(
            rounds=arrays["round"],
            index=arrays["index"],
            weights=arrays["weights"],
            group=arrays.get("group"),
            topology=Topology(str(arrays["topology"])),
            arrays=arrays,
        )

    @property
    def state(self) -> State:
        """The final state: server, models, optimizer, clients.

        Raises:
            OutOfMemory: if the clients' rows are on disk and do not fit in host memory.
        """
        return self._outcome.whole_state()

    def predict(self, x: Any, client: int | str) -> np.ndarray:
        """Returns one client's predictions.

        Args:
            x: Examples as they were given for training, such as those of `Federation.examples`: the model scales them.
                Shape (B, *features), or a tree of such arrays; B may be 0.
            client: The client's number, 0 to K - 1, or its name.

        Returns:
            Class probabilities (B, C), or predicted values (B,) for regression.
        """
        number = self.experiment.federation.client_number(client)
        return self._predictions(self._inputs(x), [number])[0]

    def predictions(self, x: Any) -> np.ndarray:
        """Returns all clients' predictions for the same x, as in `predict`: (K, B, C), or (K, B) for regression."""
        return self._predictions(self._inputs(x), range(self.experiment.federation.num_clients))

    def _predictions(self, x: PyTree, clients: Sequence[int]) -> np.ndarray:
        problem = self.experiment.problem._replace(plan=self._outcome.plan)
        if not len(jax.tree.leaves(x)[0]):  # networks need not accept an empty batch
            model = problem.model
            shape = jax.eval_shape(model.predict, model.network.shapes, model.example_input).shape
            return np.zeros((len(clients), 0, *shape[1:]), np.float32)
        found = self._outcome.serve(
            lambda algorithm: serving.outputs(problem, algorithm, x), clients
        )
        finite = np.isfinite(found).reshape(*found.shape[:2], -1).all(axis=2)
        if not finite.all():
            number, row = np.argwhere(~finite)[0]
            text = f"predictions are not finite, first of client {clients[number]} for row {row}; tokens may be unknown"
            warn("x", f"{text} to the network, numbers too large, or training may have diverged")
        return found

    def export(self, client: int | str) -> tuple[Any, Any]:
        """Returns the model that one client predicts with, as a Flax module and its variables.

        For a Linen module, `module.apply(variables, x)` gives the logits whose softmax is `predict(x, client)`, or the
        values for regression; the variables are its collections, batch statistics among them. An NNX module has the
        client's parameters, in inference mode, and its variables are its `nnx.State` without random streams.

        The module takes x as `predict` does. If training standardized x, the module does so first, with the statistics
        in its variables' collection "scaling". A `Model` made of them is trained further with the same statistics.

        Args:
            client: The client's number, 0 to K - 1, or its name.

        Raises:
            ArgumentError: if the client predicts with several models, or with more than a model.
        """
        number = self.experiment.federation.client_number(client)
        problem = self.experiment.problem._replace(plan=self._outcome.plan)

        def as_it_is(algorithm):
            return lambda made, _: made if problem.groups else made._replace(inputs=())

        prediction = jax.tree.map(lambda leaf: leaf[0], self._outcome.serve(as_it_is, [number]))
        model = problem.model
        algorithm = self.experiment.algorithm(problem.plan)
        if problem.groups:
            mixed = self.experiment.mixed(problem, self.experiment.method)
            group = int(prediction.inputs)
            prediction = mixed.unpacked(group, prediction.models)
            model = problem.groups.models[group]
            algorithm = mixed.algorithms[group]
        used = np.flatnonzero(np.asarray(prediction.weights) > ALONE)
        applied = algorithm.apply is not None
        if applied or len(used) != 1:
            what = (
                "more than the outputs of one model" if applied else "a mixture of several models"
            )
            raise ArgumentError(
                "client",
                f"predicts with {what}, which is no Flax module; use result.predict",
                client,
            )
        params = jax.tree.map(lambda leaf: leaf[used[0]], prediction.models)
        module, variables = model.network.exported(params)
        scaling = self.experiment.federation.scaling
        if scaling is None:
            return module, variables
        ratio = largest_offset(scaling)
        if ratio > MOST_OFFSET:
            text = f"has a mean of {ratio:.0e} deviations, so the exported module, in float32, is inexact"
            warn("x", f"{text}; train on x less its mean, or use result.predict")
        return standardizing(module, variables, named_statistics(scaling.mean, scaling.std))

    @checked()
    def save_model(self, path: str | Path, client: int | str) -> None:
        """Saves the variables of `export`.

        Args:
            path: A new file NAME.safetensors, which `pfl.weights.Saved` reads; or a new folder, which Orbax's
                `StandardCheckpointer().restore(path)` reads.
            client: The client's number, 0 to K - 1, or its name.

        Raises:
            ArgumentError: see `export`; also if the file or folder exists.
        """
        _, variables = self.export(client)
        files.check_new(Path(path), "path", "a new file NAME.safetensors or a new folder")
        if Path(path).suffix == ".safetensors":
            files.write_atomically(Path(path), lambda file: file.write(weights.as_bytes(variables)))
            return
        import orbax.checkpoint as ocp  # slow to import

        if not isinstance(variables, dict):
            from flax import nnx  # slow to import

            variables = nnx.to_pure_dict(variables)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(Path(path).absolute(), jax.tree.map(np.asarray, variables))

    def _inputs(self, x: Any) -> PyTree:
        """Examples as users have them, checked and as the network takes them."""
        federation = self.experiment.federation
        inputs = self.experiment.inputs
        wanted = jax.tree.map(lambda leaf: f"(B, {', '.join(map(str, leaf.shape))})", inputs)
        if any(map(np.ma.is_masked, jax.tree.leaves(x))):
            raise ArgumentError(
                "x", "has masked entries; accepted: numbers everywhere, such as x.filled(0)"
            )
        given = as_arrays(in_order(x, federation.feature_names))["x"]
        try:
            shapes = jax.tree.map(lambda leaf, x: np.shape(x), inputs, given)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                "x", f"is no array, or not as many arrays; accepted: {wanted}"
            ) from error
        num = len(np.atleast_1d(jax.tree.leaves(given)[0]))
        if shapes != jax.tree.map(lambda leaf: (num, *leaf.shape), inputs):
            raise ArgumentError("x", f"has shape {shapes}; accepted: {wanted}")
        for leaf in jax.tree.leaves(given):
            check_numbers(leaf)
        if federation.scaling is None:
            jax.tree.map(check_pixels, given, federation.train.x)
            scaled = given
        else:
            scaled = federation.scaling(given)
        x = jax.tree.map(lambda leaf, x: as_type(x, leaf.dtype), inputs, scaled)
        return self.experiment.features.compute(x) if self.experiment.features else x

    @property
    def plot(self) -> report.Plots:
        """Figures of this result. Notebooks show them inline."""
        return report.Plots(self.summary, self.history, self.results, self._collaboration)

    def write_report(self) -> Path:
        """Draws the figures and writes report.html to the run's folder. Returns the page's path.

        Raises:
            ArgumentError: if the run was trained without a folder.
        """
        if self.out is None:
            raise ArgumentError(
                "out", "the run was trained without a folder; pass `out` to `train`"
            )
        return report.write(self.out)


def largest_offset(scaling: Scaling) -> float:
    """The largest mean, in deviations, of an array that is scaled."""
    means = jax.tree.leaves(scaling.mean)
    deviations = jax.tree.leaves(scaling.std)
    return max(
        float(np.max(np.abs(mean) / std)) for mean, std in zip(means, deviations, strict=True)
    )


def in_order(x: Any, names: Sequence[str]) -> Any:
    """A table of examples with its columns in the order of the clients' features, if both have names.

    Raises:
        ArgumentError: if it lacks one of these, or has others.
    """
    columns = getattr(x, "columns", None)
    if columns is None or not names:
        return x
    given = [str(name) for name in columns]
    if given == list(names):
        return x
    if sorted(given) != sorted(names):
        lacking = few([name for name in names if name not in given]) or "none"
        others = few([name for name in given if name not in names]) or "no others"
        raise ArgumentError(
            "x", f"lacks {lacking} and has {others}; accepted: the columns {few(list(names))}"
        )
    return x[[columns[given.index(name)] for name in names]]


def check_pixels(x: np.ndarray, examples: Any) -> None:
    """Raises `ArgumentError` for pixels from 0 to 255 where the clients' examples are other numbers."""
    if x.dtype == np.uint8 and examples.dtype.kind == "f" and x.max(initial=0) > 1:
        text = "is uint8, but the clients' examples are floats; accepted: x like `clients.examples`, such as x / 255"
        raise ArgumentError("x", text)


def check_numbers(x: np.ndarray) -> None:
    """Raises `ArgumentError` if an array of x has something other than finite numbers."""
    if x.dtype.kind not in "biuf":
        raise ArgumentError("x", f"is {x.dtype}; accepted: numbers")
    with np.errstate(over="ignore"):
        as_computed = x.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(as_computed).all(axis=tuple(range(1, x.ndim))))
    if bad.size:
        raise ArgumentError(
            "x", f"is NaN or infinite in {bad.size} rows; the first is row {bad[0]}"
        )


def as_type(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Numbers in the type that a network takes. Raises `ArgumentError` if integers are wanted and they are none."""
    if not np.issubdtype(dtype, np.integer):
        return x.astype(dtype)
    limits = np.iinfo(dtype)
    if x.size and not (
        np.all(x == np.floor(x)) and limits.min <= x.min() and x.max() <= limits.max
    ):
        raise ArgumentError(
            "x", f"has numbers that are no {np.dtype(dtype)}; accepted: integers, as in training"
        )
    return x.astype(dtype)


def frame_of(results: Mapping[str, np.ndarray], federation: Federation) -> Any:
    """Converts the content of results.npz to a DataFrame with one row per evaluated round, client and split."""
    pd = optional.load("pandas", "to_pandas")
    rounds = results["rounds"]
    found = [split for split in ("train", "validation", "test") if f"loss_{split}" in results]
    clients = results.get("clients", np.arange(federation.num_clients))
    index = pd.MultiIndex.from_product([rounds, clients, found], names=["round", "client", "split"])

    def stacked(metric):
        return np.stack([results[f"{metric}_{split}"] for split in found], axis=-1).ravel()

    names = [name.removesuffix(f"_{found[0]}") for name in results if name.endswith(f"_{found[0]}")]
    metrics = sorted(names, key=lambda name: ("loss", "accuracy", name).index(name))
    sizes = np.stack([getattr(federation, split).size[clients] for split in found], axis=-1)

    def of_clients(values):
        return np.tile(np.repeat(values[clients], len(found)), len(rounds))

    columns = {} if federation.group is None else {"group": of_clients(federation.group)}
    columns["size"] = np.tile(sizes.ravel(), len(rounds))
    if federation.client_names is not None:
        columns["name"] = of_clients(federation.client_names)
    columns |= {metric: stacked(metric) for metric in metrics}
    return pd.DataFrame(columns, index=index).reset_index()
