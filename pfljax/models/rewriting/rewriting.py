"""Rewrites traced networks: other forms of convolutions and pooling, for the platform that a program is lowered to."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from pfljax.contract.types import Array, PyTree
from pfljax.models.rewriting import convolutions
from pfljax.models.rewriting.convolutions import (
    CACHE_BYTES,
    Windows,
    max_pool,
    max_pool_slope,
    sum_pool,
)
from pfljax.models.rewriting.layouts import (
    has_channels_first,
    transposed_back,
    with_channels_last,
)
from pfljax.models.rewriting.tracing import Operation, bound, equations, interpret, operate

FEW = 32  # neighbors that a sum adds last: fewer than fill a core's vectors well
MOST_VIEWS = 128  # of the positions in a window, which take time to compile

# Another form of an operation: (*arrays) -> result, and (slope of the result, *arrays) -> slopes of the arrays.
Form = tuple[Operation, Operation]


def rewritten(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """A function that computes what `fn` computes, with other forms of some operations; see `FORMS`.

    `fn` is traced once for all calls with the same shapes. Derivatives have the same forms; like these, they exist in
    reverse mode only. The function is compiled under plan=python, too, where it would be traced in any case, and each
    of its operations compiled on its own.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.models.rewriting import rewritten
        >>> rewritten(lambda x: 2 * x)(jnp.arange(3)).tolist()
        [0, 2, 4]
    """

    def run(*args: PyTree) -> PyTree:
        traced, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        leaves = jax.tree.leaves(args)
        if has_channels_first(traced.jaxpr):
            outputs = with_channels_last(traced, leaves, operate_chosen)
        else:
            outputs = evaluate(traced, leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    compiled = jax.jit(run)

    @functools.wraps(fn)
    def call(*args: PyTree) -> PyTree:
        with jax.disable_jit(False):
            return compiled(*args)

    return call


def evaluate(
    traced: Any, args: Sequence[Any], choose: Callable[[Any], Operation] | None = None
) -> list[Any]:
    """Evaluates a traced function, a jaxpr with or without constants, with other operations in place of some.

    Args:
        traced: The function.
        args: Its arguments.
        choose: Equation -> the operation that is called in its place; None: `chosen_operation`.

    Returns:
        The outputs.
    """
    choose = choose or chosen_operation

    def apply(eqn: Any, arguments: list[Any]) -> Sequence[Any]:
        return operate(eqn, arguments, choose(eqn))

    return interpret(traced, args, apply)


def operate_chosen(eqn: Any, arguments: list[Any]) -> Sequence[Any]:
    """The outputs of `chosen_operation`."""
    return operate(eqn, arguments, chosen_operation(eqn))


def chosen_operation(eqn: Any) -> Operation:
    """The operation of an equation: the equation's, or another form of it that depends on the platform.

    Its derivatives have the form that the platform has, too.
    """
    if find_forms(eqn):
        shapes = [v.aval for v in eqn.invars]
        key = repr((eqn.primitive, shapes, sorted(eqn.params.items())))
        return by_platform(Keyed(key, eqn))
    return functools.partial(bound, eqn, **rewritten_params(eqn))


def rewritten_params(eqn: Any) -> dict[str, Any]:
    """The parameters of an equation with functions inside, rewritten; {} if they stay as they are."""
    platforms = eqn.params.get("branches_platforms")
    if platforms:
        # A branch that is written for a platform stays as it is.
        branches = [
            branch if names else rewritten_trace(branch)
            for branch, names in zip(eqn.params["branches"], platforms, strict=True)
        ]
        return {"branches": tuple(branches)}
    if eqn.primitive in NESTED:
        return jax.tree.map(rewritten_trace, eqn.params)
    return {}


@dataclasses.dataclass(frozen=True)
class Keyed:
    """An equation that equals others of the same operation, shapes and parameters."""

    key: str
    eqn: Any = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=1024)  # so that JAX traces equal operations once
def by_platform(keyed: Keyed) -> Operation:
    """An operation in the form of the platform that it is lowered to."""
    eqn = keyed.eqn
    native = functools.partial(bound, eqn)
    forms = {"default": (native, derivative(native))} | find_forms(eqn)
    applies = {platform: apply for platform, (apply, _) in forms.items()}
    pulls = {platform: pull for platform, (_, pull) in forms.items()}
    apply = jax.jit(functools.partial(jax.lax.platform_dependent, **applies))
    pull = jax.jit(functools.partial(jax.lax.platform_dependent, **pulls))

    def forward(*args: Any) -> tuple[Any, tuple[Any, ...]]:
        return apply(*args), args

    def backward(args: tuple[Any, ...], slope: Any) -> Any:
        return pull(slope, *args)

    operation = jax.custom_vjp(apply)
    operation.defvjp(forward, backward)
    return operation


def derivative(apply: Operation) -> Operation:
    """(Slope of the result of `apply`, *arrays) -> slopes of the arrays."""

    def pull(slope: Any, *args: Any) -> Any:
        _, pull_back = jax.vjp(apply, *args)
        return pull_back(slope)

    return pull


def rewritten_trace(value: Any) -> Any:
    """A traced function with other forms of some operations; any other value as it is."""
    if not isinstance(value, core.Jaxpr | core.ClosedJaxpr):
        return value
    if not any(find_forms(eqn) for eqn in equations(value)):
        return value
    # JAX 0.10 tells traced functions with constants from those without.
    jaxpr = getattr(value, "jaxpr", value)
    shapes = [v.aval for v in jaxpr.invars]
    new = jax.make_jaxpr(lambda *args: evaluate(value, args))(*shapes)
    return new if isinstance(new, type(value)) else new.jaxpr


def convolution(eqn: Any, cache: int = CACHE_BYTES, sharing: bool = True) -> Form | None:
    """A convolution as patches times a matrix; None if it has no spatial axes, or too large windows.

    `cache` is as in `Windows`.
    """
    x, kernel = [v.aval for v in eqn.invars]
    params = eqn.params
    numbers = params["dimension_numbers"]
    windows = Windows(
        size=tuple(kernel.shape[axis] for axis in numbers.rhs_spec[2:]),
        strides=params["window_strides"],
        dilation=params["rhs_dilation"],
        padding=params["padding"],
        spread=params["lhs_dilation"],
        groups=params["feature_group_count"],
        cache=cache,
        sharing=sharing,
    )
    if params["batch_group_count"] != 1 or params["preferred_element_type"] not in (None, x.dtype):
        return None
    is_tiled = windows.tile([x.shape[axis] for axis in numbers.lhs_spec[2:]])
    if not has_views(eqn, windows, is_tiled):
        return None

    # Axes in the order that `convolve` expects: (B, *S, C), (*W, C, O) or (O, *W, C), and (B, *S', O).
    batch, feature, *spatial = numbers.lhs_spec
    x_order = (batch, *spatial, feature)
    outputs, inputs, *spatial = numbers.rhs_spec
    kernel_order = (*spatial, inputs, outputs)
    if outputs == 0 and is_matrix(x.shape, kernel.shape, x_order, kernel_order, windows):
        kernel_order = (outputs, *spatial, inputs)
        windows = windows._replace(outputs_first=True)
    batch, feature, *spatial = numbers.out_spec
    y_order = (batch, *spatial, feature)

    def apply(x: Array, kernel: Array) -> Array:
        y = convolutions.convolve(x.transpose(x_order), kernel.transpose(kernel_order), windows)
        return transposed_back(y, y_order)

    def pull(dy: Array, x: Array, kernel: Array) -> tuple[Array, Array]:
        dx, dkernel = convolutions.slopes(
            dy.transpose(y_order), x.transpose(x_order), kernel.transpose(kernel_order), windows
        )
        return transposed_back(dx, x_order), transposed_back(dkernel, kernel_order)

    return apply, pull


def is_matrix(
    shape: Sequence[int],
    kernel_shape: Sequence[int],
    x_order: Sequence[int],
    kernel_order: Sequence[int],
    windows: Windows,
) -> bool:
    """Whether a convolution is the product of patches and the kernel as it is, so that kernels may be (O, *W, C)."""
    x_shape = [shape[axis] for axis in x_order]
    ordered = [kernel_shape[axis] for axis in kernel_order]
    is_plain = windows.groups == 1 and set(windows.spread) == {1}
    return is_plain and convolutions.neighbors(x_shape, ordered, windows) is None


def for_stacks(form: Callable[[Any], Form | None], eqn: Any) -> Form | None:
    """A form for stacked clients only. For one client's arrays, an operation stays XLA's own.

    An operation has the form if its last array (a kernel) is stacked, its gradients have it if any array is.
    """
    native = functools.partial(bound, eqn)
    other = form(eqn)
    if other is None:
        return None
    apply, pull = other
    ranks = [v.aval.ndim for v in eqn.invars]
    ranks_of_results = [v.aval.ndim for v in eqn.outvars]

    def vectorized_apply(fn: Operation) -> Operation:
        return stackable(fn, ranks, ranks_of_results)

    def vectorized_pull(fn: Operation) -> Operation:
        return stackable(fn, ranks_of_results + ranks, ranks)

    def is_kernel_stacked(stacked: Sequence[bool]) -> bool:
        return stacked[-1]

    return (
        by_stacks(vectorized_apply(native), vectorized_apply(apply), is_kernel_stacked),
        by_stacks(vectorized_pull(derivative(native)), vectorized_pull(pull), any),
    )


def stackable(fn: Operation, ranks: Sequence[int], ranks_of_results: Sequence[int]) -> Operation:
    """A function of arrays with these numbers of axes, and results with these, that takes stacks of some, too."""

    def signature(name: str, ranks: Sequence[int]) -> str:
        arrays = []
        for number, rank in enumerate(ranks):
            axes = ",".join(f"{name}{number}_{axis}" for axis in range(rank))
            arrays.append(f"({axes})")
        return ",".join(arrays)

    text = f"{signature('x', ranks)}->{signature('y', ranks_of_results)}"
    return jnp.vectorize(fn, signature=text)


def by_stacks(
    single: Operation, stacks: Operation, choose: Callable[[Sequence[bool]], bool]
) -> Operation:
    """An operation that is `stacks` if `choose`, which gets which arrays are stacked, says so, or else `single`."""
    operation = jax.custom_batching.custom_vmap(lambda *args: single(*args))

    @operation.def_vmap
    def _(size: int, stacked: Sequence[bool], *args: Any) -> tuple[Any, Any]:
        del size
        y = stacks(*args) if choose(stacked) else single(*args)
        return y, jax.tree.map(lambda _: True, y)

    return operation


def pooling(pool: Operation, slope: Operation | None, eqn: Any) -> Form | None:
    """Pooling over views; None if windows span examples or channels, are too large, or overlap where XLA is faster.

    The channels are the last axis or, as in PyTorch, the one after the examples.
    """
    params = eqn.params
    names = ("window_dimensions", "window_strides", "window_dilation", "padding", "base_dilation")
    fields = [params[name] for name in names]
    num_axes = len(params["window_dimensions"])
    spatial = [axis for axis in range(num_axes) if not is_neutral(fields, axis)]
    if 0 in spatial or len(spatial) > num_axes - 2:
        return None
    channels = num_axes - 1
    if channels in spatial:
        channels = 1
    if channels in spatial:
        return None
    axes = [axis for axis in range(1, num_axes) if axis != channels]
    order = (0, *axes, channels)
    size, strides, dilation, padding, spread = [
        tuple(field[axis] for axis in axes) for field in fields
    ]
    windows = Windows(size, strides, dilation, padding, spread)
    shape = [eqn.invars[0].aval.shape[axis] for axis in axes]
    # XLA has no gradients of the maximum of windows with dilation.
    is_dilated = set(windows.dilation) != {1}
    is_slow = slope is not None and set(windows.strides) == {1} and not is_dilated
    is_tiled = slope is None and windows.tile(shape)
    if set(windows.spread) != {1} or is_slow or not has_views(eqn, windows, is_tiled):
        return None

    def apply(x: Array) -> Array:
        return transposed_back(pool(x.transpose(order), windows), order)

    def pull(dy: Array, x: Array) -> tuple[Array]:
        assert slope is not None
        (dx,) = slope(dy.transpose(order), x.transpose(order), windows)
        return (transposed_back(dx, order),)

    return apply, derivative(apply) if slope is None else pull


def dilated_pooling(eqn: Any) -> Form | None:
    """The maximum of windows with dilation; None for windows without."""
    if set(eqn.params["window_dilation"]) == {1}:
        return None
    return pooling(max_pool, max_pool_slope, eqn)


def is_neutral(fields: Sequence[Any], axis: int) -> bool:
    """Whether windows have one position along an axis; the fields are as in `Windows`."""
    size, stride, dilation, padding, spread = (field[axis] for field in fields)
    return size == stride == dilation == spread == 1 and tuple(padding) == (0, 0)


def outer_first(eqn: Any) -> Form | None:
    """A sum over axes on both sides of the last axis that stays, such as group norm's: first over those before it.

    This adds whole rows; XLA adds a few neighbors at a time.
    """
    x = eqn.invars[0].aval
    axes = eqn.params["axes"]
    remaining = [axis for axis in range(x.ndim) if axis not in axes]
    if not remaining:
        return None
    last = remaining[-1]
    before = [axis for axis in axes if axis < last]
    width = math.prod(x.shape[last + 1 :])
    if not (before and 1 < width <= FEW and jnp.issubdtype(x.dtype, jnp.floating)):
        return None
    shape = [x.shape[axis] for axis in remaining]

    def apply(x: Array) -> Array:
        rows = x.reshape(*x.shape[:last], x.shape[last] * width)
        rows = bound(eqn, rows, axes=tuple(before))
        return bound(eqn, rows.reshape(*shape, width), axes=(len(shape),))

    return apply, derivative(apply)


def flattened(eqn: Any) -> Form | None:
    """A product of arrays as one of matrices, whose gradients, unlike the arrays', XLA computes fast."""
    (left, right), batch = eqn.params["dimension_numbers"]
    a, b = (v.aval.shape for v in eqn.invars)
    num = len(left)
    last_axes = tuple(range(len(a) - num, len(a)))
    first_axes = tuple(range(num))
    is_plain = not any(batch) and (*left,) == last_axes and (*right,) == first_axes
    are_matrices = len(a) == len(b) == 2
    if not is_plain or are_matrices or num == 0:
        return None
    rows = math.prod(a[: len(a) - num])
    inner = math.prod(b[:num])
    columns = math.prod(b[num:])
    numbers = ((1,), (0,)), ((), ())

    def apply(x: Array, y: Array) -> Array:
        left = x.reshape(rows, inner)
        right = y.reshape(inner, columns)
        product = bound(eqn, left, right, dimension_numbers=numbers)
        return product.reshape(eqn.outvars[0].aval.shape)

    return apply, derivative(apply)


