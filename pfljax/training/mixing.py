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
from pfljax.contract.held import given
from pfljax.contract.types import Params, PyTree, Training
from pfljax.exchange.views import each
from pfljax.local.solver import Solver
from pfljax.models.model import Model
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
        if type(model.module).__module__.startswith("pfljax."):
            continue  # tests try those
        model = whole(model)
        form = _form(model)
        x = None if form in CHECKED else examples(experiment, model)
        if x is None:
            continue
        params = parameters(model)
        network = model.network
        with given(network, network.on(experiment.problem.plan)):
            if mixes(model, params, x):
                raise ArgumentError("model", f"{MIXES}{_hint(model)}", type(model.module).__name__)
            padded = experiment.problem.solver.keyed and depends_on_padding(model, params, x)
        if padded:
            _warn_of_padding(experiment, model)
        # for another run of a network that sees padding, the clients may have other sizes
        elif form is not None:
            if len(CHECKED) == MOST:
                CHECKED.clear()
            CHECKED[form] = None


def _warn_of_padding(experiment: Experiment, model: Model) -> None:
    sizes = np.asarray(experiment.federation.train.size)
    num = unevenly_filled(experiment.problem.solver, sizes, experiment.problem.n_max)
    if num:
        warn(
            "model",
            f"{type(model.module).__name__}: {PADDED}, as for {num} of {len(sizes)} clients here",
        )


MIXES = (
    "a prediction depends on the other examples in its mini-batch; accepted: a network whose layers keep the examples, "
    "which are the first axis, apart"
)
PADDED = (
    "in training mode, a layer other than Flax's BatchNorm sees the examples that fill mini-batches up, so a client's "
    "training depends on the sizes of others wherever a mini-batch is filled up unevenly"
)


def mixes(model: Model, params: Params, x: PyTree) -> bool:
    """Whether a prediction depends on the others, or on its place among them.

    Args:
        model: The model.
        params: Any parameters.
        x: Four examples.
    """
    beside = each(lambda leaf: leaf[:3], x)  # a, b, c
    moved = each(lambda leaf: np.concatenate([_other(leaf[3:]), leaf[:2]]), x)  # d, a, b
    fewer = each(lambda leaf: leaf[:2], x)  # a, b
    first = np.asarray(model.apply(params, beside))
    second = np.asarray(model.apply(params, moved))
    third = np.asarray(model.apply(params, fewer))
    return differ(first[:2], second[1:3]) or differ(first[:2], third)


def depends_on_padding(model: Model, params: Params, x: PyTree) -> bool:
    """Whether outputs or batch statistics in training mode depend on padding. The arguments are those of `mixes`."""
    mode = Training(jax.random.key(0), np.array([True, True, False]))

    def run(padding):
        batch = each(
            lambda leaf: np.concatenate([leaf[:2], _other(leaf[padding : padding + 1])]), x
        )
        outputs, written = model.forward(params, batch, mode)
        return [np.asarray(outputs)[:2], *map(np.asarray, jax.tree.leaves(written))]

    return any(map(differ, run(2), run(3)))


def differ(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether finite entries of two arrays differ by more than rounding."""
    finite = np.isfinite(a) & np.isfinite(b)
    a = a[finite]
    b = b[finite]
    return bool((np.abs(a - b) > TOLERANCE * np.abs(a).max(initial=0)).any())


def unevenly_filled(solver: Solver, sizes: np.ndarray, n_max: int) -> int:
    """Number of clients with a mini-batch whose padding cannot repeat each of its examples equally often."""
    batch = solver.batch(n_max)
    last = np.where(sizes % batch == 0, np.minimum(sizes, batch), sizes % batch)
    uneven = batch % np.maximum(last, 1) if solver.statistics is not None else last < batch
    return int(((last > 0) & (uneven > 0)).sum())


def whole(model: Model) -> Model:
    """The model with the layers before its features, if these are computed once per example."""
    if model.behind is None:
        return model
    return dataclasses.replace(model, behind=None, example_input=model.behind.whole.example)


def parameters(model: Model) -> Params:
    """Random parameters with positive statistics; an initial head of zeros would hide everything, and costs more."""
    rng = np.random.default_rng(0)

    def draw(leaf):
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

        def draw(leaf):
            shape = (NUM, *leaf.shape[1:])
            integer = jnp.issubdtype(leaf.dtype, jnp.integer)
            return (rng.integers(2, size=shape) if integer else rng.normal(size=shape)).astype(
                leaf.dtype
            )

        return jax.tree.map(draw, model.network.example)
    split = experiment.federation.train
    sizes = np.asarray(split.size)[: split.y.shape[0]]
    if not sizes.any():
        return None
    chosen = np.resize(np.flatnonzero(sizes), NUM)
    places = np.arange(NUM) % sizes[chosen]  # clients may have the same examples
    return each(lambda leaf: np.asarray(leaf[chosen, places]), split.x)


def _other(leaf: np.ndarray) -> np.ndarray:
    """An example of another scale, if its numbers are no integers: a maximum over examples then changes, too."""
    return (3 * leaf).astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _hint(model: Model) -> str:
    shapes = [leaf.shape for leaf in jax.tree.leaves(model.example_input)]
    images = any(len(shape) == 3 for shape in shapes)
    return (
        "; if x has images (n, height, width), add an axis for their channels, as x[..., None] does"
        * images
    )


def _form(model: Model) -> Any:
    """What tells networks apart; None if that is unknown."""
    leaves, structure = jax.tree.flatten(model.example_input)
    form = (
        model.module,
        model.dtype,
        structure,
        tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves),
    )
    try:
        hash(form)
    except TypeError:
        return None
    return form if model.frozen is None else None
