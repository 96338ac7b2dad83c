"""Convolutions and pooling over shifted views of images, which are (B, *S, C) with any number of axes S.

XLA runs a CPU's convolutions slowly inside loops, and those of stacked clients as grouped convolutions. Patches times a
matrix are one product of matrices, stacked or not; depthwise convolutions are sums of shifted images. The gradients are
of the same form: differentiating the patches would scatter. Here kernels are (*W, C / G, O), for G groups of channels.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract.types import Array

CACHE_BYTES = 3 << 18  # patches of this size stay in a core's cache (docs/results/speed.md)


class Windows(NamedTuple):
    """How windows lie over an image; each field but `groups` has an entry for each spatial axis."""

    size: tuple[int, ...]  # places in a window
    strides: tuple[int, ...]  # places from one window to the next
    dilation: tuple[int, ...]  # places from one entry of a window to the next
    padding: Sequence[tuple[int, int]]  # places added before and after; negative: cut off
    # distance of the image's rows before it is padded: 1 but in transposed convolutions
    spread: tuple[int, ...]
    groups: int = 1  # groups of channels
    # bytes of patches that are made at a time; each block of images reads the kernel
    cache: int = CACHE_BYTES

    def outputs(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Number of windows along each spatial axis of `shape`."""
        rows = zip(shape, *self[:5], strict=True)
        return tuple(
            max(0, ((m - 1) * w + sum(pad) - d * (n - 1)) // s + 1) for m, n, s, d, pad, w in rows
        )

    def tile(self, shape: Sequence[int]) -> bool:
        """Whether the windows cover `shape` without overlap, all channels at once."""
        rows = zip(shape, *self[:5], strict=True)
        tiled = all(
            n == s and m % n == 0 and d == w == 1 and not any(pad) for m, n, s, d, pad, w in rows
        )
        return tiled and self.groups == 1


def pad(
    x: Array, padding: Sequence[tuple[int, int]], value: float = 0, interior: Sequence[int] = ()
) -> Array:
    """Pads the spatial axes of x, with `interior` places between two rows too; negative padding cuts."""
    between = interior or [0] * len(padding)
    config = [(0, 0, 0), *((*pair, n) for pair, n in zip(padding, between, strict=True)), (0, 0, 0)]
    return jax.lax.pad(x, jnp.asarray(value, x.dtype), config) if any(map(any, config)) else x


def views(x: Array, windows: Windows, value: float = 0) -> list[Array]:
    """An array (B, *S', C) for each place in a window, in reading order; `value` is in the padding."""
    outputs = windows.outputs(x.shape[1:-1])
    x = pad(x, windows.padding, value)
    found = []
    for place in itertools.product(*map(range, windows.size)):
        start = [p * d for p, d in zip(place, windows.dilation, strict=True)]
        stop = [
            a + (n - 1) * s + 1 for a, n, s in zip(start, outputs, windows.strides, strict=True)
        ]
        limits = (0, *start, 0), (x.shape[0], *stop, x.shape[-1])
        found.append(jax.lax.slice(x, *limits, (1, *windows.strides, 1)))
    return found


def unview(grads: Sequence[Array], windows: Windows, shape: Sequence[int]) -> Array:
    """Sums gradients of the `views` of an array of `shape`: their transpose."""
    total = None
    interior = [stride - 1 for stride in windows.strides]
    for place, grad in zip(itertools.product(*map(range, windows.size)), grads, strict=True):
        rows = zip(place, *windows[1:4], grad.shape[1:-1], shape[1:-1], strict=True)
        margins = [
            (p * d - low, m - (p * d - low) - (n - 1) * s - 1) for p, s, d, (low, _), n, m in rows
        ]
        grad = pad(grad, margins, interior=interior)
        total = grad if total is None else total + grad
    return jnp.asarray(total)


def tiles(x: Array, windows: Windows) -> Array:
    """Windows that tile x: (B, *S, C) -> (B, *S', places, C)."""
    axes = len(windows.size)
    split = zip(windows.outputs(x.shape[1:-1]), windows.size, strict=True)
    x = x.reshape(x.shape[0], *itertools.chain.from_iterable(split), x.shape[-1])
    x = x.transpose(0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2), 2 * axes + 1)
    return x.reshape(*x.shape[: axes + 1], -1, x.shape[-1])


def patches(x: Array, windows: Windows) -> Array:
    """The views side by side, (B, *S', places C); or (B, *S', G, places C / G) for G > 1 groups of channels."""
    found = views(x, windows)
    if windows.groups > 1:
        found = [view.reshape(*view.shape[:-1], windows.groups, -1) for view in found]
    return jnp.concatenate(found, axis=-1)


