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
    """A weight W with what is added to its products.

    Attributes:
        weight: W.
        a: A, with the axes of `inputs` and one for the rank; or None.
        b: B, with an axis for the rank and W's other axes; None if A is.
        scale: s, factors of the outputs, with W's other axes; or None.
        inputs: The axes of W over which products sum, without those of stacked layers.
        stacked: Number of leading axes for stacked layers, which `a`, `b` and `scale` have, too.
    """

    weight: Array
    a: Array | None
    b: Array | None
    scale: Array | None
    inputs: tuple[int, ...]
    stacked: int = 0

    @property
    def outputs(self) -> tuple[int, ...]:
        """The axes of W that products keep, without those of stacked layers."""
        axes = range(self.weight.ndim - self.stacked)
        return tuple(axis for axis in axes if axis not in self.inputs)

    def merged(self) -> Array:
        """The weight that gives the same products."""
        layers = self.weight.shape[: self.stacked]
        shape = self.weight.shape[self.stacked :]
        weight = self.weight
        if self.scale is not None:
            factors = [size if axis in self.outputs else 1 for axis, size in enumerate(shape)]
            weight = weight * self.scale.reshape(*layers, *factors)
        if self.a is None or self.b is None:
            return weight

        # A B, one product for each stacked layer, whose axes are in the order of inputs and outputs.
        num_layers = math.prod(layers)
        rank = self.a.shape[-1]
        order = [*self.inputs, *self.outputs]
        product = self.a.reshape(num_layers, -1, rank) @ self.b.reshape(num_layers, rank, -1)
        product = product.reshape(num_layers, *(shape[axis] for axis in order))
        back = [1 + order.index(axis) for axis in range(len(order))]
        product = product.transpose(0, *back)
        return weight + product.reshape(self.weight.shape)

    def slices(self) -> Adapted:
        """The shapes of one layer's weight, as a scan over stacked layers gives it."""
        return dataclasses.replace(self, stacked=self.stacked - 1)


jax.tree_util.register_dataclass(Adapted, ["weight", "a", "b", "scale"], ["inputs", "stacked"])


class Use(NamedTuple):
    """How a network multiplies by a parameter.

    Attributes:
        inputs: The parameter's axes over which products sum, without those of stacked layers.
        stacked: Number of leading axes for layers that a scan goes through.
    """

    inputs: tuple[int, ...]
    stacked: int


def is_adapted(value: Any) -> bool:
    """Whether a value is an adapted parameter."""
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

    def run(*leaves: Any) -> PyTree:
        return fn(*jax.tree.unflatten(structure, leaves))

    traced, shape = jax.make_jaxpr(run, return_shape=True)(*plain)
    outputs = evaluate(traced, leaves, adapted_operation)
    results = [merged(value) for value in outputs]
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def adapted_operation(eqn: Any) -> Callable[..., Any]:
    """The operation of an equation, on arrays and adapted parameters."""

    def operation(*args: Any) -> Any:
        if eqn.primitive in RULES and any(map(is_adapted, args)):
            outputs = RULES[eqn.primitive](eqn, *args)
            if outputs is not None:
                return outputs
        arrays = [merged(value) for value in args]
        return bound(eqn, *arrays)

    return operation


def uses(jaxpr: Any, names: Sequence[Any]) -> Iterator[tuple[Any, Use]]:
    """Finds the parameters by which a network multiplies, and how, by the `names` of its inputs; None: no parameter."""
    yield from _uses(jaxpr, [None if name is None else (name, 0) for name in names])


