"""Rewrites traced networks: other forms of convolutions and pooling, for the platform that a program is lowered to."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from pfljax.contract.types import PyTree
from pfljax.models.convolutions import convolve, slopes
from pfljax.models.windows import Windows, max_pool, max_pool_slope, sum_pool

MOST_PLACES = 128  # in a window; each is a view, which takes time to compile

Operation = Callable[..., Any]


class Form(NamedTuple):
    """Another form of an operation: (*arrays) -> result, and (slope of the result, *arrays) -> slopes of the arrays."""

    apply: Operation
    slopes: Operation | None = None  # None: JAX's derivative of `apply`


def rewritten(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """A function that computes what `fn` computes, with other forms of some operations; see `FORMS`.

    `fn` is traced once for all calls with the same shapes. Derivatives have the same forms; like these, they exist in
    reverse mode only.
    """

    def run(*args: PyTree) -> PyTree:
        traced, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        outputs = evaluate(traced, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return jax.jit(run)


def evaluate(traced: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a traced function (a jaxpr, closed or without constants) with other forms of some operations."""
    jaxpr = getattr(traced, "jaxpr", traced)
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*getattr(traced, "consts", ()), *args], strict=True))
    read = lambda v: v.val if isinstance(v, core.Literal) else values[v]
    for eqn in needed(jaxpr):
        with eqn.ctx.manager, jax.named_scope(str(eqn.source_info.name_stack)):
            outputs = operation_of(eqn)(*map(read, eqn.invars))
        values.update(zip(eqn.outvars, outputs if eqn.primitive.multiple_results else [outputs], strict=True))
    return [read(v) for v in jaxpr.outvars]