def max_pool(x: Array, windows: Windows) -> Array:
    """The largest value in each window, (B, *S, C) -> (B, *S', C)."""
    return functools.reduce(jnp.maximum, views(x, windows, -math.inf))


def max_pool_slope(dy: Array, x: Array, windows: Windows) -> tuple[Array]:
    """The gradient of `max_pool` with respect to x, given that of its result. In a tie, the first place has it."""
    y = max_pool(x, windows)
    taken = False
    grads = []
    for view in views(x, windows, -math.inf):
        chosen = (view == y) & ~jnp.asarray(taken)
        taken = taken | chosen
        grads.append(jnp.where(chosen, dy, 0))
    return (unview(grads, windows, x.shape),)


def sum_pool(x: Array, windows: Windows) -> Array:
    """The sum of each window, (B, *S, C) -> (B, *S', C)."""
    return (
        tiles(x, windows).sum(-2)
        if windows.tile(x.shape[1:-1])
        else jnp.asarray(sum(views(x, windows)))
    )


def convolve(x: Array, kernel: Array, windows: Windows) -> Array:
    """Convolution (B, *S, C) -> (B, *S', O) without bias; see `jax.lax.conv_general_dilated`."""
    groups = windows.groups
    outputs = kernel.shape[-1]
    # the transpose of a convolution with strides, without zeros between rows
    if set(windows.spread) != {1}:
        plain = windows._replace(strides=(1,) * len(windows.size))
        wide = plain.outputs(x.shape[1:-1])
        forth = back(plain, x.shape[1:-1], wide)
        y = _spread(x, turned(kernel, groups), forth, (x.shape[0], *wide, outputs))
        return y[(slice(None), *(slice(None, None, stride) for stride in windows.strides))]
    if _is_product(x, windows):
        rows = views(x, windows)[0] if math.prod(windows.size) == 1 else tiles(x, windows)
        y = rows.reshape(-1, kernel.size // outputs) @ kernel.reshape(-1, outputs)
        return y.reshape(x.shape[0], *windows.outputs(x.shape[1:-1]), outputs)

    def product(x):
        if groups == x.shape[-1] == outputs:
            pairs = zip(views(x, windows), kernel.reshape(-1, groups), strict=True)
            return jnp.asarray(sum(view * row for view, row in pairs))
        if groups == 1:
            return patches(x, windows) @ kernel.reshape(-1, outputs)
        y = jnp.einsum(
            "b...gp,pgo->b...go", patches(x, windows), kernel.reshape(-1, groups, outputs // groups)
        )
        return y.reshape(*y.shape[:-2], -1)

    # A loop also keeps XLA from computing a depthwise sum again in each operation that reads it.
    return in_blocks(product, num_blocks(x.shape, kernel, windows), x)


def slopes(dy: Array, x: Array, kernel: Array, windows: Windows) -> tuple[Array, Array]:
    """The gradients of `convolve` with respect to x and the kernel, given that of its result."""
    groups = windows.groups
    wide = x.shape[1:-1]
    narrow = dy.shape[1:-1]
    if set(windows.spread) == {1}:
        if _is_product(x, windows):
            return jax.vjp(lambda x, kernel: convolve(x, kernel, windows), x, kernel)[1](dy)
        if any(stride > 1 for stride in windows.strides):
            dx = _spread(dy, kernel, windows, x.shape)
        else:
            dx = convolve(dy, turned(kernel, groups), back(windows, wide, narrow))
        return dx, _slope_of_kernel(dy, x, kernel, windows)
    if set(windows.strides) != {1}:
        return jax.vjp(lambda x, kernel: convolve(x, kernel, windows), x, kernel)[1](dy)
    # A convolution with strides is the transpose of this one, with the roles of x and dy exchanged.
    back_kernel = turned(kernel, groups)
    forth = back(windows, wide, narrow)
    dkernel = _slope_of_kernel(x, dy, back_kernel, forth)
    return convolve(dy, back_kernel, forth), turned(dkernel, groups)


def _slope_of_kernel(dy: Array, x: Array, kernel: Array, windows: Windows) -> Array:
    """The gradient of `convolve` with respect to the kernel, in convolutions that are not transposed."""
    groups = windows.groups
    blocks = num_blocks(x.shape, kernel, windows)

    # in blocks that are read into cache once instead of once per place in a window
    def depthwise(x, dy):
        return jnp.stack([(view * dy).sum(tuple(range(dy.ndim - 1))) for view in views(x, windows)])

    # Sums over images are float32, whatever the images are. (O, P) or (G, O / G, P): on a CPU, this order is faster.
    def product(x, dy):
        rows = patches(x, windows)
        exact = jnp.promote_types(x.dtype, jnp.float32)
        if groups == 1:
            rows = rows.reshape(-1, rows.shape[-1])
            dy = dy.reshape(-1, dy.shape[-1])
            return jnp.matmul(dy.T, rows, preferred_element_type=exact)
        dy = dy.reshape(*dy.shape[:-1], groups, -1)
        return jnp.einsum("b...go,b...gp->gop", dy, rows, preferred_element_type=exact)

    if groups == x.shape[-1] == kernel.shape[-1]:
        dkernel = in_blocks(depthwise, blocks, x, dy, add=True)
    else:
        dkernel = jnp.moveaxis(in_blocks(product, blocks, x, dy, add=True), -1, 0)
    return dkernel.reshape(kernel.shape).astype(kernel.dtype)


def _is_product(x: Array, windows: Windows) -> bool:
    """Whether each value of x is in at most one window, so that patches need no copies."""
    return windows.tile(x.shape[1:-1]) or (windows.groups == 1 and math.prod(windows.size) == 1)


def back(windows: Windows, wide: Sequence[int], narrow: Sequence[int]) -> Windows:
    """The windows of a convolution's transpose, from `narrow` to `wide`: strides and spread change places."""
    rows = zip(*windows[:5], wide, narrow, strict=True)
    padding = tuple(
        (d * (n - 1) - low, (w - 1) * t - (m - 1) * s + low) for n, s, d, (low, _), t, w, m in rows
    )
    return windows._replace(strides=windows.spread, padding=padding, spread=windows.strides)


def _spread(y: Array, kernel: Array, windows: Windows, shape: tuple[int, ...]) -> Array:
    """The transpose of a convolution of images of `shape`: each entry of y adds the kernel to its window."""
    (*size, inputs, outputs) = kernel.shape
    groups = windows.groups
    if inputs == 1 and outputs == groups:
        return unview([y * row for row in kernel.reshape(-1, outputs)], windows, shape)

    def spread(y):
        # as a product of matrices, whose result XLA does not lay out in another order
        if groups == 1:
            parts = y.reshape(-1, outputs) @ kernel.reshape(-1, outputs).T
        else:
            rows = kernel.reshape(-1, inputs, groups, outputs // groups)
            parts = jnp.einsum("b...go,wcgo->b...wgc", y.reshape(*y.shape[:-1], groups, -1), rows)
        parts = jnp.split(parts.reshape(*y.shape[:-1], -1), math.prod(size), axis=-1)
        return unview(parts, windows, (y.shape[0], *shape[1:]))

    return in_blocks(spread, num_blocks(shape, kernel, windows), y)


def turned(kernel: Array, groups: int) -> Array:
    """The kernel (*W, C / G, O) of a convolution as that of its transpose, (*W, O / G, C)."""
    *size, inputs, outputs = kernel.shape
    flipped = jnp.flip(kernel, range(len(size))).reshape(*size, inputs, groups, outputs // groups)
    return jnp.swapaxes(flipped, -3, -1).reshape(*size, outputs // groups, groups * inputs)


def num_blocks(shape: Sequence[int], kernel: Array, windows: Windows) -> int:
    """Number of blocks of images whose patches stay in cache; each reads the kernel, so none is smaller than it."""
    batch, *places, channels = shape
    one = (
        math.prod(windows.size)
        * math.prod(windows.outputs(places))
        * channels
        * kernel.dtype.itemsize
    )
    fitting = max(1, max(windows.cache, kernel.nbytes) // max(1, one))
    return batch // max(d for d in range(1, batch + 1) if batch % d == 0 and d <= fitting)


def in_blocks(fn: Callable[..., Array], blocks: int, *arrays: Array, add: bool = False) -> Array:
    """fn(*arrays), computed in blocks of their rows; `add`: whether it sums over the rows."""
    if blocks == 1:
        return fn(*arrays)
    cut = [array.reshape(blocks, -1, *array.shape[1:]) for array in arrays]
    if not add:
        y = jax.lax.scan(lambda _, block: (None, fn(*block)), None, cut)[1]
        return y.reshape(-1, *y.shape[2:])
    shape = jax.eval_shape(fn, *(array[0] for array in cut))
    zeros = jnp.zeros(shape.shape, jnp.promote_types(shape.dtype, jnp.float32))
    return jax.lax.scan(lambda total, block: (total + fn(*block), None), zeros, cut)[0]
