"""Products with adapted weights, computed without adding the adapter to the weights.

A network is traced and evaluated with `Adapted` values in place of some of its parameters. A product or convolution
x W becomes s (x W) + (x A) B; anything else that meets an adapted parameter gets its merged value. So no network needs
layers of its own for adapters, and clients that share W never make their own copies of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from pfljax.contract.types import Array, PyTree
from pfljax.models.rewriting import bound, evaluate


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A weight W with what is added to its products."""

    weight: Array  # W
    a: Array | None  # A, the axes of `inputs` and one for the rank; or None
    b: Array | None  # B, an axis for the rank and W's other axes; None if A is
    scale: Array | None  # s, factors of the outputs, W's other axes; or None
    # the axes of W over which products sum, without those of stacked layers
    inputs: tuple[int, ...]
    # number of leading axes for stacked layers, which `a`, `b` and `scale` have, too
    stacked: int = 0

    @property
    def outputs(self) -> tuple[int, ...]:
        """The axes of W that products keep, without those of stacked layers."""
        return tuple(
            axis for axis in range(self.weight.ndim - self.stacked) if axis not in self.inputs
        )

    def merged(self) -> Array:
        """The weight that gives the same products."""
        stacked = self.stacked
        shape = self.weight.shape
        layers = math.prod(shape[:stacked])
        order = [*self.inputs, *self.outputs]
        back = (0, *(1 + order.index(axis) for axis in range(len(order))))
        weight = self.weight
        if self.scale is not None:
            ones = [
                shape[stacked + axis] if axis in self.outputs else 1 for axis in range(len(order))
            ]
            weight = weight * self.scale.reshape(*shape[:stacked], *ones)
        if self.a is None or self.b is None:
            return weight
        rank = self.a.shape[-1]
        product = self.a.reshape(layers, -1, rank) @ self.b.reshape(layers, rank, -1)
        product = product.reshape(layers, *(shape[stacked + axis] for axis in order)).transpose(
            back
        )
        return weight + product.reshape(shape)

    def slices(self) -> Adapted:
        """The shapes of one layer's weight, as a scan over stacked layers gives it."""
        return dataclasses.replace(self, stacked=self.stacked - 1)


jax.tree_util.register_dataclass(Adapted, ["weight", "a", "b", "scale"], ["inputs", "stacked"])


class Use(NamedTuple):
    """How a network multiplies by a parameter."""

    # the parameter's axes over which products sum, without those of stacked layers
    inputs: tuple[int, ...]
    stacked: int  # number of leading axes for layers that a scan goes through


def is_adapted(value: Any) -> bool:
    return isinstance(value, Adapted)


def merged(value: Any) -> Any:
    """The merged value of an adapted parameter; any other value as it is."""
    return value.merged() if isinstance(value, Adapted) else value


