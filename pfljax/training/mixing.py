"""Whether a network computes each example by itself, tried once per run on a few real examples.

A network that takes the mini-batch for something else, such as images without an axis for their channels, or that
subtracts the mean over its first axis, gives predictions that depend on the examples that happen to be beside. In
training mode the other examples of a mini-batch may matter, but not the padding of those that are not full.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract.errors import ArgumentError, warn
from pfljax.contract.held import use_frozen
from pfljax.contract.types import Params, PyTree, Training
from pfljax.exchange.views import map_examples
from pfljax.local.solver import Solver
from pfljax.models.model import Model
from pfljax.models.torch_modules import name_of, written_by_user
from pfljax.run.experiment import Experiment

TOLERANCE = 1e-3  # of the largest output
NUM = 4  # examples that are tried
MOST = 256  # networks that are remembered
CHECKED: dict[Any, None] = {}  # networks that passed, in this process


def check(experiment: Experiment) -> None:
    """Raises `ArgumentError` if a user's network's predictions of an example depend on the others in the mini-batch.

    Warns if, in training mode, anything depends on padding, and some client has mini-batches with padding.
    """
    for model in experiment.problem.models:
        if type(written_by_user(model.module)).__module__.startswith("pfljax."):
            continue  # tests try those
        model = whole(model)
        form = _form(model)
        if form in CHECKED:
            continue
        x = examples(experiment, model)
        if x is None:
            continue
        params = parameters(model)
        network = model.network
        with use_frozen(network, network.on(experiment.problem.plan)):
            if mixes(model, params, x):
                raise ArgumentError("model", f"{MIXES}{_hint(model)}", name_of(model.module))
            padded = experiment.problem.solver.keyed and depends_on_padding(model, params, x)
        if padded:
            _warn_of_padding(experiment, model)
        # A network that sees padding is tried again: another run's clients may have other sizes.
        elif form is not None:
            if len(CHECKED) == MOST:
                CHECKED.clear()
            CHECKED[form] = None


def _warn_of_padding(experiment: Experiment, model: Model) -> None:
    sizes = np.asarray(experiment.federation.train.size)
    num = unevenly_filled(experiment.problem.solver, sizes, experiment.problem.n_max)
    if num:
        network = name_of(model.module)
        clients = f"as for {num} of {len(sizes)} clients here"
        warn("model", f"{network}: {PADDED}, {clients}")


MIXES = (
    "a prediction depends on the other examples in its mini-batch; accepted: a network whose layers keep the examples, "
    "which are the first axis, apart"
)
PADDED = (
    "in training mode, a layer other than BatchNorm of Flax or PyTorch sees the examples that fill mini-batches up, so "
    "a client's training depends on the sizes of others wherever a mini-batch is filled up unevenly"
)


def mixes(model: Model, params: Params, x: PyTree) -> bool:
    """Whether a prediction depends on the others, or on its place among them.

    Args:
        model: The model.
        params: Any parameters.
        x: Four examples.
    """
    # The examples a and b: with c, after d, and alone.
    with_c = map_examples(lambda leaf: leaf[:3], x)
    alone = map_examples(lambda leaf: leaf[:2], x)

    def after_d(leaf: np.ndarray) -> np.ndarray:
        return np.concatenate([_other(leaf[3:]), leaf[:2]])

    first = np.asarray(model.apply(params, with_c))
    second = np.asarray(model.apply(params, map_examples(after_d, x)))
    third = np.asarray(model.apply(params, alone))
    return differ(first[:2], second[1:3]) or differ(first[:2], third)


def depends_on_padding(model: Model, params: Params, x: PyTree) -> bool:
    """Whether outputs or batch statistics in training mode depend on padding. The arguments are those of `mixes`."""
    mode = Training(jax.random.key(0), np.array([True, True, False]))

    def outputs_with(padding: int) -> list[np.ndarray]:
        """Outputs and statistics of two examples, with example number `padding` as padding."""

        def padded(leaf: np.ndarray) -> np.ndarray:
            filled = _other(leaf[padding : padding + 1])
            return np.concatenate([leaf[:2], filled])

        outputs, statistics = model.forward(params, map_examples(padded, x), mode)
        return [np.asarray(outputs)[:2], *map(np.asarray, jax.tree.leaves(statistics))]

    return any(map(differ, outputs_with(2), outputs_with(3)))


def differ(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether finite entries of two arrays differ by more than rounding."""
    finite = np.isfinite(a) & np.isfinite(b)
    a = a[finite]
    b = b[finite]
    largest = np.abs(a).max(initial=0)
    differs = np.abs(a - b) > TOLERANCE * largest
    return bool(differs.any())


def unevenly_filled(solver: Solver, sizes: np.ndarray, n_max: int) -> int:
    """Number of clients with a mini-batch whose padding cannot repeat each of its examples equally often."""
    batch = solver.batch(n_max)
    rest = sizes % batch
    last = np.where(rest == 0, np.minimum(sizes, batch), rest)  # examples in the last mini-batch
    if solver.statistics is not None:
        uneven = batch % np.maximum(last, 1) > 0
    else:
        uneven = last < batch
    return int(((last > 0) & uneven).sum())


def whole(model: Model) -> Model:
    """The model with the layers before its features, if these are computed once per example."""
    if model.tail is None:
        return model
    return dataclasses.replace(model, tail=None, example_input=model.tail.full.example)


def parameters(model: Model) -> Params:
    """Random parameters with positive statistics; an initial head of zeros would hide everything, and costs more."""
    rng = np.random.default_rng(0)

    def draw(leaf: Any) -> np.ndarray:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.zeros(leaf.shape, leaf.dtype)
        if leaf.ndim < 2:
            return rng.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype)
        width = math.prod(leaf.shape[:-1])
        return rng.normal(0, width**-0.5, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(draw, model.network.shapes)


def examples(experiment: Experiment, model: Model) -> PyTree | None:
    """Four of the clients' examples; random ones if the run has features only, and None if there are no examples."""
    rng = np.random.default_rng(0)
    if experiment.features:

        def draw(leaf: Any) -> np.ndarray:
            shape = (NUM, *leaf.shape[1:])
            if jnp.issubdtype(leaf.dtype, jnp.integer):
                drawn = rng.integers(2, size=shape)
            else:
                drawn = rng.normal(size=shape)
            return drawn.astype(leaf.dtype)

        return jax.tree.map(draw, model.network.example)
    split = experiment.federation.train
    sizes = np.asarray(split.size)[: split.y.shape[0]]
    if not sizes.any():
        return None
    clients = np.resize(np.flatnonzero(sizes), NUM)
    positions = np.arange(NUM) % sizes[clients]  # clients may have the same examples
    return map_examples(lambda leaf: np.asarray(leaf[clients, positions]), split.x)


def _other(leaf: np.ndarray) -> np.ndarray:
    """An example of another scale, if its numbers are no integers: a maximum over examples then changes, too."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return (3 * leaf).astype(leaf.dtype)


def _hint(model: Model) -> str:
    shapes = [leaf.shape for leaf in jax.tree.leaves(model.example_input)]
    has_images = any(len(shape) == 3 for shape in shapes)
    if not has_images:
        return ""
    images = "if x has images (n, height, width)"
    return f"; {images}, add an axis for their channels, as x[..., None] does"


def _form(model: Model) -> Any:
    """What tells networks apart; None if that is unknown."""
    if model.frozen is not None:
        return None
    leaves, structure = jax.tree.flatten(model.example_input)
    inputs = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    form = (written_by_user(model.module), model.dtype, structure, inputs)
    try:
        hash(form)
    except TypeError:
        return None
    return form
