"""Images with their channels first, as in PyTorch, computed with their channels last.

Convolutions of CPUs have their channels last. Between two of them, PyTorch's images would be transposed forth and back,
once for each operation that is not a convolution. Here an image stays as a convolution leaves it, through all that does
not depend on the order of axes: it is `Moved`, its axes in another order than the program's. It is transposed where
something else needs it, such as the dense layer behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from pfljax.contract.types import Array
from pfljax.models.rewriting.tracing import Apply, bound, equations, interpret

Order = tuple[int, ...]


class Moved(NamedTuple):
    """A value whose axes are stored in another order.

    Attributes:
        array: `value.transpose(order)`.
        order: For each axis of the array, the value's.
    """

    array: Array
    order: Order

    @property
    def value(self) -> Array:
        """The value."""
        return transposed_back(self.array, self.order)


def transposed_back(array: Array, order: Sequence[int]) -> Array:
    """Undoes `array.transpose(order)`."""
    return array.transpose([order.index(axis) for axis in range(array.ndim)])


def moved(array: Array, order: Order) -> Array | Moved:
    """The value that is `array` if its axes are in this order."""
    return array if order == tuple(range(len(order))) else Moved(array, order)


def value_of(value: Any) -> Any:
    """A value as the program has it."""
    return value.value if isinstance(value, Moved) else value


def ordered(value: Any, order: Order) -> Any:
    """`value.transpose(order)`; scalars as they are."""
    if isinstance(value, Moved):
        axes = [value.order.index(axis) for axis in order]
        return value.array if axes == sorted(axes) else value.array.transpose(axes)
    return value if jnp.ndim(value) == 0 else jnp.transpose(value, order)


def has_channels_first(jaxpr: Any) -> bool:
    """Whether a function has convolutions of images whose channels are not last."""
    return any(map(is_channels_first, equations(jaxpr)))


def is_channels_first(eqn: Any) -> bool:
    """Whether an equation is such a convolution."""
    if eqn.primitive is not primitives.conv_general_dilated_p:
        return False
    numbers = eqn.params["dimension_numbers"]
    num_axes = len(numbers.lhs_spec)
    return num_axes > 2 and numbers.lhs_spec[1] != num_axes - 1


def with_channels_last(traced: Any, args: Sequence[Any], plain: Apply) -> list[Any]:
    """Evaluates a traced function, with images as convolutions leave them.

    Args:
        traced: The function.
        args: Its arguments.
        plain: Evaluates an equation on arrays.

    Returns:
        The outputs.
    """
    return [value_of(output) for output in interpret(traced, args, applied(plain))]


def applied(plain: Apply) -> Apply:
    """`plain`, for arguments that may be `Moved`."""

    def changed(eqn: Any, *arrays: Any, **params: Any) -> Any:
        """The output of an equation on other arrays, with other parameters."""

        def operation(*arrays: Any) -> Any:
            return bound(eqn, *arrays, **params)

        (output,) = interpret(jax.make_jaxpr(operation)(*arrays), arrays, plain)
        return output

    def apply(eqn: Any, arguments: list[Any]) -> Sequence[Any]:
        has_moved = bool(only_moved(arguments))
        inner = eqn.params.get("jaxpr") if eqn.primitive is primitives.jit_p else None
        outputs = None
        if has_moved and is_elementwise(eqn):
            outputs = elementwise(eqn, arguments, plain)
        elif inner is not None and (has_moved or has_channels_first(inner.jaxpr)):
            outputs = interpret(inner, arguments, apply)
        elif is_channels_first(eqn):
            outputs = [convolution(eqn, arguments, changed)]
        elif eqn.primitive is primitives.transpose_p and len(eqn.params["permutation"]) > 2:
            outputs = [transposed(arguments[0], eqn.params["permutation"])]
        elif has_moved and eqn.primitive in RULES:
            output = RULES[eqn.primitive](eqn, arguments, changed)
            outputs = None if output is None else [output]
        if outputs is None:
            outputs = plain(eqn, [value_of(argument) for argument in arguments])
        return outputs

    return apply


# ---- Operations on arrays whose axes are in another order. They return None if they need the program's order.

Changed = Callable[..., Any]


def transposed(value: Any, permutation: Sequence[int]) -> Array | Moved:
    """A value whose axes are permuted, without moving anything."""
    order = tuple(range(len(permutation)))
    if isinstance(value, Moved):
        value, order = value
    return moved(value, tuple(list(permutation).index(axis) for axis in order))


def convolution(eqn: Any, arguments: Sequence[Any], changed: Changed) -> Array | Moved:
    """A convolution with the channels last."""
    x, kernel = arguments
    numbers = eqn.params["dimension_numbers"]
    num_axes = len(numbers.lhs_spec)
    last = (0, num_axes - 1, *range(1, num_axes - 1))

    batch, feature, *spatial = numbers.lhs_spec
    x = ordered(x, (batch, *spatial, feature))
    batch, feature, *spatial = numbers.out_spec
    y_order = (batch, *spatial, feature)
    new = type(numbers)(lhs_spec=last, rhs_spec=numbers.rhs_spec, out_spec=last)
    return moved(changed(eqn, x, value_of(kernel), dimension_numbers=new), y_order)


def elementwise(eqn: Any, arguments: Sequence[Any], plain: Apply) -> list[Any] | None:
    """An operation on each element. None if no value that is `Moved` has all elements."""
    num_elements = eqn.outvars[0].aval.size
    if max(jnp.size(array) for array, _ in only_moved(arguments)) < num_elements:
        return None
    order = order_of_largest(arguments)
    arrays = [ordered(argument, order) for argument in arguments]
    if eqn.primitive.name in ELEMENTWISE:
        return [moved(output, order) for output in plain(eqn, arrays)]

    # A function of several operations is traced for arrays of the program's shape. These have as many elements.
    shape = eqn.outvars[0].aval.shape
    moved_shape = tuple(shape[axis] for axis in order)
    reshaped = [array if jnp.ndim(array) == 0 else array.reshape(shape) for array in arrays]
    return [moved(output.reshape(moved_shape), order) for output in plain(eqn, reshaped)]


def pooling(eqn: Any, arguments: Sequence[Any], changed: Changed) -> Moved | Array:
    """The sum or maximum of each window."""
    ((array, order),) = arguments
    names = ("window_dimensions", "window_strides", "window_dilation", "padding", "base_dilation")
    params = {name: tuple(eqn.params[name][axis] for axis in order) for name in names}
    return moved(changed(eqn, array, **params), order)


def reduction(eqn: Any, arguments: Sequence[Any], changed: Changed) -> Moved | Array:
    """A sum, maximum or minimum over axes."""
    ((array, order),) = arguments
    axes = eqn.params["axes"]
    output = changed(eqn, array, axes=tuple(sorted(order.index(axis) for axis in axes)))
    return moved(output, without(order, axes))


def without(order: Order, axes: Sequence[int]) -> Order:
    """The order of the other axes, which are numbered anew."""
    remaining = [axis for axis in order if axis not in axes]
    return tuple(sorted(remaining).index(axis) for axis in remaining)


def squeezed(eqn: Any, arguments: Sequence[Any], changed: Changed) -> Moved | Array:
    """An array without some axes of size 1."""
    ((array, order),) = arguments
    axes = eqn.params["dimensions"]
    output = changed(eqn, array, dimensions=tuple(sorted(order.index(axis) for axis in axes)))
    return moved(output, without(order, axes))


def concatenated(eqn: Any, arguments: Sequence[Any], changed: Changed) -> Moved | Array:
    """Arrays side by side."""
    order = order_of_largest(arguments)
    arrays = [ordered(argument, order) for argument in arguments]
    return moved(changed(eqn, *arrays, dimension=order.index(eqn.params["dimension"])), order)


def padded(eqn: Any, arguments: Sequence[Any], changed: Changed) -> Moved | Array | None:
    """An array with margins."""
    x, value = arguments
    if not isinstance(x, Moved):
        return None
    config = tuple(eqn.params["padding_config"][axis] for axis in x.order)
    return moved(changed(eqn, x.array, value_of(value), padding_config=config), x.order)


def sliced(eqn: Any, arguments: Sequence[Any], changed: Changed) -> Moved | Array:
    """A part of an array."""
    ((array, order),) = arguments
    params = {}
    for name in ("start_indices", "limit_indices", "strides"):
        values = eqn.params[name]
        params[name] = None if values is None else tuple(values[axis] for axis in order)
    return moved(changed(eqn, array, **params), order)


def with_sizes(eqn: Any, arguments: Sequence[Any], changed: Changed) -> Moved | Array | None:
    """An array some of whose axes are split or merged; None if merged axes do not follow each other."""
    x = arguments[0]
    if eqn.params["dimensions"] is not None or not isinstance(x, Moved):
        return None
    shape = eqn.invars[0].aval.shape
    if 0 in shape:
        return None
    groups = list(groups_of_axes(shape, eqn.params["new_sizes"]))

    # The array's axes, in groups.
    remaining = list(x.order)
    order: list[int] = []
    while remaining:
        before, after = next(group for group in groups if remaining[0] in group[0])
        if remaining[: len(before)] != before:
            return None
        remaining = remaining[len(before) :]
        order += after
    if len(order) < len(eqn.params["new_sizes"]):
        return None
    sizes = tuple(eqn.params["new_sizes"][axis] for axis in order)
    return moved(changed(eqn, x.array, new_sizes=sizes), tuple(order))


def groups_of_axes(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest groups of axes of two shapes that have equally many elements, in order."""
    first = 0
    second = 0
    while first < len(before):
        start = first
        new_start = second
        first += 1
        second += second < len(after)
        while math.prod(before[start:first]) != math.prod(after[new_start:second]):
            if math.prod(before[start:first]) < math.prod(after[new_start:second]):
                first += 1
            else:
                second += 1
        yield list(range(start, first)), list(range(new_start, second))