def _uses(jaxpr: Any, inputs: Sequence[tuple[Any, int] | None]) -> Iterator[tuple[Any, Use]]:
    """As `uses`; `inputs` has each input's name and the number of leading axes that scans have removed."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        operands = [known.get(v) if isinstance(v, core.Var) else None for v in eqn.invars]
        if eqn.primitive is primitives.convert_element_type_p:
            known[eqn.outvars[0]] = operands[0]

        # A product with the parameter.
        for side, operand in enumerate(operands[:2]):
            axes = summed_axes(eqn, side) if operand else None
            if operand and axes is not None:
                name, stacked = operand
                yield name, Use(axes, stacked)

        # Products in a function inside; a scan removes the first axis of its rows.
        if not any(operands) or eqn.primitive not in RULES:
            continue
        for inner in core.jaxprs_in_params(eqn.params):
            if eqn.primitive is primitives.scan_p:
                first_row = sum(loop_sizes(eqn))
                rows = [
                    operand and (operand[0], operand[1] + 1) for operand in operands[first_row:]
                ]
                operands = [*operands[:first_row], *rows]
            yield from _uses(inner, operands[len(operands) - len(inner.invars) :])


def summed_axes(eqn: Any, side: int) -> tuple[int, ...] | None:
    """The axes of an operand over which a product sums; None if it is no product, or one that cannot be split.

    Args:
        eqn: An equation.
        side: 0 for its left operand, 1 for its right one.
    """
    if eqn.primitive is primitives.dot_general_p:
        contracted, batch = eqn.params["dimension_numbers"]
        return None if any(batch) else tuple(sorted(contracted[side]))
    if eqn.primitive is primitives.conv_general_dilated_p and side == 1:
        if not eqn.params["feature_group_count"] == eqn.params["batch_group_count"] == 1:
            return None
        outputs = eqn.params["dimension_numbers"].rhs_spec[0]
        return tuple(axis for axis in range(eqn.invars[1].aval.ndim) if axis != outputs)
    return None


def dot_general(eqn: Any, *args: Any) -> Array | None:
    """x W, or W x, without merging."""
    side = int(is_adapted(args[1]))  # of W
    weight = args[side]
    x = merged(args[1 - side])
    if weight.stacked or summed_axes(eqn, side) != weight.inputs:
        return None
    contracted, _ = eqn.params["dimension_numbers"]
    num_axes = x.ndim - len(weight.inputs)  # axes of x in the result

    # s (x W)
    y = bound(eqn, x, weight.weight) if side else bound(eqn, weight.weight, x)
    if weight.scale is not None:
        shape = [weight.weight.shape[axis] for axis in weight.outputs]
        scale = weight.scale if side else weight.scale.reshape(*shape, *[1] * num_axes)
        y = y * scale
    if weight.a is None:
        return y

    # + (x A) B
    precision = eqn.params["precision"]
    axes_of_a = [weight.inputs.index(axis) for axis in contracted[side]]
    numbers = ((contracted[1 - side], axes_of_a), ((), ()))
    narrow = jax.lax.dot_general(x, weight.a, numbers, precision=precision)
    numbers = (((num_axes,), (0,)), ((), ()))
    product = jax.lax.dot_general(narrow, weight.b, numbers, precision=precision)
    product = product.astype(y.dtype)
    if side == 0:
        product = jnp.moveaxis(product, range(num_axes), range(-num_axes, 0))
    return y + product


def convolution(eqn: Any, x: Any, weight: Any) -> Array | None:
    """A convolution with W without merging: one with A, followed by a product with B."""
    if not is_adapted(weight) or weight.stacked or summed_axes(eqn, 1) != weight.inputs:
        return None
    x = merged(x)
    numbers = eqn.params["dimension_numbers"]
    feature = numbers.out_spec[1]

    # s (x W)
    y = bound(eqn, x, weight.weight)
    if weight.scale is not None:
        shape = [1] * y.ndim
        shape[feature] = -1
        y = y * weight.scale.reshape(shape)
    if weight.a is None:
        return y

    # + (x A) B
    narrow = bound(eqn, x, jnp.moveaxis(weight.a, -1, numbers.rhs_spec[0]))
    precision = eqn.params["precision"]
    product = jnp.tensordot(narrow, weight.b, ((feature,), (0,)), precision=precision)
    return y + jnp.moveaxis(product, -1, feature)


def cast(eqn: Any, weight: Any) -> Adapted:
    """An adapted parameter in another type."""
    return jax.tree.map(lambda leaf: bound(eqn, leaf), weight)


def nested(eqn: Any, *args: Any) -> list[Any]:
    """A function inside another."""
    traced = inner_function(eqn)
    inner = next(iter(core.jaxprs_in_params(eqn.params)))
    args = args[len(args) - len(inner.invars) :]
    if eqn.primitive is not primitives.remat_p:
        return evaluate(traced, args, adapted_operation)

    def run(*args: Any) -> list[Any]:
        return [merged(value) for value in evaluate(traced, args, adapted_operation)]

    remat = jax.checkpoint(run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
    return remat(*args)


def inner_function(eqn: Any) -> Any:
    """The traced function in an equation, with its constants."""
    for value in eqn.params.values():
        if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
            return value
    raise ValueError(f"{eqn.primitive} has no inner function")


def loop_sizes(eqn: Any) -> tuple[int, int]:
    """Numbers of constants and of carried values of a loop."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # since JAX 0.11
    return len(list(consts.vals)), len(list(carry.vals))


def scan(eqn: Any, *args: Any) -> list[Any]:
    """A loop, such as one over stacked layers."""
    params = eqn.params
    inner = inner_function(eqn)
    num_consts, num_carry = loop_sizes(eqn)
    first_row = num_consts + num_carry
    fixed = args[:num_consts]
    start = [merged(value) for value in args[num_consts:first_row]]

    # Adapters of stacked layers are rows of the loop; others are merged.
    rows = []
    for value in args[first_row:]:
        is_row = not is_adapted(value) or value.stacked > 0
        rows.append(value if is_row else merged(value))

    def body(carry: Sequence[Any], row: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        layer = [value.slices() if is_adapted(value) else value for value in row]
        values = evaluate(inner, [*fixed, *carry, *layer], adapted_operation)
        outputs = [merged(value) for value in values]
        return outputs[:num_carry], outputs[num_carry:]

    carry, stacked = jax.lax.scan(
        body,
        start,
        rows,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


# Operation -> how it is computed with an adapted parameter; None: with the merged one
RULES: dict[Any, Callable[..., Any]] = {
    primitives.dot_general_p: dot_general,
    primitives.conv_general_dilated_p: convolution,
    primitives.convert_element_type_p: cast,
    primitives.scan_p: scan,
    **dict.fromkeys((primitives.jit_p, primitives.closed_call_p, primitives.remat_p), nested),
}
