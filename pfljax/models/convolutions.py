"""Convolutions as patches times a matrix, depthwise ones as sums of shifted images; see `windows`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pfljax.core.types import Array
from pfljax.models.windows import Pairs, Windows, patches, unview, views

CACHE_BYTES = 3 << 18  # patches of this size stay in a core's cache (docs/results/speed.md)
SMALL_GROUP = 4  # most products of a group's inputs and outputs for which sums of shifted images are faster


def convolve(x: Array, kernel: Array, windows: Windows, dilation: Sequence[int], groups: int = 1) -> Array:
    """Convolution without bias; see `jax.lax.conv_general_dilated`.

    Args:
        x: (B, *S, C).
        kernel: (*W, C / groups, O).
        windows: How the kernel lies over the dilated input.
        dilation: For each spatial axis, the distance of the input's rows, 1 but in transposed convolutions.
        groups: Number of groups of channels.

    Returns:
        (B, *S', O).
    """
    if any(d > 1 for d in dilation):
        return _transposed(x, kernel, windows, dilation, groups)
    if windows.overlap or groups > 1:
        return _convolve(x, kernel, windows, groups)
    return patches(x, windows) @ kernel.reshape(-1, kernel.shape[-1])


def slopes(
    dy: Array, x: Array, kernel: Array, windows: Windows, dilation: Sequence[int], groups: int = 1
) -> tuple[Array, Array]:
    """The gradients of `convolve` with respect to x and the kernel, given that of its result."""
    if all(d == 1 for d in dilation) and (windows.overlap or groups > 1):
        return _backward(windows, groups, (x, kernel), dy)
    return jax.vjp(lambda x, kernel: convolve(x, kernel, windows, dilation, groups), x, kernel)[1](dy)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve(x: Array, kernel: Array, windows: Windows, groups: int) -> Array:
    form = _shifted if _has_small_groups(kernel, groups) else _product
    blocks = _num_blocks(x, kernel, windows) if form is _product else 1
    return _in_blocks(lambda x: form(x, kernel, windows, groups), blocks, x)


def _forward(x, kernel, windows, groups):
    return _convolve(x, kernel, windows, groups), (x, kernel)


def _backward(windows, groups, saved, dy):
    x, kernel = saved
    if _has_small_groups(kernel, groups):
        # Image by image, so that each is read into cache once instead of once per window.
        slope = _sum_over(lambda x, dy: _shifted_slope(x, dy, windows, kernel, groups), x.shape[0], x, dy)
    else:
        slope = _sum_over(lambda x, dy: _product_slope(x, dy, windows, groups), _num_blocks(x, kernel, windows), x, dy)
        slope = jnp.moveaxis(slope, -1, 0)
    return _input_slope(dy, kernel, windows, groups, x.shape), slope.reshape(kernel.shape)


_convolve.defvjp(_forward, _backward)


def _in_blocks(fn: Callable[[Array], Array], blocks: int, x: Array) -> Array:
    """fn(x), computed in blocks of the rows of x."""
    if blocks == 1:
        return fn(x)
    y = jax.lax.scan(lambda _, block: (None, fn(block)), None, _cut(x, blocks))[1]
    return y.reshape(-1, *y.shape[2:])


def _sum_over(fn: Callable[[Array, Array], Array], blocks: int, *arrays: Array) -> Array:
    """fn(*arrays), summed over blocks of their rows."""
    if blocks == 1:
        return fn(*arrays)
    cut = [_cut(array, blocks) for array in arrays]
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(fn, *(a[0] for a in cut)))
    return jax.lax.scan(lambda total, block: (total + fn(*block), None), zeros, cut)[0]


def _input_slope(dy: Array, kernel: Array, windows: Windows, groups: int, shape: tuple[int, ...]) -> Array:
    """The gradient with respect to the input of `shape`; without strides a convolution of dy with the kernel turned."""
    if any(stride > 1 for stride in windows.strides):
        return _spread(dy, kernel, windows, groups, shape)
    back = windows._replace(padding=_other_padding(windows, shape[1:-1], dy.shape[1:-1]))
    return convolve(dy, _turned(kernel, groups), back, windows.strides, groups)


def _turned(kernel: Array, groups: int) -> Array:
    """The kernel (*W, C / G, O) of a convolution as that of its transpose, (*W, O / G, C)."""
    *size, inputs, outputs = kernel.shape
    flipped = jnp.flip(kernel, range(len(size))).reshape(*size, inputs, groups, outputs // groups)
    return jnp.swapaxes(flipped, -3, -1).reshape(*size, outputs // groups, groups * inputs)


def _other_padding(windows: Windows, wide: Sequence[int], narrow: Sequence[int]) -> Pairs:
    """The padding of a convolution's transpose, from `narrow` to `wide`, whose input is dilated by the strides."""
    rows = zip(windows.size, windows.dilation, windows.strides, windows.padding, wide, narrow, strict=True)
    return tuple((r * (n - 1) - low, w - (m - 1) * s - 1 + low) for n, r, s, (low, _), w, m in rows)


def _spread(y: Array, kernel: Array, windows: Windows, groups: int, shape: tuple[int, ...]) -> Array:
    """The transpose of a convolution of images of `shape`: each entry of y adds the kernel to its window."""
    *size, inputs, outputs = kernel.shape
    if groups == outputs and inputs == 1:  # depthwise, one output for each input
        return unview([y * row for row in kernel.reshape(-1, outputs)], windows, shape)

    def spread(y):
        if groups == 1:
            parts = y @ kernel.reshape(-1, outputs).T
        else:
            rows = kernel.reshape(-1, inputs, groups, outputs // groups)
            parts = jnp.einsum("b...go,wcgo->b...wgc", y.reshape(*y.shape[:-1], groups, -1), rows)
            parts = parts.reshape(*y.shape[:-1], -1)
        return unview(jnp.split(parts, math.prod(size), axis=-1), windows, (y.shape[0], *shape[1:]))

    blocks = _num_blocks(jax.ShapeDtypeStruct(shape, y.dtype), kernel, windows)
    return _in_blocks(spread, blocks, y)


def _transposed(x: Array, kernel: Array, windows: Windows, dilation: Sequence[int], groups: int) -> Array:
    """A convolution of a dilated input, which is the transpose of one with strides."""
    ones = (1,) * len(dilation)
    wide = windows._replace(strides=ones).outputs(
        [(n - 1) * d + 1 for n, d in zip(x.shape[1:-1], dilation, strict=True)]
    )
    forth = windows._replace(strides=tuple(dilation))
    forth = forth._replace(padding=_other_padding(windows._replace(strides=ones), x.shape[1:-1], wide))
    y = _spread(x, _turned(kernel, groups), forth, groups, (x.shape[0], *wide, kernel.shape[-1]))
    return y[(slice(None), *(slice(None, None, stride) for stride in windows.strides))]


def _product(x: Array, kernel: Array, windows: Windows, groups: int) -> Array:
    if groups == 1:
        return patches(x, windows) @ kernel.reshape(-1, kernel.shape[-1])
    rows = kernel.reshape(-1, groups, kernel.shape[-1] // groups)
    y = jnp.einsum("b...gp,pgo->b...go", patches(x, windows, groups), rows)
    return y.reshape(*y.shape[:-2], -1)


def _product_slope(x: Array, dy: Array, windows: Windows, groups: int) -> Array:
    """The gradient with respect to the kernel, (O, P) or (G, O / G, P); on a CPU this order is faster."""
    rows = patches(x, windows, groups)
    if groups == 1:
        return dy.reshape(-1, dy.shape[-1]).T @ rows.reshape(-1, rows.shape[-1])
    return jnp.einsum("b...go,b...gp->gop", dy.reshape(*dy.shape[:-1], groups, -1), rows)


def _has_small_groups(kernel: Array, groups: int) -> bool:
    return groups > 1 and kernel.shape[-2] * (kernel.shape[-1] // groups) <= SMALL_GROUP


def _shifted_views(x: Array, windows: Windows, inputs: int, repeats: int) -> list[Array]:
    """Views (B, *S', O), in the order of the rows of a kernel (-1, O); `inputs` channels make a group."""
    found = [view[..., number::inputs] for view in views(x, windows) for number in range(inputs)]
    return [jnp.repeat(view, repeats, axis=-1) for view in found] if repeats > 1 else found


def _shifted(x: Array, kernel: Array, windows: Windows, groups: int) -> Array:
    rows = kernel.reshape(-1, kernel.shape[-1])
    found = _shifted_views(x, windows, kernel.shape[-2], kernel.shape[-1] // groups)
    return jnp.asarray(sum(view * row for view, row in zip(found, rows, strict=True)))


def _shifted_slope(x: Array, dy: Array, windows: Windows, kernel: Array, groups: int) -> Array:
    found = _shifted_views(x, windows, kernel.shape[-2], kernel.shape[-1] // groups)
    return jnp.stack([(view * dy).sum(tuple(range(dy.ndim - 1))) for view in found])


def _num_blocks(x: Any, kernel: Array, windows: Windows) -> int:
    """Number of blocks to split a batch into: as many as keep a block's patches in cache, or as small as the kernel.

    Each block reads the kernel once.
    """
    batch, entries = x.shape[0], math.prod(windows.size) * math.prod(windows.outputs(x.shape[1:-1])) * x.shape[-1]
    fitting = max(1, max(CACHE_BYTES, kernel.nbytes) // max(1, entries * x.dtype.itemsize))
    return batch // max(d for d in range(1, batch + 1) if batch % d == 0 and d <= fitting) if batch else 1


def _cut(x: Array, blocks: int) -> Array:
    return x.reshape(blocks, -1, *x.shape[1:])
