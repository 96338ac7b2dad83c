"""The part of a network behind its frozen layers, whose outputs are computed once per example.

A traced network is cut at the last place before anything trained where a single array is all that depends on the
inputs: tokens that enter the first block with an adapter, or the features that enter a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import core

from pfljax.contract.errors import ArgumentError
from pfljax.contract.held import given
from pfljax.contract.types import Array, Factors, Key, Mode, Params, PyTree
from pfljax.models.frozen import AdaptedNetwork
from pfljax.models.rewriting import bound, equations
from pfljax.models.structure import Around, Call, Network, Path

PRODUCTS = ("dot_general", "conv_general_dilated")


class Cut(NamedTuple):
    """A place in a traced network."""

    equations: int  # number of equations before it
    # The only variable that later equations read of those that depend on the inputs; its first axis is the batch
    array: Any
    before: frozenset  # the variables computed before it that depend on the inputs
    products: int  # number of products and convolutions before it, at least 1


def cut_of(jaxpr: Any, held: int, trained: int) -> Cut | None:
    """Where a function of `held` frozen arrays, `trained` ones, and inputs (B, *features) is cut; or None."""
    of_x = set(jaxpr.invars[held + trained :])
    late = set(jaxpr.invars[held : held + trained])
    batch = jaxpr.invars[held + trained].aval.shape[0]
    found = None
    products = 0
    last = {v: number for number, eqn in enumerate(jaxpr.eqns) for v in variables(eqn.invars)}
    last |= dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns))
    for number, eqn in enumerate(jaxpr.eqns):
        live = [v for v in of_x if last.get(v, -1) >= number]
        if products and len(live) == 1 and live[0].aval.shape[:1] == (batch,):
            found = Cut(number, live[0], frozenset(of_x), products)
        read = set(variables(eqn.invars))
        if late & read and of_x & read:
            break
        if of_x & read:
            of_x |= set(eqn.outvars)
            products += products_in(eqn)
        elif late & read:
            late |= set(eqn.outvars)
    return found


def products_in(eqn: Any) -> int:
    """Number of products and convolutions in an equation."""
    inner = (each for jaxpr in core.jaxprs_in_params(eqn.params) for each in equations(jaxpr))
    return sum(each.primitive.name in PRODUCTS for each in (eqn, *inner))


def variables(atoms: Any) -> list[Any]:
    """The variables among an equation's arguments."""
    return [v for v in atoms if not isinstance(v, core.Literal)]


class Traced:
    """A function of parameters and inputs, traced for one batch size."""

    def __init__(
        self, network: AdaptedNetwork, fn: Callable[..., PyTree], params: Params, x: PyTree
    ):
        def run(frozen, params, x):
            with given(network, frozen):
                return fn(params, x)

        self.network = network
        closed, self.shape = jax.make_jaxpr(run, return_shape=True)(network.held, params, x)
        self.jaxpr = closed.jaxpr
        self.consts = closed.consts
        self.held = len(jax.tree.leaves(network.own))
        self.trained = len(jax.tree.leaves(params))
        self.cut = cut_of(self.jaxpr, self.held, self.trained)

    def features(self, x: PyTree) -> Array:
        """The array at the cut, for inputs."""
        assert self.cut
        frozen = jax.tree.leaves(self.network.held)
        values = dict(zip(self.jaxpr.invars[: self.held], frozen, strict=True))
        values |= dict(
            zip(self.jaxpr.invars[self.held + self.trained :], jax.tree.leaves(x), strict=True)
        )
        return self._run(values, self.jaxpr.eqns[: self.cut.equations], [self.cut.array])[0]

    def resumed(self, params: Params, features: Array) -> PyTree:
        """What the function returns for inputs with these features."""
        assert self.cut
        given = [*jax.tree.leaves(self.network.held), *jax.tree.leaves(params)]
        values = dict(zip(self.jaxpr.invars[: self.held + self.trained], given, strict=True))
        values[self.cut.array] = features.astype(self.cut.array.aval.dtype)
        skipped = self.cut.before
        rest = [eqn for eqn in self.jaxpr.eqns if not skipped & set(eqn.outvars)]
        return jax.tree.unflatten(
            jax.tree.structure(self.shape), self._run(values, rest, self.jaxpr.outvars)
        )

    def _run(self, values: dict, equations: list[Any], results: list[Any]) -> list[Any]:
        values |= dict(zip(self.jaxpr.constvars, self.consts, strict=True))

        def read(v):
            return v.val if isinstance(v, core.Literal) else values[v]

        for eqn in equations:
            if all(isinstance(v, core.Literal) or v in values for v in eqn.invars):
                with eqn.ctx.manager:
                    outputs = bound(eqn, *map(read, eqn.invars))
                multiple = eqn.primitive.multiple_results
                values.update(zip(eqn.outvars, outputs if multiple else [outputs], strict=True))
        return [read(v) for v in results]


