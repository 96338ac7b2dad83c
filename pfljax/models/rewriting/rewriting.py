"""Rewrites traced networks: other forms of convolutions and pooling, for the platform that a program is lowered to."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives
from jax.interpreters import partial_eval

from pfljax.contract.types import PyTree
from pfljax.models.rewriting import convolutions, winograd
from pfljax.models.rewriting.convolutions import (
    CACHE_BYTES,
    Windows,
    max_pool,
    max_pool_slope,
    sum_pool,
)

FEW = 32  # neighbors that a sum adds last: fewer than fill a core's vectors well
MOST_PLACES = 128  # in a window; each is a view, which takes time to compile

Operation = Callable[..., Any]
# Another form of an operation: (*arrays) -> result, and (slope of the result, *arrays) -> slopes of the arrays.
Form = tuple[Operation, Operation]


def rewritten(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """A function that computes what `fn` computes, with other forms of some operations; see `FORMS`.

    `fn` is traced once for all calls with the same shapes. Derivatives have the same forms; like these, they exist in
    reverse mode only. The function is compiled under plan=python, too, where it would be traced in any case, and each
    of its operations compiled on its own.
    """

    def run(*args: PyTree) -> PyTree:
        traced, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        outputs = evaluate(traced, jax.tree.leaves(args))
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

    `choose` says what is called in place of an equation; by default `operation_of`.
    """
    choose = choose or operation_of
    # Equations that no output needs are left out: initial values, for instance, need no forward pass.
    jaxpr, _ = partial_eval.dce_jaxpr(getattr(traced, "jaxpr", traced), True, instantiate=True)
    values = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*getattr(traced, "consts", ()), *args], strict=True)
    )

    def read(v):
        return v.val if isinstance(v, core.Literal) else values[v]

    for eqn in jaxpr.eqns:
        with eqn.ctx.manager, jax.named_scope(str(eqn.source_info.name_stack)):
            outputs = choose(eqn)(*map(read, eqn.invars))
        values.update(
            zip(eqn.outvars, outputs if eqn.primitive.multiple_results else [outputs], strict=True)
        )
    return [read(v) for v in jaxpr.outvars]


def bound(eqn: Any, *args: Any, **changed: Any) -> Any:
    """An equation's own operation on other arguments, some of its parameters changed."""
    return eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params | changed))


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of those inside them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def operation_of(eqn: Any) -> Operation:
    """The operation of an equation: its own, or another form of it that depends on the platform.

    Its derivatives have the form that the platform has, too.
    """
    if forms_of(eqn):
        key = repr((eqn.primitive, [v.aval for v in eqn.invars], sorted(eqn.params.items())))
        return by_platform(Keyed(key, eqn))
    # what is written for one platform stays as it is
    if platforms := eqn.params.get("branches_platforms"):
        pairs = zip(eqn.params["branches"], platforms, strict=True)
        params = {
            "branches": tuple(
                branch if named else rewritten_trace(branch) for branch, named in pairs
            )
        }
    else:
        params = jax.tree.map(rewritten_trace, eqn.params) if eqn.primitive in NESTED else {}
    return lambda *args: bound(eqn, *args, **params)


@dataclasses.dataclass(frozen=True)
class Keyed:
    """An equation that equals others of the same operation, shapes and parameters."""

    key: str
    eqn: Any = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=1024)  # so that JAX traces equal operations once
def by_platform(keyed: Keyed) -> Operation:
    """An operation in the form of the platform that it is lowered to."""
    eqn = keyed.eqn
    own = functools.partial(bound, eqn)
    forms = forms_of(eqn) | {"default": (own, derivative(own))}

    def on(n):
        return functools.partial(
            jax.lax.platform_dependent, **{name: form[n] for name, form in forms.items()}
        )

    apply = jax.jit(on(0))
    slopes = jax.jit(on(1))
    operation = jax.custom_vjp(apply)
    operation.defvjp(lambda *args: (apply(*args), args), lambda args, slope: slopes(slope, *args))
    return operation


def derivative(apply: Operation) -> Operation:
    """(Slope of the result of `apply`, *arrays) -> slopes of the arrays."""
    return lambda slope, *args: jax.vjp(apply, *args)[1](slope)


def rewritten_trace(value: Any) -> Any:
    """A traced function with other forms of some operations; any other value as it is."""
    if not isinstance(value, core.Jaxpr | core.ClosedJaxpr) or not any(
        map(forms_of, equations(value))
    ):
        return value
    # JAX 0.10 tells traced functions with constants from those without
    jaxpr = getattr(value, "jaxpr", value)
    new = jax.make_jaxpr(lambda *args: evaluate(value, args))(*(v.aval for v in jaxpr.invars))
    return new if isinstance(new, type(value)) else new.jaxpr


