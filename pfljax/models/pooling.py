"""Max and sum pooling over views of the input; see `windows`."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from pfljax.core.types import Array
from pfljax.models.windows import Windows, tiles, unview, views


def max_pool(x: Array, windows: Windows) -> Array:
    """The largest value in each window, (B, *S, C) -> (B, *S', C)."""
    return functools.reduce(jnp.maximum, views(x, windows, -math.inf))


def max_pool_slope(dy: Array, x: Array, windows: Windows) -> Array:
    """The gradient of `max_pool` with respect to x, given that of its result. In a tie, the first place has it."""
    y, taken, grads = max_pool(x, windows), False, []
    for view in views(x, windows, -math.inf):
        chosen = (view == y) & ~jnp.asarray(taken)
        taken = taken | chosen
        grads.append(jnp.where(chosen, dy, 0))
    return unview(grads, windows, x.shape)


def sum_pool(x: Array, windows: Windows) -> Array:
    """The sum of each window, (B, *S, C) -> (B, *S', C)."""
    if windows.overlap:
        return jnp.asarray(sum(views(x, windows)))
    return tiles(x, windows).sum(tuple(range(2, 2 * len(windows.size) + 1, 2)))


def sum_pool_slope(dy: Array, x: Array, windows: Windows) -> Array:
    """The gradient of `sum_pool` with respect to x, given that of its result."""
    return jax.vjp(lambda x: sum_pool(x, windows), x)[1](dy)[0]