class Behind(Network):
    """A network whose inputs are the features at the cut of a `whole` one, which has the inputs `inputs`.

    `saved` is the share of its products and convolutions that are before the cut.
    """

    def __init__(self, whole: AdaptedNetwork, features: jax.ShapeDtypeStruct, saved: float):
        self.whole = whole
        self.inputs = whole.example
        self.example = features
        self.saved = saved
        self.shapes = whole.shapes
        self.statistics = whole.statistics
        self.collections = whole.collections
        self.fixed = whole.fixed
        self.own = whole.own

    def on(self, plan: Any) -> PyTree:
        return self.whole.on(plan)

    def init(self, key: Key) -> Params:
        return self.whole.init(key)

    def forward(
        self, params: Params, x: PyTree, mode: Mode, around: Around | None = None
    ) -> tuple[Array, Params]:
        del around  # no module is called
        return self._after(lambda params, x: self.whole.forward(params, x, mode), params, x)

    def exported(self, params: Params) -> tuple[Any, Any]:
        return self.whole.exported(params)

    def factors(self, params: Params) -> dict[Path, Factors]:
        return self.whole.factors(params)

    def with_factors(self, params: Params, factors: Mapping[Path, Factors]) -> Params:
        return self.whole.with_factors(params, factors)

    def calls(self, params: Params, x: PyTree, mode: Mode) -> list[Call]:
        raise NotImplementedError("the modules before the cut are not called")

    def dense(self, params: Params, x: PyTree, mode: Mode) -> list[tuple[Array, Array]]:
        return self._after(lambda params, x: last_dense(self.whole, params, x, mode), params, x)

    def head(self, params: Params, features: Array) -> Array:
        return self.whole.head(params, features)

    @property
    def called(self) -> dict[Path, bool]:
        return self.whole.called

    def _after(self, fn: Callable[..., PyTree], params: Params, features: Array) -> PyTree:
        inputs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((len(features), *x.shape[1:]), x.dtype), self.inputs
        )
        return Traced(self.whole, fn, params, inputs).resumed(params, features)


def last_dense(
    network: Network, params: Params, x: PyTree, mode: Mode
) -> list[tuple[Array, Array]]:
    """`Network.dense` as far as `Model.features` and `Model.embedding` read it."""
    *hidden, last = network.dense(params, x, mode)
    return [pair for pair in hidden[-1:] if pair[1].shape == last[0].shape] + [last]


def behind(network: Network) -> Behind | str:
    """The network behind its cut, or why it has none."""
    if not isinstance(network, AdaptedNetwork):
        return "nothing is frozen"
    if network.statistics:
        return "batch statistics are trained"
    if network.stochastic:
        return "training draws random numbers, such as for dropout"

    def forward(params, x):
        return network.forward(params, x, None)

    whole = Traced(network, forward, network.shapes, network.example)
    if whole.cut is None:
        return "no single array separates the frozen layers from what is trained"
    try:

        def last(params, x):
            return last_dense(network, params, x, None)

        dense = Traced(network, last, network.shapes, network.example).cut
    except ArgumentError:  # it has no dense layer
        dense = whole.cut
    if dense is None or dense.products != whole.cut.products:
        return "methods may read the outputs of a frozen hidden layer"
    total = sum(map(products_in, whole.jaxpr.eqns))
    features = jax.ShapeDtypeStruct(whole.cut.array.aval.shape, "float32")
    return Behind(network, features, whole.cut.products / total)


def features_of(network: Behind, x: PyTree) -> Array:
    """The features (B, ...) of inputs (B, *features)."""

    def forward(params, x):
        return network.whole.forward(params, x, None)

    return Traced(network.whole, forward, network.shapes, x).features(x)