def convolution(eqn: Any, cache: int = CACHE_BYTES, fewer_products: bool = True) -> Form | None:
    """A convolution as patches times a matrix; None if it has no spatial axes, or too large windows.

    `cache` is as in `Windows`; `fewer_products` allows Winograd's form.
    """
    (x, kernel) = [v.aval for v in eqn.invars]
    params = eqn.params
    numbers = eqn.params["dimension_numbers"]
    size = tuple(kernel.shape[axis] for axis in numbers.rhs_spec[2:])
    names = ("window_strides", "rhs_dilation", "padding", "lhs_dilation", "feature_group_count")
    windows = Windows(size, *(params[name] for name in names), cache=cache)
    known = params["batch_group_count"] == 1 and params["preferred_element_type"] in (None, x.dtype)
    if not (
        known
        and has_views(eqn, windows, windows.tile([x.shape[axis] for axis in numbers.lhs_spec[2:]]))
    ):
        return None
    # Axes in the order that `convolve` expects: (B, *S, C) and (*W, C, O).
    of_x, of_y = ((spec[0], *spec[2:], spec[1]) for spec in (numbers.lhs_spec, numbers.out_spec))
    of_kernel = (*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0])

    def back(array, order):
        return array.transpose([order.index(axis) for axis in range(array.ndim)])

    fewer = winograd.pays(
        [x.shape[axis] for axis in of_x], kernel.shape[numbers.rhs_spec[0]], windows
    )
    form = winograd if fewer and fewer_products and x.dtype == jnp.float32 else convolutions

    def apply(x, kernel):
        return back(form.convolve(x.transpose(of_x), kernel.transpose(of_kernel), windows), of_y)

    def pull(dy, x, kernel):
        dx, dkernel = form.slopes(
            dy.transpose(of_y), x.transpose(of_x), kernel.transpose(of_kernel), windows
        )
        return back(dx, of_x), back(dkernel, of_kernel)

    return apply, pull


def for_stacks(form: Callable[[Any], Form | None], eqn: Any) -> Form | None:
    """A form for stacked clients only. For one client's arrays, an operation stays XLA's own.

    An operation has the form if its last array (a kernel) is stacked, its gradients have it if any array is.
    """
    own = functools.partial(bound, eqn)
    other = form(eqn)
    if other is None:
        return None
    given, made = ([v.aval.ndim for v in values] for values in (eqn.invars, eqn.outvars))

    def apply(fn):
        return stackable(fn, given, made)

    def slopes(fn):
        return stackable(fn, made + given, given)

    return (
        _by_stacks(apply(own), apply(other[0]), lambda stacked: stacked[-1]),
        _by_stacks(slopes(derivative(own)), slopes(other[1]), any),
    )


def stackable(fn: Operation, given: Sequence[int], made: Sequence[int]) -> Operation:
    """A function of arrays, with `given` and `made` numbers of axes, that takes stacks of some of them, too."""

    def one(name, rank):
        return "(" + ",".join(f"{name}_{axis}" for axis in range(rank)) + ")"

    def all_of(name, ranks):
        return ",".join(one(f"{name}{n}", rank) for n, rank in enumerate(ranks))

    return jnp.vectorize(fn, signature=f"{all_of('x', given)}->{all_of('y', made)}")


def _by_stacks(
    one: Operation, many: Operation, choose: Callable[[Sequence[bool]], bool]
) -> Operation:
    """An operation that is `many` if `choose`, given which arrays are stacked, says so, and otherwise `one`."""
    operation = jax.custom_batching.custom_vmap(lambda *args: one(*args))

    @operation.def_vmap
    def _(size: int, stacked: Sequence[bool], *args: Any) -> tuple[Any, Any]:
        y = (many if choose(stacked) else one)(*args)
        return y, jax.tree.map(lambda _: True, y)

    return operation


def pooling(pool: Operation, slope: Operation | None, eqn: Any) -> Form | None:
    """Pooling over views; None if windows span examples or channels, are too large, or overlap where XLA is faster."""
    names = ("window_dimensions", "window_strides", "window_dilation", "padding", "base_dilation")
    fields = [eqn.params[name] for name in names]
    windows = Windows(*[field[1:-1] for field in fields])
    within = [(field[0], field[-1]) for field in fields] == [(1, 1)] * 3 + [
        ((0, 0), (0, 0)),
        (1, 1),
    ]
    tiled = slope is None and windows.tile(eqn.invars[0].aval.shape[1:-1])
    faster = set(windows.spread) == {1} and (slope is None or set(windows.strides) != {1})
    if not (within and faster and has_views(eqn, windows, tiled)):
        return None

    def apply(x):
        return pool(x, windows)

    return apply, derivative(apply) if slope is None else lambda dy, x: slope(dy, x, windows)


def outer_first(eqn: Any) -> Form | None:
    """A sum over axes on both sides of the last axis that stays, such as group norm's: first over those before it.

    This adds whole rows; XLA adds a few neighbors at a time.
    """
    x = eqn.invars[0].aval
    axes = eqn.params["axes"]
    *others, last = [axis for axis in range(x.ndim) if axis not in axes] or [-1]
    before = [axis for axis in axes if axis < last]
    width = math.prod(x.shape[last + 1 :])
    if not (before and 1 < width <= FEW and jnp.issubdtype(x.dtype, jnp.floating)):
        return None

    def add(x, axes):
        return bound(eqn, x, axes=tuple(axes))

    kept = [x.shape[axis] for axis in (*others, last)]

    def apply(x):
        rows = add(x.reshape(*x.shape[:last], x.shape[last] * width), before)
        return add(rows.reshape(*kept, width), [len(kept)])

    return apply, derivative(apply)