def in_rows(eqn: Any) -> Form | None:
    """An elementwise operation on short rows, such as a group's channels, as one on longer rows."""
    *shape, width = eqn.invars[0].aval.shape or [0]
    if not (len(shape) > 1 and 1 < width <= FEW):
        return None

    def apply(x: Array) -> Array:
        rows = x.reshape(*shape[:-1], shape[-1] * width)
        return bound(eqn, rows).reshape(x.shape)

    return apply, derivative(apply)


def one_by_one(eqn: Any) -> Form:
    """Stacked clients' operations in turn. Side by side, LAPACK's may wait for each other forever on few cores."""
    apply = jax.custom_batching.sequential_vmap(lambda *args: bound(eqn, *args))
    return apply, derivative(apply)


def in_a_row(eqn: Any) -> Form | None:
    """Random bits drawn as a vector: the same bits, and programs that compile faster."""
    shape = eqn.params["shape"]

    if len(shape) <= 1:
        return None

    def draw(key: Array) -> Array:
        return bound(eqn, key, shape=(math.prod(shape),)).reshape(shape)

    return draw, derivative(draw)


def has_views(eqn: Any, windows: Windows, tiled: bool) -> bool:
    """Whether an operation's windows are few views of real numbers, which compile fast, or tiles."""
    dtypes = {v.aval.dtype for v in eqn.invars}
    are_few = tiled or math.prod(windows.size) <= MOST_VIEWS
    are_real = len(dtypes) == 1 and all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return bool(are_few and are_real and windows.size and eqn.outvars[0].aval.size)


