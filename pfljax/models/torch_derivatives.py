"""PyTorch's operations whose derivatives differ from those of JAX's where two cases meet.

At such places PyTorch takes one side, and JAX or torchax another or the mean of both: at the bounds of a clipped value,
at an absolute value or norm of zero, where two entries are the largest. They are not rare. Behind ReLU many values are
exactly zero, and there a norm's derivative is NaN in JAX and zero in PyTorch.

The functions have PyTorch's arguments and take JAX's arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pfljax.contract.types import Array

Axes = int | Sequence[int] | None


def hardtanh(x: Array, min_val: float = -1.0, max_val: float = 1.0) -> Array:
    """x between two bounds; the derivative is 0 at both."""
    low = jnp.asarray(min_val, x.dtype)
    high = jnp.asarray(max_val, x.dtype)
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


def clamp(x: Array, min: Any = None, max: Any = None) -> Array:
    """x between two bounds; the derivative is 1 at both."""
    if min is not None:
        x = jnp.where((x < min) | (min != min), min, x)  # NaN stays NaN
    if max is not None:
        x = jnp.where((x > max) | (max != max), max, x)
    return x


def clamp_min(x: Array, min: Any) -> Array:
    """x, but at least `min`."""
    return clamp(x, min=min)


def clamp_max(x: Array, max: Any) -> Array:
    """x, but at most `max`."""
    return clamp(x, max=max)


def leaky_relu(x: Array, negative_slope: float = 0.01) -> Array:
    """x, or a multiple of it unless it is positive."""
    return jnp.where(x > 0, x, negative_slope * x)


def hardsigmoid(x: Array) -> Array:
    """A line from 0 at -3 to 1 at 3."""
    return jnp.where(x <= -3, 0.0, jnp.where(x >= 3, 1.0, x / 6 + 0.5)).astype(x.dtype)


def hardswish(x: Array) -> Array:
    """x times `hardsigmoid`."""
    return jnp.where(x <= -3, 0.0, jnp.where(x >= 3, x, x * (x + 3) / 6)).astype(x.dtype)


def absolute(x: Array) -> Array:
    """The absolute value, whose derivative at 0 is 0."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.abs(x)
    return jnp.where(x == 0, 0.0, jnp.abs(x)).astype(x.dtype)


def power(x: Array, exponent: float) -> Array:
    """x to a power; the derivative of x to the power 0 is 0, at 0 as well."""
    return jnp.ones_like(x) if exponent == 0 else jnp.power(x, exponent)


def largest(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """The largest value along an axis and its index; of equal ones, the first has the derivative."""
    return _at(x, jnp.argmax(x, dim, keepdims=True), dim, keepdim)


def smallest(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """The smallest value along an axis and its index; of equal ones, the first has the derivative."""
    return _at(x, jnp.argmin(x, dim, keepdims=True), dim, keepdim)


def _at(x: Array, index: Array, axis: int, keepdim: bool) -> tuple[Array, Array]:
    values = jnp.take_along_axis(x, index, axis) if x.ndim else x
    if keepdim or not x.ndim:
        return values, index
    return values.squeeze(axis), index.squeeze(axis)


def vector_norm(
    x: Array, ord: Any = 2, dim: Axes = None, keepdim: bool = False, dtype: Any = None
) -> Array:
    """A norm, whose derivative at 0 is 0."""
    del dtype  # float32, as everything is
    axes = _axes(x, dim)

    def norm(x: Array, keepdim: bool) -> Array:
        return jnp.linalg.vector_norm(x, ord=ord, axis=axes, keepdims=keepdim)

    return without_slope_at_zero(norm, x, keepdim)


def std(x: Array, dim: Axes = None, correction: float = 1, keepdim: bool = False) -> Array:
    """A standard deviation, whose derivative at 0 is 0."""
    axes = _axes(x, dim)

    def deviation(x: Array, keepdim: bool) -> Array:
        return jnp.std(x, axis=axes, correction=correction, keepdims=keepdim)

    return without_slope_at_zero(deviation, x, keepdim)


def without_slope_at_zero(
    fn: Callable[[Array, bool], Array], x: Array, keepdim: bool = False
) -> Array:
    """fn(x, keepdim), a reduction, without derivatives where it is zero.

    There it is computed on other values, because a derivative that is not finite stays so when it is multiplied by 0.
    """
    is_zero = fn(jax.lax.stop_gradient(x), True) == 0
    # Deviations of these are not zero, nor are norms.
    others = jnp.arange(1, x.size + 1, dtype=x.dtype).reshape(x.shape)
    y = fn(jnp.where(is_zero, others, x), keepdim)
    return jnp.where(is_zero.reshape(y.shape), 0.0, y).astype(y.dtype)


def _axes(x: Array, dim: Axes) -> tuple[int, ...]:
    """The axes of `dim`, where none are all."""
    if dim is None or dim == [] or dim == ():
        return tuple(range(x.ndim))
    return (dim,) if isinstance(dim, int) else tuple(dim)


def cdist(x: Array, y: Array, p: Any = 2.0, compute_mode: Any = None) -> Array:
    """Distances (..., P, Q) of rows (..., P, M) and (..., Q, M); the derivative of a distance of 0 is 0."""
    del compute_mode
    return vector_norm(x[..., :, None, :] - y[..., None, :, :], p, -1)


def pdist(x: Array, p: Any = 2) -> Array:
    """Distances of all pairs of rows (N, M), in order; the derivative of a distance of 0 is 0."""
    first, second = jnp.triu_indices(len(x), 1)
    return vector_norm(x[first] - x[second], p, -1)


def dist(x: Array, y: Array, p: Any = 2) -> Array:
    """The norm of a difference, whose derivative at 0 is 0."""
    return vector_norm(x - y, p)


def cosine_similarity(x: Array, y: Array, dim: int = 1, eps: float = 1e-8) -> Array:
    """The cosine of two vectors; norms are at least `eps`, but have the derivatives of norms."""
    x, y = jnp.broadcast_arrays(x, y)

    def direction(x: Array) -> Array:
        norm = vector_norm(x, 2, dim, True)
        return x / with_derivative(jnp.maximum(norm, eps), norm)

    return (direction(x) * direction(y)).sum(dim)


@jax.custom_jvp
def with_derivative(value: Array, other: Array) -> Array:
    """A value that has the derivative of another one."""
    del other
    return value


@with_derivative.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return primals[0], tangents[1]
