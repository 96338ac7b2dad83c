"""Convolutions and pooling over shifted views of images, which are (B, *S, C) with any number of axes S.

XLA runs a CPU's convolutions slowly inside loops, and those of stacked clients as grouped convolutions. Patches times a
matrix are one product of matrices, stacked or not; depthwise convolutions are sums of shifted images. With few
channels, copying patches takes longer than multiplying them: there, neighboring windows share a patch (`neighbors`).
The gradients are of the same form: differentiating the patches would scatter. Here kernels are (*W, C / G, O), for G
groups of channels, or (O, *W, C), which PyTorch's are transposed to faster.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract.types import Array

# Patches of this size stay in a core's cache (docs/results/speed-networks.md).
CACHE_BYTES = 3 << 18
FEW_CHANNELS = 8  # of windows that share patches
VERY_FEW_CHANNELS = 4  # those of images
MOST_OUTPUTS = 64


class Windows(NamedTuple):
    """How windows lie over an image; the first five fields have an entry for each spatial axis.

    Attributes:
        size: Positions in a window.
        strides: Positions from one window to the next.
        dilation: Positions from one entry of a window to the next.
        padding: Positions added before and after; negative: cut off.
        spread: Distance of the image's rows before it is padded: 1 but in transposed convolutions.
        groups: Groups of channels.
        cache: Bytes of patches that are computed at a time; each block of images reads the kernel.
        sharing: Whether neighboring windows may share a patch, and what lies side by side is copied at once. For CPUs.
        outputs_first: Whether kernels are (O, *W, C); not for groups, `spread` or windows that share a patch.
    """

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: Sequence[tuple[int, int]]
    spread: tuple[int, ...]
    groups: int = 1
    cache: int = CACHE_BYTES
    sharing: bool = False
    outputs_first: bool = False

    def outputs(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Number of windows along each spatial axis of `shape`."""
        numbers = []
        for m, n, stride, dilation, pads, spread in zip(shape, *self[:5], strict=True):
            padded = (m - 1) * spread + sum(pads)
            numbers.append(max(0, (padded - dilation * (n - 1)) // stride + 1))
        return tuple(numbers)

    def tile(self, shape: Sequence[int]) -> bool:
        """Whether the windows cover `shape` without overlap, all channels at once."""
        for m, n, stride, dilation, pads, spread in zip(shape, *self[:5], strict=True):
            if n != stride or m % n != 0 or dilation != 1 or spread != 1 or any(pads):
                return False
        return self.groups == 1


def pad(
    x: Array, padding: Sequence[tuple[int, int]], value: float = 0, interior: Sequence[int] = ()
) -> Array:
    """Pads the spatial axes of x, with `interior` positions between two rows too; negative padding cuts."""
    between = interior or [0] * len(padding)
    spatial = [(*pair, num) for pair, num in zip(padding, between, strict=True)]
    config = [(0, 0, 0), *spatial, (0, 0, 0)]
    if not any(map(any, config)):
        return x
    return jax.lax.pad(x, jnp.asarray(value, x.dtype), config)


def views(x: Array, windows: Windows, value: float = 0) -> list[Array]:
    """An array (B, *S', C) for each position in a window, in reading order; `value` is in the padding."""
    outputs = windows.outputs(x.shape[1:-1])
    x = pad(x, windows.padding, value)
    steps = (1, *windows.strides, 1)
    arrays = []
    for position in positions(windows):
        starts = []
        stops = []
        fields = zip(position, windows.dilation, windows.strides, outputs, strict=True)
        for p, dilation, stride, n in fields:
            start = p * dilation
            starts.append(start)
            stops.append(start + (n - 1) * stride + 1)
        first = (0, *starts, 0)
        last = (x.shape[0], *stops, x.shape[-1])
        arrays.append(jax.lax.slice(x, first, last, steps))
    return arrays


def positions(windows: Windows) -> Iterator[tuple[int, ...]]:
    """The positions in a window, in reading order."""
    return itertools.product(*map(range, windows.size))


def unview(grads: Sequence[Array], windows: Windows, shape: Sequence[int]) -> Array:
    """Sums gradients of the `views` of an array of `shape`: their transpose."""
    total = None
    interior = [stride - 1 for stride in windows.strides]
    for position, grad in zip(positions(windows), grads, strict=True):
        margins = []
        fields = zip(position, *windows[1:4], grad.shape[1:-1], shape[1:-1], strict=True)
        for p, stride, dilation, (low, _), n, m in fields:
            before = p * dilation - low
            margins.append((before, m - before - (n - 1) * stride - 1))
        grad = pad(grad, margins, interior=interior)
        total = grad if total is None else total + grad
    return jnp.asarray(total)


def tiles(x: Array, windows: Windows) -> Array:
    """Windows that tile x: (B, *S, C) -> (B, *S', positions, C)."""
    num_axes = len(windows.size)
    pairs = zip(windows.outputs(x.shape[1:-1]), windows.size, strict=True)
    x = x.reshape(x.shape[0], *itertools.chain.from_iterable(pairs), x.shape[-1])
    channels = 2 * num_axes + 1
    x = x.transpose(0, *range(1, channels, 2), *range(2, channels, 2), channels)
    return x.reshape(*x.shape[: num_axes + 1], -1, x.shape[-1])


def patches(x: Array, windows: Windows) -> Array:
    """The views side by side, (B, *S', positions C); or (B, *S', G, positions C / G) for G > 1 groups of channels."""
    if windows.groups > 1:
        arrays = [view.reshape(*view.shape[:-1], windows.groups, -1) for view in views(x, windows)]
    elif has_segments(windows):
        arrays = segments(x, windows)
    else:
        arrays = views(x, windows)
    return jnp.concatenate(arrays, axis=-1)


def has_segments(windows: Windows) -> bool:
    """Whether patches are copied in `segments`."""
    is_plain = windows.groups == 1 and windows.dilation[-1] == 1
    return windows.sharing and is_plain and windows.strides[-1] > 1


def segments(x: Array, windows: Windows) -> list[Array]:
    """The `views` of windows with strides along the last axis; those side by side are one array (B, *S', n C)."""
    number = windows.outputs(x.shape[1:-1])[-1]
    size = windows.size[-1]
    stride = windows.strides[-1]
    x = pad(x, windows.padding)
    rows = windows._replace(
        size=(*windows.size[:-1], 1),
        strides=(*windows.strides[:-1], 1),
        padding=[(0, 0)] * len(windows.size),
    )
    arrays = []
    for row in views(x, rows):
        axis = row.ndim - 2
        for start in range(0, size, stride):
            n = min(stride, size - start)
            stop = min(start + number * stride, row.shape[axis])
            segment = jax.lax.slice_in_dim(row, start, stop, axis=axis)
            missing = number * stride - segment.shape[axis]
            margins = [(0, 0)] * (axis - 1) + [(0, missing)]
            segment = pad(segment, margins).reshape(*row.shape[:axis], number, stride, -1)
            segment = jax.lax.slice_in_dim(segment, 0, n, axis=axis + 1)
            arrays.append(segment.reshape(*segment.shape[:-2], -1))
    return arrays


def max_pool(x: Array, windows: Windows) -> Array:
    """The largest value in each window, (B, *S, C) -> (B, *S', C)."""
    return functools.reduce(jnp.maximum, views(x, windows, -math.inf))


def max_pool_slope(dy: Array, x: Array, windows: Windows) -> tuple[Array]:
    """The gradient of `max_pool` with respect to x, given that of its result. In a tie, the first position has it."""
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
    if windows.tile(x.shape[1:-1]):
        return tiles(x, windows).sum(-2)
    return jnp.asarray(sum(views(x, windows)))


def convolve(x: Array, kernel: Array, windows: Windows) -> Array:
    """Convolution (B, *S, C) -> (B, *S', O) without bias; see `jax.lax.conv_general_dilated`."""
    groups = windows.groups
    outputs = kernel.shape[0 if windows.outputs_first else -1]
    if set(windows.spread) != {1}:
        return _convolve_spread(x, kernel, windows)
    block = neighbors(x.shape, kernel.shape, windows)
    if block:
        y = convolve(x, shared_kernel(kernel, block), sharing(windows, block))
        return in_order(y, block)
    if _is_product(x, windows):
        is_single = math.prod(windows.size) == 1
        rows = views(x, windows)[0] if is_single else tiles(x, windows)
        y = _times(rows.reshape(-1, kernel.size // outputs), kernel, windows)
        return y.reshape(x.shape[0], *windows.outputs(x.shape[1:-1]), outputs)

    def product(x: Array) -> Array:
        if groups == x.shape[-1] == outputs:
            pairs = zip(views(x, windows), kernel.reshape(-1, groups), strict=True)
            return jnp.asarray(sum(view * row for view, row in pairs))
        if groups == 1:
            return _times(patches(x, windows), kernel, windows)
        weights = kernel.reshape(-1, groups, outputs // groups)
        y = jnp.einsum("b...gp,pgo->b...go", patches(x, windows), weights)
        return y.reshape(*y.shape[:-2], -1)

    # A loop also keeps XLA from computing a depthwise sum again in each operation that reads it.
    return in_blocks(product, num_blocks(x.shape, kernel, windows), x)


def _times(rows: Array, kernel: Array, windows: Windows) -> Array:
    """Rows (..., P) times a kernel as a matrix: (..., O)."""
    if not windows.outputs_first:
        return rows @ kernel.reshape(-1, kernel.shape[-1])
    matrix = kernel.reshape(kernel.shape[0], -1)
    contracted = ((rows.ndim - 1,), (1,))
    return jax.lax.dot_general(rows, matrix, (contracted, ((), ())))


def _convolve_spread(x: Array, kernel: Array, windows: Windows) -> Array:
    """As `convolve`, for images with zeros between rows: the transpose of a convolution with strides."""
    plain = windows._replace(strides=(1,) * len(windows.size))
    wide = plain.outputs(x.shape[1:-1])
    forth = back(plain, x.shape[1:-1], wide)
    shape = (x.shape[0], *wide, kernel.shape[-1])
    y = _spread(x, turned(kernel, windows.groups), forth, shape)
    steps = [slice(None, None, stride) for stride in windows.strides]
    return y[(slice(None), *steps)]


def slopes(dy: Array, x: Array, kernel: Array, windows: Windows) -> tuple[Array, Array]:
    """The gradients of `convolve` with respect to x and the kernel, given that of its result."""
    groups = windows.groups
    wide = x.shape[1:-1]
    narrow = dy.shape[1:-1]
    is_spread = set(windows.spread) != {1}
    has_strides = set(windows.strides) != {1}
    block = neighbors(x.shape, kernel.shape, windows)
    if block:
        blocks = tiles(
            dy, windows._replace(size=block, strides=block, padding=[(0, 0)] * len(block))
        )
        blocks = blocks.reshape(*blocks.shape[:-2], -1)
        dx, dkernel = slopes(blocks, x, shared_kernel(kernel, block), sharing(windows, block))
        return dx, kernel_of_shared(dkernel, block)
    if (is_spread and has_strides) or (not is_spread and _is_product(x, windows)):
        _, pull_back = jax.vjp(lambda x, kernel: convolve(x, kernel, windows), x, kernel)
        return pull_back(dy)
    if is_spread:
        # A convolution with strides is the transpose of this one, with the roles of x and dy exchanged.
        back_kernel = turned(kernel, groups)
        forth = back(windows, wide, narrow)
        dkernel = _slope_of_kernel(x, dy, back_kernel, forth)
        return convolve(dy, back_kernel, forth), turned(dkernel, groups)
    if has_strides:
        dx = _spread(dy, kernel, windows, x.shape)
    else:
        back_kernel = turned(kernel, groups, windows.outputs_first)
        dx = convolve(dy, back_kernel, back(windows, wide, narrow))
    return dx, _slope_of_kernel(dy, x, kernel, windows)


def _slope_of_kernel(dy: Array, x: Array, kernel: Array, windows: Windows) -> Array:
    """The gradient of `convolve` with respect to the kernel, in convolutions that are not transposed."""
    groups = windows.groups
    blocks = num_blocks(x.shape, kernel, windows)

    # In blocks that are read into cache once instead of once per position in a window.
    def depthwise(x: Array, dy: Array) -> Array:
        axes = tuple(range(dy.ndim - 1))
        return jnp.stack([(view * dy).sum(axes) for view in views(x, windows)])

    # Sums over images are float32, whatever the images are. (O, P) or (G, O / G, P): on a CPU, this order is faster.
    def product(x: Array, dy: Array) -> Array:
        rows = patches(x, windows)
        exact = jnp.promote_types(x.dtype, jnp.float32)
        if groups == 1:
            rows = rows.reshape(-1, rows.shape[-1])
            dy = dy.reshape(-1, dy.shape[-1])
            return jnp.matmul(dy.T, rows, preferred_element_type=exact)
        dy = dy.reshape(*dy.shape[:-1], groups, -1)
        return jnp.einsum("b...go,b...gp->gop", dy, rows, preferred_element_type=exact)

    if windows.outputs_first:
        dkernel = in_blocks(product, blocks, x, dy, add=True)
    elif groups == x.shape[-1] == kernel.shape[-1]:
        dkernel = in_blocks(depthwise, blocks, x, dy, add=True)
    else:
        dkernel = jnp.moveaxis(in_blocks(product, blocks, x, dy, add=True), -1, 0)
    return dkernel.reshape(kernel.shape).astype(kernel.dtype)


def neighbors(
    shape: Sequence[int], kernel_shape: Sequence[int], windows: Windows
) -> tuple[int, ...] | None:
    """Number of neighboring windows along each axis that share a patch; None if each window has its own.

    A shared patch is multiplied by a kernel that is zero where a window does not reach. That is more to multiply, but
    less to copy, and matrices of more columns, which are multiplied faster. For windows of 3 and 5, pairs along the
    last axis took 0.48 to 0.71 times as long with 6 and 8 channels, and 2 x 2 windows 0.45 to 0.92 times with up to 4
    channels and 64 outputs. With 16 to 64 channels, pairs took 0.68 to 0.97 times as long alone, but a U-Net 1.06 to
    1.13 times (docs/results/speed-few-channels.md).
    """
    if windows.outputs_first:
        return None
    *size, inputs, outputs = kernel_shape
    is_plain = windows.groups == 1 and set(windows.strides + windows.dilation + windows.spread) == {
        1
    }
    if not (windows.sharing and is_plain and inputs <= FEW_CHANNELS and outputs <= MOST_OUTPUTS):
        return None
    axes = [len(size) - 1]
    if inputs <= VERY_FEW_CHANNELS:
        axes.append(len(size) - 2)
    numbers = windows.outputs(shape[1:-1])
    block = [1] * len(size)
    for axis in axes:
        if axis >= 0 and size[axis] > 1 and numbers[axis] % 2 == 0:
            block[axis] = 2
    return tuple(block) if max(block) > 1 else None


def sharing(windows: Windows, block: Sequence[int]) -> Windows:
    """The patches that blocks of windows share."""
    size = tuple(n + b - 1 for n, b in zip(windows.size, block, strict=True))
    return windows._replace(size=size, strides=tuple(block))


def shared_kernel(kernel: Array, block: Sequence[int]) -> Array:
    """The kernel for a block of windows, zero where a window does not reach: (*W, C, O) -> (*W', C, block O)."""
    shifted = []
    for offset in itertools.product(*map(range, block)):
        margins = [(p, b - 1 - p) for p, b in zip(offset, block, strict=True)]
        shifted.append(jnp.pad(kernel, [*margins, (0, 0), (0, 0)]))
    return jnp.concatenate(shifted, axis=-1)


def kernel_of_shared(dkernel: Array, block: Sequence[int]) -> Array:
    """The transpose of `shared_kernel`: (*W', C, block O) -> (*W, C, O)."""
    parts = jnp.split(dkernel, math.prod(block), axis=-1)
    total: Array | None = None
    for offset, part in zip(itertools.product(*map(range, block)), parts, strict=True):
        pairs = zip(offset, block, part.shape[:-2], strict=True)
        cut = tuple(slice(p, n - (b - 1 - p)) for p, b, n in pairs)
        total = part[cut] if total is None else total + part[cut]
    return jnp.asarray(total)


def in_order(y: Array, block: Sequence[int]) -> Array:
    """Outputs of blocks of windows in the order of the image: (B, *S' / block, block O) -> (B, *S', O)."""
    num_axes = len(block)
    batch, *numbers, width = y.shape
    y = y.reshape(batch, *numbers, *block, width // math.prod(block))
    pairs = [(1 + axis, 1 + num_axes + axis) for axis in range(num_axes)]
    y = y.transpose(0, *itertools.chain.from_iterable(pairs), 2 * num_axes + 1)
    shape = [n * b for n, b in zip(numbers, block, strict=True)]
    return y.reshape(batch, *shape, -1)


def _is_product(x: Array, windows: Windows) -> bool:
    """Whether each value of x is in at most one window, so that patches need no copies."""
    if windows.tile(x.shape[1:-1]):
        return True
    return windows.groups == 1 and math.prod(windows.size) == 1


def back(windows: Windows, wide: Sequence[int], narrow: Sequence[int]) -> Windows:
    """The windows of a convolution's transpose, from `narrow` to `wide`: strides and spread are exchanged."""
    padding = []
    fields = zip(*windows[:5], wide, narrow, strict=True)
    for n, stride, dilation, (low, _), spread, w, m in fields:
        before = dilation * (n - 1) - low
        after = (w - 1) * spread - (m - 1) * stride + low
        padding.append((before, after))
    return windows._replace(
        strides=windows.spread,
        padding=tuple(padding),
        spread=windows.strides,
        outputs_first=False,
    )


def _spread(y: Array, kernel: Array, windows: Windows, shape: tuple[int, ...]) -> Array:
    """The transpose of a convolution of images of `shape`: each entry of y adds the kernel to its window."""
    groups = windows.groups
    if windows.outputs_first:
        (outputs, *size, inputs) = kernel.shape
    else:
        (*size, inputs, outputs) = kernel.shape
    if inputs == 1 and outputs == groups:
        return unview([y * row for row in kernel.reshape(-1, outputs)], windows, shape)

    def spread(y: Array) -> Array:
        # As a product of matrices, whose result XLA does not lay out in another order.
        if windows.outputs_first:
            products = y.reshape(-1, outputs) @ kernel.reshape(outputs, -1)
        elif groups == 1:
            products = y.reshape(-1, outputs) @ kernel.reshape(-1, outputs).T
        else:
            rows = kernel.reshape(-1, inputs, groups, outputs // groups)
            grouped = y.reshape(*y.shape[:-1], groups, -1)
            products = jnp.einsum("b...go,wcgo->b...wgc", grouped, rows)
        products = products.reshape(*y.shape[:-1], -1)
        if has_segments(windows):
            image = jax.ShapeDtypeStruct((y.shape[0], *shape[1:]), products.dtype)
            transpose = jax.linear_transpose(lambda x: patches(x, windows), image)
            return transpose(products)[0]
        grads = jnp.split(products, math.prod(size), axis=-1)
        return unview(grads, windows, (y.shape[0], *shape[1:]))

    return in_blocks(spread, num_blocks(shape, kernel, windows), y)


def turned(kernel: Array, groups: int, outputs_first: bool = False) -> Array:
    """The kernel of a convolution, (*W, C / G, O) or (O, *W, C), as that of its transpose, (*W, O / G, C)."""
    if outputs_first:
        flipped = jnp.flip(kernel, range(1, kernel.ndim - 1))
        return jnp.moveaxis(flipped, 0, -2)
    *size, inputs, outputs = kernel.shape
    flipped = jnp.flip(kernel, range(len(size))).reshape(*size, inputs, groups, outputs // groups)
    return jnp.swapaxes(flipped, -3, -1).reshape(*size, outputs // groups, groups * inputs)


def num_blocks(shape: Sequence[int], kernel: Array, windows: Windows) -> int:
    """Number of blocks of images whose patches stay in cache; each reads the kernel, so none is smaller than it."""
    batch, *image, channels = shape
    num_windows = math.prod(windows.outputs(image))
    patch_bytes = math.prod(windows.size) * num_windows * channels * kernel.dtype.itemsize
    fitting = max(1, max(windows.cache, kernel.nbytes) // max(1, patch_bytes))
    sizes = [size for size in range(1, batch + 1) if batch % size == 0 and size <= fitting]
    return batch // max(sizes)


def in_blocks(fn: Callable[..., Array], blocks: int, *arrays: Array, add: bool = False) -> Array:
    """fn(*arrays), computed in blocks of their rows; `add`: whether it sums over the rows."""
    if blocks == 1:
        return fn(*arrays)
    cut = [array.reshape(blocks, -1, *array.shape[1:]) for array in arrays]
    if not add:
        _, y = jax.lax.scan(lambda _, block: (None, fn(*block)), None, cut)
        return y.reshape(-1, *y.shape[2:])
    shape = jax.eval_shape(fn, *(array[0] for array in cut))
    zeros = jnp.zeros(shape.shape, jnp.promote_types(shape.dtype, jnp.float32))
    total, _ = jax.lax.scan(lambda total, block: (total + fn(*block), None), zeros, cut)
    return total