def flattened(eqn: Any) -> Form | None:
    """A product of arrays as one of matrices, whose gradients, unlike the arrays', XLA computes fast."""
    (left, right), batch = eqn.params["dimension_numbers"]
    a, b = (v.aval.shape for v in eqn.invars)
    num = len(left)
    axes = (*left, *right)
    if (
        any(batch)
        or axes != (*range(len(a) - num, len(a)), *range(num))
        or len(a) == len(b) == 2
        or not num
    ):
        return None
    rows = math.prod(a[: len(a) - num])
    inner = math.prod(b[:num])
    columns = math.prod(b[num:])
    numbers = ((1,), (0,)), ((), ())

    def apply(x, y):
        product = bound(
            eqn, x.reshape(rows, inner), y.reshape(inner, columns), dimension_numbers=numbers
        )
        return product.reshape(eqn.outvars[0].aval.shape)

    return apply, derivative(apply)


def in_rows(eqn: Any) -> Form | None:
    """An elementwise operation on short rows, such as a group's channels, as one on longer rows."""
    *shape, width = eqn.invars[0].aval.shape or [0]
    if not (len(shape) > 1 and 1 < width <= FEW):
        return None

    def apply(x):
        return bound(eqn, x.reshape(*shape[:-1], shape[-1] * width)).reshape(x.shape)

    return apply, derivative(apply)


def one_by_one(eqn: Any) -> Form:
    """Stacked clients' operations in turn. Side by side, LAPACK's may wait for each other forever on few cores."""
    apply = jax.custom_batching.sequential_vmap(lambda *args: bound(eqn, *args))
    return apply, derivative(apply)


def in_a_row(eqn: Any) -> Form | None:
    """Random bits drawn as a vector: the same bits, and programs that compile faster."""
    shape = eqn.params["shape"]

    def draw(key):
        return bound(eqn, key, shape=(math.prod(shape),)).reshape(shape)

    return (draw, derivative(draw)) if len(shape) > 1 else None


def has_views(eqn: Any, windows: Windows, tiled: bool) -> bool:
    """Whether an operation's windows are few views of real numbers, which compile fast, or tiles."""
    kind, *others = {v.aval.dtype for v in eqn.invars}
    few = tiled or math.prod(windows.size) <= MOST_PLACES
    real = not others and jnp.issubdtype(kind, jnp.floating)
    return bool(few and real and windows.size and eqn.outvars[0].aval.size)


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
            for_stacks, functools.partial(convolution, cache=1 << 62, fewer_products=False)
        ),
    },
}


def forms_of(eqn: Any) -> dict[str, Form]:
    """Platform -> the other form that an equation has there."""
    return {
        name: form
        for name, forms in FORMS.items()
        if (form := forms.get(eqn.primitive, lambda _: None)(eqn))
    }


# Platform -> times that XLA's own forms take longer there than ours, forward and backward (docs/results/speed.md).
SLOWDOWNS = {"cpu": {"conv_general_dilated": 5, "reduce_window_min": 3, "reduce_window": 3}}


def slow_layers(jaxpr: Any, names: Sequence[str], platform: str) -> Iterator[str]:
    """The layers that keep a slow form on a platform, and how slow it is: "Conv_3: 31 x 31, native: about 9 x".

    `names` has the layer of each input of the network, "" for what belongs to no layer.
    """
    layers = dict(zip(jaxpr.invars, names, strict=True))
    for eqn in jaxpr.eqns:
        given = [layers.get(v, "") if isinstance(v, core.Var) else "" for v in eqn.invars]
        if len(given) == 1:  # a kernel that is cast or laid out anew
            layers |= dict.fromkeys(eqn.outvars, given[0])
        times = SLOWDOWNS.get(platform, {}).get(eqn.primitive.name)
        if times and platform not in forms_of(eqn):
            size = eqn.params.get("window_dimensions", eqn.invars[-1].aval.shape)
            layer = next(filter(None, given), str(eqn.source_info.name_stack) or eqn.primitive.name)
            yield f"{layer}: {' x '.join(map(str, size))}, native: about {times} x"
        for inner in core.jaxprs_in_params(eqn.params) if eqn.primitive in NESTED else ():
            # Of a branch, the choice comes first.
            yield from slow_layers(inner, given[len(given) - len(inner.invars) :], platform)


# Operations whose insides are rewritten. Derivatives that functions define themselves stay as they are.
NESTED = {
    getattr(primitives, name)
    for name in ("jit_p", "closed_call_p", "remat_p", "scan_p", "while_p", "cond_p")
}
NESTED |= {primitives.custom_jvp_call_p, primitives.custom_vjp_call_p}
