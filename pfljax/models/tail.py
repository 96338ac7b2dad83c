"""The part of a network after its frozen layers, whose outputs are computed once per example.

A traced network is cut at the last position before anything trained where a single array is all that depends on the
inputs: tokens that enter the first block with an adapter, or the features that enter a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from pfljax.contract.errors import ArgumentError
from pfljax.contract.held import use_frozen
from pfljax.contract.types import Array, Factors, Key, Mode, Params, PyTree
from pfljax.models.frozen import AdaptedNetwork
from pfljax.models.rewriting import bound, equations
from pfljax.models.structure import Around, Call, Network, Path

PRODUCTS = ("dot_general", "conv_general_dilated")


class Cut(NamedTuple):
    """A position in a traced network.

    Attributes:
        equations: Number of equations before it.
        array: The only variable that later equations read of those that depend on the inputs; its first axis is the
            batch.
        before: The variables computed before it that depend on the inputs.
        products: Number of products and convolutions before it, at least 1.
    """

    equations: int
    array: Any
    before: frozenset
    products: int


def find_cut(jaxpr: Any, num_frozen: int, num_trained: int) -> Cut | None:
    """The last cut of a function of frozen arrays, trained ones, and inputs (B, *features); or None."""
    first_input = num_frozen + num_trained
    from_inputs = set(jaxpr.invars[first_input:])
    from_trained = set(jaxpr.invars[num_frozen:first_input])
    batch = jaxpr.invars[first_input].aval.shape[0]

    # The last equation that reads each variable.
    last_read = {}
    for number, eqn in enumerate(jaxpr.eqns):
        last_read |= dict.fromkeys(variables(eqn.invars), number)
    last_read |= dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns))

    cut = None
    products = 0
    for number, eqn in enumerate(jaxpr.eqns):
        live = [v for v in from_inputs if last_read.get(v, -1) >= number]
        if products and len(live) == 1 and live[0].aval.shape[:1] == (batch,):
            cut = Cut(number, live[0], frozenset(from_inputs), products)
        read = set(variables(eqn.invars))
        reads_inputs = not read.isdisjoint(from_inputs)
        reads_trained = not read.isdisjoint(from_trained)
        if reads_inputs and reads_trained:
            break
        if reads_inputs:
            from_inputs |= set(eqn.outvars)
            products += products_in(eqn)
        elif reads_trained:
            from_trained |= set(eqn.outvars)
    return cut


def products_in(eqn: Any) -> int:
    """Number of products and convolutions in an equation."""
    number = int(eqn.primitive.name in PRODUCTS)
    for jaxpr in core.jaxprs_in_params(eqn.params):
        number += sum(inner.primitive.name in PRODUCTS for inner in equations(jaxpr))
    return number


def variables(atoms: Sequence[Any]) -> list[Any]:
    """The variables among an equation's arguments."""
    return [v for v in atoms if not isinstance(v, core.Literal)]