def order_of_largest(arguments: Sequence[Any]) -> Order:
    """The order of the largest value that is `Moved`."""
    return max(only_moved(arguments), key=lambda value: value.array.size).order


def only_moved(arguments: Sequence[Any]) -> list[Moved]:
    """The values that are `Moved`."""
    return [argument for argument in arguments if isinstance(argument, Moved)]


RULES: dict[Any, Callable[..., Any]] = {
    primitives.concatenate_p: concatenated,
    primitives.pad_p: padded,
    primitives.reduce_max_p: reduction,
    primitives.reduce_min_p: reduction,
    primitives.reduce_sum_p: reduction,
    primitives.reduce_window_max_p: pooling,
    primitives.reduce_window_min_p: pooling,
    primitives.reduce_window_sum_p: pooling,
    primitives.reshape_p: with_sizes,
    primitives.slice_p: sliced,
    primitives.squeeze_p: squeezed,
}

# ---- Which operations are elementwise.

# Those whose parameters do not depend on shapes.
ELEMENTWISE = frozenset(
    [
        "abs",
        "add",
        "and",
        "cbrt",
        "ceil",
        "clamp",
        "convert_element_type",
        "copy",
        "cos",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "integer_pow",
        "is_finite",
        "le",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "not",
        "or",
        "pow",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "sign",
        "sin",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "xor",
    ]
)