def needed(jaxpr: Any) -> list[Any]:
    """The equations that outputs or effects depend on; initial values, for instance, need no forward pass."""
    read, found = set(filter(is_var, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or read.intersection(eqn.outvars):
            found.append(eqn)
            read.update(filter(is_var, eqn.invars))
    return found[::-1]


def is_var(atom: Any) -> bool:
    """Whether it is a variable, not a constant."""
    return isinstance(atom, core.Var)


def operation_of(eqn: Any) -> Operation:
    """The operation of an equation: its own, or another form of it that depends on the platform."""
    params = rewritten_inside(eqn.params) if eqn.primitive in NESTED else eqn.params
    own = lambda *args: eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    forms = {platform: form(eqn) for platform, form in FORMS.get(eqn.primitive, {}).items()}
    forms = {platform: form for platform, form in forms.items() if form is not None}
    return by_platform(own, forms) if forms else own


def rewritten_inside(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of an operation, with the traced functions among them rewritten."""

    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        return rewritten_trace(value) if isinstance(value, core.Jaxpr | core.ClosedJaxpr) else value

    return {name: changed(value) for name, value in params.items()}


def rewritten_trace(traced: Any) -> Any:
    """The same traced function with other forms of some operations."""
    jaxpr = getattr(traced, "jaxpr", traced)  # JAX 0.10 tells traced functions with constants from those without
    if not any(map(changes, jaxpr.eqns)):
        return traced
    new = jax.make_jaxpr(lambda *args: evaluate(traced, args))(*(v.aval for v in jaxpr.invars))
    return new if traced is not jaxpr or isinstance(new, type(traced)) else new.jaxpr


def changes(eqn: Any) -> bool:
    """Whether another form of an equation, or of one inside it, exists for some platform."""
    if eqn.primitive in FORMS:
        return any(form(eqn) for form in FORMS[eqn.primitive].values())
    return any(changes(inner) for jaxpr in core.jaxprs_in_params(eqn.params) for inner in jaxpr.eqns)


def by_platform(native: Operation, forms: dict[str, Form]) -> Operation:
    """An operation that has the given form on the platforms that have one, and so do its derivatives."""
    derivative = lambda apply: lambda slope, *args: jax.vjp(apply, *args)[1](slope)
    applied = {platform: form.apply for platform, form in forms.items()}
    pulled = {platform: form.slopes or derivative(form.apply) for platform, form in forms.items()}

    def apply(*args):
        return jax.lax.platform_dependent(*args, default=native, **applied)

    def backward(args, slope):
        return jax.lax.platform_dependent(slope, *args, default=derivative(native), **pulled)

    operation = jax.custom_vjp(apply)
    operation.defvjp(lambda *args: (apply(*args), args), backward)
    return lambda *args: (apply if any(map(is_key, args)) else operation)(*args)


def convolution(eqn: Any) -> Form | None:
    """A convolution as patches times a matrix; None if it has no spatial axes, or too large windows."""
    x, kernel = (v.aval for v in eqn.invars)
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    size = tuple(kernel.shape[axis] for axis in numbers.rhs_spec[2:])
    windows = Windows(size, params["window_strides"], params["rhs_dilation"], params["padding"])
    tiled = params["feature_group_count"] == 1 and windows.tile([x.shape[axis] for axis in numbers.lhs_spec[2:]])
    known = params["batch_group_count"] == 1 and params["preferred_element_type"] in (None, x.dtype)
    if not (known and size and is_real(x, kernel) and fits(windows, tiled) and math.prod(eqn.outvars[0].aval.shape)):
        return None
    # Axes in the order that `convolve` expects: (B, *S, C) and (*W, C, O).
    of_x, of_y = ((spec[0], *spec[2:], spec[1]) for spec in (numbers.lhs_spec, numbers.out_spec))
    of_kernel = (*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0])
    back = lambda array, order: array.transpose([order.index(axis) for axis in range(array.ndim)])
    options = windows, params["lhs_dilation"], params["feature_group_count"]

    def apply(x, kernel):
        return back(convolve(x.transpose(of_x), kernel.transpose(of_kernel), *options), of_y)

    def pull(dy, x, kernel):
        dx, dkernel = slopes(dy.transpose(of_y), x.transpose(of_x), kernel.transpose(of_kernel), *options)
        return back(dx, of_x), back(dkernel, of_kernel)

    return Form(apply, pull)


def pooling(pool: Operation, slope: Operation | None, eqn: Any) -> Form | None:
    """Pooling over views; None if windows span examples or channels, are too large, or overlap where XLA is faster."""
    params, (x,) = eqn.params, [v.aval for v in eqn.invars]
    names = ("window_dimensions", "window_strides", "window_dilation", "padding")
    outer = [(params[name][0], params[name][-1]) for name in names]
    windows = Windows(*(tuple(params[name][1:-1]) for name in names))
    plain = outer == [(1, 1)] * 3 + [((0, 0), (0, 0))] and set(params["base_dilation"]) == {1}
    plain = plain and (slope is None or set(windows.strides) != {1})
    tiled = slope is None and plain and windows.tile(x.shape[1:-1])
    if not (plain and windows.size and is_real(x) and fits(windows, tiled) and math.prod(eqn.outvars[0].aval.shape)):
        return None
    return Form(lambda x: pool(x, windows), slope and (lambda dy, x: slope(dy, x, windows)))


def one_by_one(eqn: Any) -> Form:
    """Stacked clients' operations in turn. Side by side, LAPACK's may wait for each other forever on few cores."""
    return Form(jax.custom_batching.sequential_vmap(lambda *args: eqn.primitive.bind(*args, **eqn.params)))


def in_a_row(eqn: Any) -> Form | None:
    """Random bits drawn as a vector: the same bits, and programs that compile faster."""
    shape = eqn.params["shape"]
    draw = lambda key: eqn.primitive.bind(key, **eqn.params | {"shape": (math.prod(shape),)}).reshape(shape)
    return Form(draw) if len(shape) > 1 else None


def is_key(array: Any) -> bool:
    """Whether it is a random key, which has no derivative."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def is_real(*avals: Any) -> bool:
    """Whether all arrays have the same type, of floating point numbers."""
    return len({aval.dtype for aval in avals}) == 1 and jnp.issubdtype(avals[0].dtype, jnp.floating)


def fits(windows: Windows, tiled: bool) -> bool:
    """Whether windows are few views, which compile fast, or tiles."""
    return tiled or math.prod(windows.size) <= MOST_PLACES


# Operation -> platform -> the form of an equation there, or None. Where a platform has none, XLA's own is used.
FORMS: dict[Any, dict[str, Callable[[Any], Form | None]]] = {
    primitives.conv_general_dilated_p: {"cpu": convolution},
    primitives.reduce_window_max_p: {"cpu": functools.partial(pooling, max_pool, max_pool_slope)},
    primitives.reduce_window_sum_p: {"cpu": functools.partial(pooling, sum_pool, None)},
    primitives.random_bits_p: {"cpu": in_a_row},
    primitives.qr_p: {"cpu": one_by_one},  # in orthogonal initial values
}

# Platform -> times that XLA's own forms take longer there than ours, forward and backward (docs/results/speed.md).
SLOWDOWNS = {"cpu": {"conv_general_dilated": 5, "reduce_window_min": 3, "reduce_window": 3}}


def slow_layers(traced: Any, names: Sequence[str], platform: str) -> list[str]:
    """The layers that keep a slow form on a platform, and how slow it is: "Conv_3: 31 x 31, native: about 9 x".

    Args:
        traced: A network.
        names: Layer of each of its inputs, "" for what belongs to no layer.
        platform: Where it will run.
    """
    jaxpr, found = getattr(traced, "jaxpr", traced), []
    layers = {var: name for var, name in zip(jaxpr.invars, names, strict=True) if name}
    for eqn in jaxpr.eqns:
        given = [layers.get(v, "") if isinstance(v, core.Var) else "" for v in eqn.invars]
        if len(given) == 1 and given[0]:  # a kernel that is cast or laid out anew
            layers |= dict.fromkeys(eqn.outvars, given[0])
        form, times = FORMS.get(eqn.primitive, {}).get(platform), SLOWDOWNS.get(platform, {}).get(eqn.primitive.name)
        if times and not (form and form(eqn)):
            size = eqn.params.get("window_dimensions", eqn.invars[-1].aval.shape)
            layer = next(filter(None, given), str(eqn.source_info.name_stack) or eqn.primitive.name)
            found.append(f"{layer}: {' x '.join(map(str, size))}, native: about {times} x")
        for inner in core.jaxprs_in_params(eqn.params) if eqn.primitive in NESTED else ():
            shift = len(given) - len(inner.invars)  # of a branch, the choice comes first
            found += slow_layers(inner, given[shift:] if shift >= 0 else [""] * len(inner.invars), platform)
    return list(dict.fromkeys(found))


# Operations whose insides are rewritten. Derivatives that functions define themselves stay as they are.
NESTED = {getattr(primitives, name) for name in ("jit_p", "closed_call_p", "remat_p", "scan_p", "while_p", "cond_p")}
NESTED |= {primitives.custom_jvp_call_p, primitives.custom_vjp_call_p}