# Platform -> operation -> the form of an equation there, or None. Where a platform has none, XLA's own is used.
FORMS: dict[str, dict[Any, Callable[[Any], Form | None]]] = {
    "cpu": {
        primitives.conv_general_dilated_p: convolution,
        primitives.reduce_window_max_p: functools.partial(pooling, max_pool, max_pool_slope),
        primitives.reduce_window_sum_p: functools.partial(pooling, sum_pool, None),
        primitives.reduce_sum_p: outer_first,
        primitives.square_p: in_rows,
        primitives.dot_general_p: flattened,
        primitives.random_bits_p: in_a_row,
        primitives.qr_p: one_by_one,  # in orthogonal initial values
    },
    # Stacked clients' convolutions are XLA's of groups of channels, half as fast as patches on an H100 or less.
    "cuda": {
        primitives.conv_general_dilated_p: functools.partial(
            for_stacks, functools.partial(convolution, cache=1 << 62, sharing=False)
        ),
    },
    "default": {primitives.reduce_window_max_p: dilated_pooling},  # all other platforms
}


def find_forms(eqn: Any) -> dict[str, Form]:
    """Platform -> the other form that an equation has there."""
    forms = {}
    for platform, makers in FORMS.items():
        maker = makers.get(eqn.primitive)
        form = maker(eqn) if maker else None
        if form:
            forms[platform] = form
    return forms


