"""Convolutions as patches times a matrix, depthwise ones as sums of shifted images; see `windows`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pfljax.core.types import Array
from pfljax.models.windows import Windows, patches, views

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
        return _by_phases(x, kernel, windows, dilation, groups)
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
    if blocks == 1:
        return form(x, kernel, windows, groups)
    _, y = jax.lax.scan(lambda _, block: (None, form(block, kernel, windows, groups)), None, _cut(x, blocks))
    return y.reshape(-1, *y.shape[2:])


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


def _sum_over(fn: Callable[[Array, Array], Array], blocks: int, *arrays: Array) -> Array:
    """fn(*arrays), summed over blocks of their rows."""
    if blocks == 1:
        return fn(*arrays)
    cut = [_cut(array, blocks) for array in arrays]
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(fn, *(a[0] for a in cut)))
    return jax.lax.scan(lambda total, block: (total + fn(*block), None), zeros, cut)[0]


def _input_slope(dy: Array, kernel: Array, windows: Windows, groups: int, shape: tuple[int, ...]) -> Array:
    """The gradient with respect to the input of `shape`: a convolution of dy, as far apart as the windows were."""
    *size, inputs, outputs = kernel.shape
    axes = tuple(range(len(size)))
    flipped = jnp.flip(kernel, axes).reshape(*size, inputs, groups, outputs // groups)
    swapped = jnp.swapaxes(flipped, -3, -1).reshape(*size, outputs // groups, groups * inputs)
    padding = []
    for axis, (low, _) in enumerate(windows.padding):
        before = windows.dilation[axis] * (size[axis] - 1) - low
        wide = (dy.shape[axis + 1] - 1) * windows.strides[axis] + 1
        padding.append((before, shape[axis + 1] - wide + low))
    back = Windows(tuple(size), (1,) * len(size), windows.dilation, tuple(padding))
    return convolve(dy, swapped, back, windows.strides, groups)


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


def _num_blocks(x: Array, kernel: Array, windows: Windows) -> int:
    """Number of blocks to split a batch into: as many as keep a block's patches in cache, or as small as the kernel.

    Each block reads the kernel once.
    """
    batch, entries = x.shape[0], math.prod(windows.size) * math.prod(windows.outputs(x.shape[1:-1])) * x.shape[-1]
    fitting = max(1, max(CACHE_BYTES, kernel.nbytes) // max(1, entries * x.dtype.itemsize))
    return batch // max(d for d in range(1, batch + 1) if batch % d == 0 and d <= fitting) if batch else 1


def _cut(x: Array, blocks: int) -> Array:
    return x.reshape(blocks, -1, *x.shape[1:])


def _by_phases(x: Array, kernel: Array, windows: Windows, dilation: Sequence[int], groups: int) -> Array:
    """A convolution of a dilated input: every few outputs see the same entries of the kernel, between the zeros.

    Along an axis, output o reads row (o s + w r - p) / d of the input for entry w of the kernel, if that is a whole
    number (stride s, distance r of the kernel's entries, p zeros before, distance d of the input's rows). So outputs
    o = f + P t of one phase f, P = d / gcd(s, d), are an ordinary convolution with a part of the kernel's entries.
    """
    axes = range(len(dilation))
    wide = [(n - 1) * d + 1 for n, d in zip(x.shape[1:-1], dilation, strict=True)]
    outputs = windows.outputs(wide)
    periods = [d // math.gcd(s, d) for s, d in zip(windows.strides, dilation, strict=True)]
    counts = [-(-n // period) for n, period in zip(outputs, periods, strict=True)]
    found = [[_phase(windows, dilation, x.shape, counts, axis, f) for f in range(periods[axis])] for axis in axes]
    parts = []
    for phase in itertools.product(*found):
        entries, *fields = zip(*phase, strict=True)
        part = kernel[entries]
        if part.size:
            parts.append(convolve(x, part, Windows(*fields), (1,) * len(dilation), groups))
        else:
            parts.append(jnp.zeros((x.shape[0], *counts, kernel.shape[-1]), x.dtype))
    y = jnp.stack(parts).reshape(*periods, *parts[0].shape)  # (*P, B, *T, O) to (B, T_1, P_1, T_2, P_2, ..., O)
    order = [len(axes), *itertools.chain.from_iterable((len(axes) + 1 + a, a) for a in axes), 2 * len(axes) + 1]
    y = y.transpose(order).reshape(x.shape[0], *(p * t for p, t in zip(periods, counts, strict=True)), -1)
    return jax.lax.slice(y, (0,) * y.ndim, (y.shape[0], *outputs, y.shape[-1]))


def _phase(windows: Windows, dilation: Sequence[int], shape: Sequence[int], counts: Sequence[int], axis: int, f: int):
    """A phase along one axis: the kernel's entries, their number, stride, distance and padding."""
    size, s, r, (low, _) = (field[axis] for field in windows)
    d, rows = dilation[axis], shape[axis + 1]
    every, period = d // math.gcd(r, d), d // math.gcd(s, d)
    first = next((w for w in range(every) if (f * s - low + w * r) % d == 0), size)
    entries = slice(first, size, every)
    number, stride, distance = len(range(size)[entries]), period * s // d, every * r // d
    before = -((f * s - low + first * r) // d)
    after = (counts[axis] - 1) * stride + (number - 1) * distance + 1 - before - rows
    return entries, number, stride, distance, (before, after)