def adapted(fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Evaluates fn(*args), where leaves of the arguments may be `Adapted`."""
    leaves, structure = jax.tree.flatten(args, is_leaf=is_adapted)
    if not any(map(is_adapted, leaves)):
        return fn(*args)
    plain = [leaf.weight if isinstance(leaf, Adapted) else leaf for leaf in leaves]

    def of_leaves(*leaves):
        return fn(*jax.tree.unflatten(structure, leaves))

    traced, shape = jax.make_jaxpr(of_leaves, return_shape=True)(*plain)
    outputs = evaluate(traced, leaves, operation_of)
    return jax.tree.unflatten(jax.tree.structure(shape), [merged(value) for value in outputs])


def operation_of(eqn: Any) -> Callable[..., Any]:
    """The operation of an equation, on arrays and adapted parameters."""

    def operation(*args):
        rule = RULES.get(eqn.primitive) if any(map(is_adapted, args)) else None
        found = rule(eqn, *args) if rule else None
        return bound(eqn, *map(merged, args)) if found is None else found

    return operation


def uses(jaxpr: Any, names: Sequence[Any]) -> Iterator[tuple[Any, Use]]:
    """Finds the parameters by which a network multiplies, and how, by the `names` of its inputs; None: no parameter."""
    yield from _uses(jaxpr, [None if name is None else (name, 0) for name in names])


def _uses(jaxpr: Any, given: Sequence[tuple[Any, int] | None]) -> Iterator[tuple[Any, Use]]:
    """As `uses`; `given` has each input's name and the number of leading axes that scans have removed."""
    known = dict(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        operands = [known.get(v) if isinstance(v, core.Var) else None for v in eqn.invars]
        if eqn.primitive is primitives.convert_element_type_p:
            known[eqn.outvars[0]] = operands[0]
        for place, found in enumerate(operands[:2]):
            if found and (inputs := inputs_of(eqn, place)) is not None:
                yield found[0], Use(inputs, found[1])
        for inner in (
            core.jaxprs_in_params(eqn.params) if any(operands) and eqn.primitive in RULES else ()
        ):
            if eqn.primitive is primitives.scan_p:
                first = sum(sizes_of(eqn))
                operands = [
                    each and (each[0], each[1] + (n >= first)) for n, each in enumerate(operands)
                ]
            yield from _uses(inner, operands[len(operands) - len(inner.invars) :])


def inputs_of(eqn: Any, place: int) -> tuple[int, ...] | None:
    """The axes of an operand over which a product sums; None if it is no product, or one that cannot be split."""
    if eqn.primitive is primitives.dot_general_p:
        contracted, batch = eqn.params["dimension_numbers"]
        return None if any(batch) else tuple(sorted(contracted[place]))
    if eqn.primitive is primitives.conv_general_dilated_p and place == 1:
        outputs = eqn.params["dimension_numbers"].rhs_spec[0]
        one = eqn.params["feature_group_count"] == eqn.params["batch_group_count"] == 1
        return (
            tuple(axis for axis in range(eqn.invars[1].aval.ndim) if axis != outputs)
            if one
            else None
        )
    return None


def dot_general(eqn: Any, *args: Any) -> Array | None:
    """x W, or W x, without merging."""
    place = int(is_adapted(args[1]))
    weight = args[place]
    x = merged(args[1 - place])
    if weight.stacked or inputs_of(eqn, place) != weight.inputs:
        return None
    contracted, _ = eqn.params["dimension_numbers"]
    kept = x.ndim - len(weight.inputs)  # axes of x in the result
    pair = [weight.weight, x] if place == 0 else [x, weight.weight]
    y = bound(eqn, *pair)
    shape = [weight.weight.shape[axis] for axis in weight.outputs]
    if weight.scale is not None:
        y = y * (weight.scale if place else weight.scale.reshape(*shape, *[1] * kept))
    if weight.a is None:
        return y
    places = [weight.inputs.index(axis) for axis in contracted[place]]
    options = {"precision": eqn.params["precision"]}
    # (..., rank)
    narrow = jax.lax.dot_general(
        x, weight.a, ((contracted[1 - place], places), ((), ())), **options
    )
    more = jax.lax.dot_general(narrow, weight.b, (((kept,), (0,)), ((), ())), **options).astype(
        y.dtype
    )
    return y + (more if place else jnp.moveaxis(more, range(kept), range(-kept, 0)))


def convolution(eqn: Any, x: Any, weight: Any) -> Array | None:
    """A convolution with W without merging: one with A, followed by a product with B."""
    if not is_adapted(weight) or weight.stacked or inputs_of(eqn, 1) != weight.inputs:
        return None
    x = merged(x)
    numbers = eqn.params["dimension_numbers"]
    y = bound(eqn, x, weight.weight)
    feature = numbers.out_spec[1]
    if weight.scale is not None:
        y = y * weight.scale.reshape([-1 if axis == feature else 1 for axis in range(y.ndim)])
    if weight.a is None:
        return y
    narrow = bound(eqn, x, jnp.moveaxis(weight.a, -1, numbers.rhs_spec[0]))
    more = jnp.tensordot(narrow, weight.b, ((feature,), (0,)), precision=eqn.params["precision"])
    return y + jnp.moveaxis(more, -1, feature)


def cast(eqn: Any, weight: Any) -> Adapted:
    """An adapted parameter in another type."""
    return jax.tree.map(lambda leaf: bound(eqn, leaf), weight)


def nested(eqn: Any, *args: Any) -> list[Any]:
    """A function inside another."""
    inner = next(iter(core.jaxprs_in_params(eqn.params)))
    args = args[len(args) - len(inner.invars) :]
    if eqn.primitive is not primitives.remat_p:
        return evaluate(inner_of(eqn), args, operation_of)

    def run(*args):
        return [merged(value) for value in evaluate(inner_of(eqn), args, operation_of)]

    options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
    return jax.checkpoint(run, **options)(*args)


def inner_of(eqn: Any) -> Any:
    """The traced function in an equation, with its constants."""
    return next(
        value for value in eqn.params.values() if isinstance(value, core.Jaxpr | core.ClosedJaxpr)
    )


def sizes_of(eqn: Any) -> tuple[int, int]:
    """Numbers of constants and of carried values of a loop."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # since JAX 0.11
    return len(list(consts.vals)), len(list(carry.vals))


def scan(eqn: Any, *args: Any) -> list[Any]:
    """A loop, such as one over stacked layers."""
    params = eqn.params
    inner = inner_of(eqn)
    consts, carry = sizes_of(eqn)
    fixed = args[:consts]
    start = [merged(value) for value in args[consts : consts + carry]]

    def stacked(value):
        return not is_adapted(value) or value.stacked > 0

    rows = [value if stacked(value) else merged(value) for value in args[consts + carry :]]

    def body(carried, row):
        one = [value.slices() if is_adapted(value) else value for value in row]
        outputs = [
            merged(value) for value in evaluate(inner, [*fixed, *carried, *one], operation_of)
        ]
        return outputs[:carry], outputs[carry:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    return [part for parts in jax.lax.scan(body, start, rows, **options) for part in parts]


RULES: dict[Any, Callable[..., Any]] = {
    primitives.dot_general_p: dot_general,
    primitives.conv_general_dilated_p: convolution,
    primitives.convert_element_type_p: cast,
    primitives.scan_p: scan,
    **dict.fromkeys((primitives.jit_p, primitives.closed_call_p, primitives.remat_p), nested),
}
