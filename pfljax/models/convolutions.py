"""Convolutions as patches times a matrix, and depthwise ones as sums of shifted images; see `windows`.

XLA runs a CPU's convolutions slowly inside loops, and those of stacked clients as grouped convolutions. Patches times a
matrix are one product of matrices, stacked or not. The gradients are of the same form: differentiating the patches
would scatter. Here kernels are (*W, C / G, O), for G groups of channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pfljax.contract.types import Array
from pfljax.models.windows import Pairs, Windows, patches, tiles, unview, views

CACHE_BYTES = 3 << 18  # patches of this size stay in a core's cache (docs/results/speed.md)


def convolve(x: Array, kernel: Array, windows: Windows, dilation: Sequence[int], groups: int = 1) -> Array:
    """Convolution (B, *S, C) -> (B, *S', O) without bias; see `jax.lax.conv_general_dilated`.

    `dilation` is the distance of the input's rows, 1 but in transposed convolutions, whose dilated input has `windows`.
    """
    if any(d > 1 for d in dilation):
        return _transposed(x, kernel, windows, dilation, groups)
    if _is_product(x, windows, groups):
        rows = views(x, windows)[0] if math.prod(windows.size) == 1 else tiles(x, windows)
        return rows.reshape(x.shape[0], *windows.outputs(x.shape[1:-1]), -1) @ kernel.reshape(-1, kernel.shape[-1])
    if groups == x.shape[-1] == kernel.shape[-1]:
        rows = kernel.reshape(-1, groups)
        return jnp.asarray(sum(view * row for view, row in zip(views(x, windows), rows, strict=True)))

    outputs = kernel.shape[-1] // groups

    def product(x):
        if groups == 1:
            return patches(x, windows) @ kernel.reshape(-1, kernel.shape[-1])
        y = jnp.einsum("b...gp,pgo->b...go", patches(x, windows, groups), kernel.reshape(-1, groups, outputs))
        return y.reshape(*y.shape[:-2], -1)

    return _in_blocks(product, _num_blocks(x.shape, kernel, windows), x)


def slopes(
    dy: Array, x: Array, kernel: Array, windows: Windows, dilation: Sequence[int], groups: int = 1
) -> tuple[Array, Array]:
    """The gradients of `convolve` with respect to x and the kernel, given that of its result."""
    if any(d > 1 for d in dilation) or _is_product(x, windows, groups):
        return jax.vjp(lambda x, kernel: convolve(x, kernel, windows, dilation, groups), x, kernel)[1](dy)

    def depthwise(x, dy):  # image by image, so that each is read into cache once instead of once per window
        return jnp.stack([(view * dy).sum(tuple(range(dy.ndim - 1))) for view in views(x, windows)])

    def product(x, dy):  # (O, P) or (G, O / G, P): on a CPU, this order is faster
        rows = patches(x, windows, groups)
        if groups == 1:
            return dy.reshape(-1, dy.shape[-1]).T @ rows.reshape(-1, rows.shape[-1])
        return jnp.einsum("b...go,b...gp->gop", dy.reshape(*dy.shape[:-1], groups, -1), rows)

    if groups == x.shape[-1] == kernel.shape[-1]:
        dkernel = _in_blocks(depthwise, x.shape[0], x, dy, add=True)
    else:
        blocks = _num_blocks(x.shape, kernel, windows)
        dkernel = jnp.moveaxis(_in_blocks(product, blocks, x, dy, add=True), -1, 0)
    if any(stride > 1 for stride in windows.strides):
        dx = _spread(dy, kernel, windows, groups, x.shape)
    else:
        back = windows._replace(padding=_other_padding(windows, x.shape[1:-1], dy.shape[1:-1]))
        dx = convolve(dy, _turned(kernel, groups), back, windows.strides, groups)
    return dx, dkernel.reshape(kernel.shape)


def _is_product(x: Array, windows: Windows, groups: int) -> bool:
    """Whether each value of x is in at most one window, so that patches need no copies."""
    return groups == 1 and (math.prod(windows.size) == 1 or windows.tile(x.shape[1:-1]))


def _transposed(x: Array, kernel: Array, windows: Windows, dilation: Sequence[int], groups: int) -> Array:
    """A convolution of a dilated input: the transpose of one with strides, without zeros between rows."""
    plain = windows._replace(strides=(1,) * len(dilation))
    wide = plain.outputs([(n - 1) * d + 1 for n, d in zip(x.shape[1:-1], dilation, strict=True)])
    forth = windows._replace(strides=tuple(dilation), padding=_other_padding(plain, x.shape[1:-1], wide))
    y = _spread(x, _turned(kernel, groups), forth, groups, (x.shape[0], *wide, kernel.shape[-1]))
    return y[(slice(None), *(slice(None, None, stride) for stride in windows.strides))]


def _spread(y: Array, kernel: Array, windows: Windows, groups: int, shape: tuple[int, ...]) -> Array:
    """The transpose of a convolution of images of `shape`: each entry of y adds the kernel to its window."""
    *size, inputs, outputs = kernel.shape
    if inputs == 1 and outputs == groups:
        return unview([y * row for row in kernel.reshape(-1, outputs)], windows, shape)

    def spread(y):
        rows = kernel.reshape(-1, inputs, groups, outputs // groups)
        parts = jnp.einsum("b...go,wcgo->b...wgc", y.reshape(*y.shape[:-1], groups, -1), rows)
        parts = jnp.split(parts.reshape(*y.shape[:-1], -1), math.prod(size), axis=-1)
        return unview(parts, windows, (y.shape[0], *shape[1:]))

    return _in_blocks(spread, _num_blocks(shape, kernel, windows), y)


def _turned(kernel: Array, groups: int) -> Array:
    """The kernel (*W, C / G, O) of a convolution as that of its transpose, (*W, O / G, C)."""
    *size, inputs, outputs = kernel.shape
    flipped = jnp.flip(kernel, range(len(size))).reshape(*size, inputs, groups, outputs // groups)
    return jnp.swapaxes(flipped, -3, -1).reshape(*size, outputs // groups, groups * inputs)


def _other_padding(windows: Windows, wide: Sequence[int], narrow: Sequence[int]) -> Pairs:
    """The padding of a convolution's transpose, from `narrow` to `wide`, whose input is dilated by the strides."""
    rows = zip(*windows, wide, narrow, strict=True)
    return tuple((d * (n - 1) - low, w - (m - 1) * s - 1 + low) for n, s, d, (low, _), w, m in rows)


def _num_blocks(shape: Sequence[int], kernel: Array, windows: Windows) -> int:
    """Number of blocks of images whose patches stay in cache; each reads the kernel, so none is smaller than it."""
    batch, *places, channels = shape
    one = math.prod(windows.size) * math.prod(windows.outputs(places)) * channels * kernel.dtype.itemsize
    fitting = max(1, max(CACHE_BYTES, kernel.nbytes) // max(1, one))
    return batch // max(d for d in range(1, batch + 1) if batch % d == 0 and d <= fitting)


def _in_blocks(fn: Callable[..., Array], blocks: int, *arrays: Array, add: bool = False) -> Array:
    """fn(*arrays), computed in blocks of their rows; `add`: whether it sums over the rows."""
    if blocks == 1:
        return fn(*arrays)
    cut = [array.reshape(blocks, -1, *array.shape[1:]) for array in arrays]
    if not add:
        y = jax.lax.scan(lambda _, block: (None, fn(*block)), None, cut)[1]
        return y.reshape(-1, *y.shape[2:])
    shape = jax.eval_shape(fn, *(array[0] for array in cut))
    return jax.lax.scan(lambda total, block: (total + fn(*block), None), jnp.zeros_like(shape), cut)[0]
