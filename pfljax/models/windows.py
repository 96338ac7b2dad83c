"""Convolutions and pooling as shifted views of their input, times matrices: the forms for CPUs.

XLA runs a CPU's convolutions slowly inside loops, and those of stacked clients as grouped convolutions. Patches (all
views of a window, side by side) times a matrix are one product of matrices, stacked or not. The gradients are of the
same form: differentiating the patches would scatter. Arrays are (B, *S, C) with any number of spatial axes S.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.core.types import Array

Pairs = tuple[tuple[int, int], ...]


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
        spans = (d * (n - 1) + 1 for n, d in zip(self.size, self.dilation, strict=True))
        rows = zip(shape, spans, self.strides, self.padding, strict=True)
        return tuple(max(0, (length + low + high - span) // stride + 1) for length, span, stride, (low, high) in rows)

    @property
    def overlap(self) -> bool:
        """Whether two windows may have a place in common."""
        return any(stride < size for stride, size in zip(self.strides, self.size, strict=True)) or self.dilated

    @property
    def dilated(self) -> bool:
        """Whether there are gaps inside a window."""
        return any(d > 1 and n > 1 for d, n in zip(self.dilation, self.size, strict=True))


def pad(x: Array, padding: Pairs, value: float = 0, interior: Sequence[int] = ()) -> Array:
    """Pads the spatial axes of x (B, *S, C), with `interior` places between two rows too; negative padding cuts."""
    between = interior or (0,) * len(padding)
    config = [(0, 0, 0), *((low, high, n) for (low, high), n in zip(padding, between, strict=True)), (0, 0, 0)]
    return jax.lax.pad(x, jnp.asarray(value, x.dtype), config) if any(map(any, config)) else x


def views(x: Array, windows: Windows, value: float = 0) -> list[Array]:
    """An array (B, *S', C) for each place in a window, in reading order; `value` is in the padding."""
    outputs = windows.outputs(x.shape[1:-1])
    x = pad(x, windows.padding, value)
    spans = [(n - 1) * stride + 1 for n, stride in zip(outputs, windows.strides, strict=True)]
    strides = (1, *windows.strides, 1)

    def view(place):
        start = [p * d for p, d in zip(place, windows.dilation, strict=True)]
        limit = [first + span for first, span in zip(start, spans, strict=True)]
        return jax.lax.slice(x, (0, *start, 0), (x.shape[0], *limit, x.shape[-1]), strides)

    return [view(place) for place in itertools.product(*map(range, windows.size))]


def unview(grads: Sequence[Array], windows: Windows, shape: tuple[int, ...]) -> Array:
    """Sums gradients of the `views` of an array of `shape`: their transpose."""
    outputs, total = grads[0].shape[1:-1], None
    for place, grad in zip(itertools.product(*map(range, windows.size)), grads, strict=True):
        margins = []
        for axis, (low, _) in enumerate(windows.padding):
            before = place[axis] * windows.dilation[axis] - low
            covered = (outputs[axis] - 1) * windows.strides[axis] + 1
            margins.append((before, shape[axis + 1] - before - covered))
        grad = pad(grad, tuple(margins), interior=[stride - 1 for stride in windows.strides])
        total = grad if total is None else total + grad
    return jnp.asarray(total)


def tiles(x: Array, windows: Windows, value: float = 0) -> Array:
    """Windows without overlap: (B, *S, C) -> (B, S'_1, W_1, S'_2, W_2, ..., C)."""
    outputs, axes = windows.outputs(x.shape[1:-1]), range(len(windows.size))
    missing = [
        n * stride - length - low
        for n, stride, length, (low, _) in zip(outputs, windows.strides, x.shape[1:-1], windows.padding, strict=True)
    ]
    x = pad(x, tuple((low, more) for (low, _), more in zip(windows.padding, missing, strict=True)), value)
    split = itertools.chain.from_iterable(zip(outputs, windows.strides, strict=True))
    x = x.reshape(x.shape[0], *split, x.shape[-1])
    for axis in axes:
        x = jax.lax.slice_in_dim(x, 0, windows.size[axis], axis=2 + 2 * axis)
    return x


def patches(x: Array, windows: Windows, groups: int = 1) -> Array:
    """The views side by side: (B, *S, C) -> (B, *S', W C), or (B, *S', G, W C / G) for G > 1 groups of channels."""
    if not windows.overlap and math.prod(windows.size) > 1 and groups == 1:
        axes = len(windows.size)
        order = [0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2), 2 * axes + 1]
        x = tiles(x, windows).transpose(order)
        return x.reshape(*x.shape[: axes + 1], -1)
    found = views(x, windows)
    if groups > 1:
        found = [view.reshape(*view.shape[:-1], groups, -1) for view in found]
    return jnp.concatenate(found, axis=-1)
