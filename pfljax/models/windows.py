"""Windows over images as shifted views, and pooling with them; images are (B, *S, C) with any number of axes S."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract.types import Array

Pairs = Sequence[tuple[int, int]]


class Windows(NamedTuple):
    """How windows lie over an image; each field has an entry for each spatial axis.

    Attributes:
        size: Places in a window.
        strides: Places from one window to the next.
        dilation: Places from one entry of a window to the next.
        padding: Places added before and after; negative: cut off.
    """

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: Pairs

    def outputs(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Number of windows along each spatial axis of `shape`."""
        rows = zip(shape, *self, strict=True)
        return tuple(max(0, (m + sum(pad) - d * (n - 1) - 1) // s + 1) for m, n, s, d, pad in rows)

    def tile(self, shape: Sequence[int]) -> bool:
        """Whether the windows cover `shape` without overlap."""
        rows = zip(shape, *self, strict=True)
        return all(n == s and m % n == 0 and d == 1 and not any(pad) for m, n, s, d, pad in rows)


def pad(x: Array, padding: Pairs, value: float = 0, interior: Sequence[int] = ()) -> Array:
    """Pads the spatial axes of x, with `interior` places between two rows too; negative padding cuts."""
    between = interior or [0] * len(padding)
    config = [(0, 0, 0), *((*pair, n) for pair, n in zip(padding, between, strict=True)), (0, 0, 0)]
    return jax.lax.pad(x, jnp.asarray(value, x.dtype), config) if any(map(any, config)) else x


def views(x: Array, windows: Windows, value: float = 0) -> list[Array]:
    """An array (B, *S', C) for each place in a window, in reading order; `value` is in the padding."""
    outputs, x = windows.outputs(x.shape[1:-1]), pad(x, windows.padding, value)
    found = []
    for place in itertools.product(*map(range, windows.size)):
        start = [p * d for p, d in zip(place, windows.dilation, strict=True)]
        stop = [a + (n - 1) * s + 1 for a, n, s in zip(start, outputs, windows.strides, strict=True)]
        limits = (0, *start, 0), (x.shape[0], *stop, x.shape[-1])
        found.append(jax.lax.slice(x, *limits, (1, *windows.strides, 1)))
    return found


def unview(grads: Sequence[Array], windows: Windows, shape: Sequence[int]) -> Array:
    """Sums gradients of the `views` of an array of `shape`: their transpose."""
    total, interior = None, [stride - 1 for stride in windows.strides]
    for place, grad in zip(itertools.product(*map(range, windows.size)), grads, strict=True):
        rows = zip(place, *windows[1:], grad.shape[1:-1], shape[1:-1], strict=True)
        margins = [(p * d - low, m - (p * d - low) - (n - 1) * s - 1) for p, s, d, (low, _), n, m in rows]
        grad = pad(grad, margins, interior=interior)
        total = grad if total is None else total + grad
    return jnp.asarray(total)


def tiles(x: Array, windows: Windows) -> Array:
    """Windows that tile x: (B, *S, C) -> (B, *S', places, C)."""
    axes, split = len(windows.size), zip(windows.outputs(x.shape[1:-1]), windows.size, strict=True)
    x = x.reshape(x.shape[0], *itertools.chain.from_iterable(split), x.shape[-1])
    x = x.transpose(0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2), 2 * axes + 1)
    return x.reshape(*x.shape[: axes + 1], -1, x.shape[-1])


def patches(x: Array, windows: Windows, groups: int = 1) -> Array:
    """The views side by side, (B, *S', places C); or (B, *S', G, places C / G) for G > 1 groups of channels."""
    found = views(x, windows)
    if groups > 1:
        found = [view.reshape(*view.shape[:-1], groups, -1) for view in found]
    return jnp.concatenate(found, axis=-1)


def max_pool(x: Array, windows: Windows) -> Array:
    """The largest value in each window, (B, *S, C) -> (B, *S', C)."""
    return functools.reduce(jnp.maximum, views(x, windows, -math.inf))


def max_pool_slope(dy: Array, x: Array, windows: Windows) -> tuple[Array]:
    """The gradient of `max_pool` with respect to x, given that of its result. In a tie, the first place has it."""
    y, taken, grads = max_pool(x, windows), False, []
    for view in views(x, windows, -math.inf):
        chosen = (view == y) & ~jnp.asarray(taken)
        taken = taken | chosen
        grads.append(jnp.where(chosen, dy, 0))
    return (unview(grads, windows, x.shape),)


def sum_pool(x: Array, windows: Windows) -> Array:
    """The sum of each window, (B, *S, C) -> (B, *S', C)."""
    return tiles(x, windows).sum(-2) if windows.tile(x.shape[1:-1]) else jnp.asarray(sum(views(x, windows)))