class Traced:
    """A function of parameters and inputs, traced for one batch size."""

    def __init__(
        self, network: AdaptedNetwork, fn: Callable[..., PyTree], params: Params, x: PyTree
    ):
        def run(frozen: PyTree, params: Params, x: PyTree) -> PyTree:
            with use_frozen(network, frozen):
                return fn(params, x)

        self.network = network
        trace = jax.make_jaxpr(run, return_shape=True)
        closed, self.shape = trace(network.frozen_in_program, params, x)
        self.jaxpr = closed.jaxpr
        self.consts = closed.consts
        self.num_frozen = len(jax.tree.leaves(network.frozen_on_host))
        self.num_trained = len(jax.tree.leaves(params))
        self.cut = find_cut(self.jaxpr, self.num_frozen, self.num_trained)

    def features(self, x: PyTree) -> Array:
        """The array at the cut, for inputs."""
        assert self.cut
        first_input = self.num_frozen + self.num_trained
        frozen = jax.tree.leaves(self.network.frozen_in_program)
        inputs = jax.tree.leaves(x)
        values = dict(zip(self.jaxpr.invars[: self.num_frozen], frozen, strict=True))
        values |= dict(zip(self.jaxpr.invars[first_input:], inputs, strict=True))
        (features,) = self._run(values, self.jaxpr.eqns[: self.cut.equations], [self.cut.array])
        return features

    def resumed(self, params: Params, features: Array) -> PyTree:
        """The function's result for inputs with these features."""
        assert self.cut
        first_input = self.num_frozen + self.num_trained
        arrays = jax.tree.leaves((self.network.frozen_in_program, params))
        values = dict(zip(self.jaxpr.invars[:first_input], arrays, strict=True))
        values[self.cut.array] = features.astype(self.cut.array.aval.dtype)

        # Frozen layers are skipped.
        remaining = [eqn for eqn in self.jaxpr.eqns if self.cut.before.isdisjoint(eqn.outvars)]
        results = self._run(values, remaining, self.jaxpr.outvars)
        return jax.tree.unflatten(jax.tree.structure(self.shape), results)

    def _run(self, values: dict, eqns: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """Evaluates those equations whose arguments are known, and returns the values of `results`."""
        values |= dict(zip(self.jaxpr.constvars, self.consts, strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, core.Literal) else values[v]

        for eqn in eqns:
            if not all(v in values for v in variables(eqn.invars)):
                continue
            arguments = [read(v) for v in eqn.invars]
            with eqn.ctx.manager:
                outputs = bound(eqn, *arguments)
            if not eqn.primitive.multiple_results:
                outputs = [outputs]
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in results]


class Tail(Network):
    """The part of a network after its cut; its inputs are the features at the cut.

    Attributes:
        full: The full network.
        inputs: Shape and type of the full network's inputs.
        saved: Share of the full network's products and convolutions that are before the cut.
    """

    def __init__(self, full: AdaptedNetwork, features: jax.ShapeDtypeStruct, saved: float):
        self.full = full
        self.inputs = full.example
        self.example = features
        self.saved = saved
        self.shapes = full.shapes
        self.statistics = full.statistics
        self.collections = full.collections
        self.fixed = full.fixed
        self.frozen_on_host = full.frozen_on_host

    def on(self, plan: Any) -> PyTree:
        return self.full.on(plan)

    def init(self, key: Key) -> Params:
        return self.full.init(key)

    def forward(
        self, params: Params, x: PyTree, mode: Mode, around: Around | None = None
    ) -> tuple[Array, Params]:
        del around  # no module is called

        def run(params: Params, x: PyTree) -> tuple[Array, Params]:
            return self.full.forward(params, x, mode)

        return self._after(run, params, x)

    def exported(self, params: Params) -> tuple[Any, Any]:
        return self.full.exported(params)

    def factors(self, params: Params) -> dict[Path, Factors]:
        return self.full.factors(params)

    def with_factors(self, params: Params, factors: Mapping[Path, Factors]) -> Params:
        return self.full.with_factors(params, factors)

    def calls(self, params: Params, x: PyTree, mode: Mode) -> list[Call]:
        raise NotImplementedError("the modules before the cut are not called")

    def dense(self, params: Params, x: PyTree, mode: Mode) -> list[tuple[Array, Array]]:
        def run(params: Params, x: PyTree) -> list[tuple[Array, Array]]:
            return last_dense(self.full, params, x, mode)

        return self._after(run, params, x)

    def head(self, params: Params, features: Array) -> Array:
        return self.full.head(params, features)

    @property
    def called(self) -> dict[Path, bool]:
        return self.full.called

    def _after(self, fn: Callable[..., PyTree], params: Params, features: Array) -> PyTree:
        """The result of a function of the full network, for inputs with these features."""

        def batch(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((len(features), *x.shape[1:]), x.dtype)

        inputs = jax.tree.map(batch, self.inputs)
        return Traced(self.full, fn, params, inputs).resumed(params, features)


def last_dense(
    network: Network, params: Params, x: PyTree, mode: Mode
) -> list[tuple[Array, Array]]:
    """`Network.dense` as far as `Model.features` and `Model.embedding` read it."""
    *hidden, last = network.dense(params, x, mode)
    features, _ = last
    pairs = [pair for pair in hidden[-1:] if pair[1].shape == features.shape]
    return [*pairs, last]


def cut_network(network: Network) -> Tail | str:
    """The part of a network after its cut, or why it cannot be cut."""
    if not isinstance(network, AdaptedNetwork):
        return "nothing is frozen"
    if network.statistics:
        return "batch statistics are trained"
    if network.stochastic:
        return "training draws random numbers, such as for dropout"

    def forward(params: Params, x: PyTree) -> tuple[Array, Params]:
        return network.forward(params, x, None)

    def dense(params: Params, x: PyTree) -> list[tuple[Array, Array]]:
        return last_dense(network, params, x, None)

    traced = Traced(network, forward, network.shapes, network.example)
    if traced.cut is None:
        return "no single array separates the frozen layers from what is trained"

    # What methods read of the network must be after the cut.
    try:
        dense_cut = Traced(network, dense, network.shapes, network.example).cut
    except ArgumentError:  # it has no dense layer
        dense_cut = traced.cut
    if dense_cut is None or dense_cut.products != traced.cut.products:
        return "methods may read the outputs of a frozen hidden layer"

    total = sum(products_in(eqn) for eqn in traced.jaxpr.eqns)
    features = jax.ShapeDtypeStruct(traced.cut.array.aval.shape, "float32")
    return Tail(network, features, traced.cut.products / total)


def features_before_cut(network: Tail, x: PyTree) -> Array:
    """The features (B, ...) of inputs (B, *features)."""

    def forward(params: Params, x: PyTree) -> tuple[Array, Params]:
        return network.full.forward(params, x, None)

    return Traced(network.full, forward, network.shapes, x).features(x)
