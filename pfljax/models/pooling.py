"""Max and sum pooling over views of the input; see `windows`."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from pfljax.core.types import Array
from pfljax.models.windows import Windows, tiles, unview, views


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def max_pool(x: Array, windows: Windows) -> Array:
    """The largest value in each window, (B, *S, C) -> (B, *S', C). In a tie, the gradient goes to the first place."""
    return functools.reduce(jnp.maximum, views(x, windows, -math.inf))


def _max_pool_forward(x, windows):
    y = max_pool(x, windows)
    return y, (x, y)


def _max_pool_backward(windows, saved, dy):
    x, y = saved
    taken, grads = False, []
    for view in views(x, windows, -math.inf):
        chosen = (view == y) & ~jnp.asarray(taken)
        taken = taken | chosen
        grads.append(jnp.where(chosen, dy, 0))
    return (unview(grads, windows, x.shape),)


max_pool.defvjp(_max_pool_forward, _max_pool_backward)


def sum_pool(x: Array, windows: Windows) -> Array:
    """The sum of each window, (B, *S, C) -> (B, *S', C)."""
    if windows.overlap:
        return jnp.asarray(sum(views(x, windows)))
    return tiles(x, windows).sum(tuple(range(2, 2 * len(windows.size) + 1, 2)))