@contextlib.contextmanager
def use_forms(platform: str, source: str | None) -> Iterator[None]:
    """Within this context, what is traced has another platform's forms on a platform.

    Args:
        platform: The platform, such as "cpu".
        source: The platform whose forms it gets, "cpu" or "cuda"; None: XLA's own forms.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.models.rewriting import rewritten, use_forms
        >>> with use_forms("cpu", None):
        ...     rewritten(jnp.square)(jnp.arange(3)).tolist()
        [0, 1, 4]
    """
    before = dict(FORMS)
    FORMS[platform] = FORMS[source] if source else {}
    by_platform.cache_clear()
    try:
        yield
    finally:
        FORMS.clear()
        FORMS.update(before)
        by_platform.cache_clear()


# Platform -> times that XLA's forms take longer there than ours, forward and backward
# (docs/results/speed-networks.md).
SLOWDOWNS = {"cpu": {"conv_general_dilated": 5, "reduce_window_min": 3, "reduce_window": 3}}


def slow_layers(jaxpr: Any, names: Sequence[str], platform: str) -> Iterator[str]:
    """The layers that keep a slow form on a platform, and how slow it is: "Conv_3: 31 x 31, native: about 9 x".

    `names` has the layer of each input of the network, "" for what belongs to no layer.
    """
    layers = dict(zip(jaxpr.invars, names, strict=True))
    for eqn in jaxpr.eqns:
        operands = [layers.get(v, "") if isinstance(v, core.Var) else "" for v in eqn.invars]
        if len(operands) == 1:  # a kernel that is cast or laid out anew
            layers |= dict.fromkeys(eqn.outvars, operands[0])
        times = SLOWDOWNS.get(platform, {}).get(eqn.primitive.name)
        if times and platform not in find_forms(eqn):
            size = eqn.params.get("window_dimensions", eqn.invars[-1].aval.shape)
            default = str(eqn.source_info.name_stack) or eqn.primitive.name
            layer = next(filter(None, operands), default)
            yield f"{layer}: {' x '.join(map(str, size))}, native: about {times} x"
        if eqn.primitive in NESTED:
            for inner in core.jaxprs_in_params(eqn.params):
                # Of a branch, the choice comes first.
                arguments = operands[len(operands) - len(inner.invars) :]
                yield from slow_layers(inner, arguments, platform)


# Operations whose insides are rewritten. Derivatives that functions define themselves stay as they are.
NESTED = {
    primitives.jit_p,
    primitives.closed_call_p,
    primitives.remat_p,
    primitives.scan_p,
    primitives.while_p,
    primitives.cond_p,
    primitives.custom_jvp_call_p,
    primitives.custom_vjp_call_p,
}