def is_elementwise(eqn: Any) -> bool:
    """Whether an equation computes each element of its outputs from the same element of its inputs, or scalars."""
    if eqn.primitive.name in ELEMENTWISE:
        return True
    shapes = {v.aval.shape for v in eqn.outvars}
    return len(shapes) == 1 and is_of_shape(eqn, *shapes)


def is_of_shape(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Whether an equation is elementwise on arrays of this shape and scalars, or repeats a scalar."""
    inputs = {v.aval.shape for v in eqn.invars}
    outputs = {v.aval.shape for v in eqn.outvars}
    if not inputs | outputs <= {shape, ()}:
        return False
    if eqn.primitive is primitives.broadcast_in_dim_p:
        return inputs == {()}
    if eqn.primitive in (primitives.jit_p, primitives.custom_jvp_call_p):
        inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
        # The derivatives that a user's function defines may depend on the order of axes. JAX's activations' do not.
        is_own = eqn.primitive is primitives.custom_jvp_call_p
        if is_own and "jax/_src/nn/" not in str(inner.jaxpr.debug_info.func_src_info):
            return False
        are_scalars = all(jnp.ndim(const) == 0 for const in inner.consts)
        return are_scalars and all(is_of_shape(part, shape) for part in inner.jaxpr.eqns)
    return eqn.primitive.name in ELEMENTWISE
