"""Convolutions of 3 x 3 windows with 16 products for four results instead of 36, by sums of views.

"Fast algorithms for convolutional neural networks" (Lavin and Gray, CVPR 2016), F(2 x 2, 3 x 3) and its symbols: a tile
of 2 x 2 results is A^T [(G g G^T) * (B^T d B)] A, for a kernel g and 4 x 4 pixels d; tiles overlap by two pixels. The
gradients are of the same form. Values differ from those of other forms by about 1e-6 of the largest one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract.types import Array
from pfljax.models.rewriting.convolutions import Windows, back, in_blocks, num_blocks, pad, turned

# The fewest that were timed (docs/results/speed.md); sums weigh more, the fewer there are
FEWEST_CHANNELS = 16

# B^T and A^T, which transform one axis, and G (x) G, which transforms both axes of a kernel.
PIXELS = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
RESULTS = np.array([[1, 1, 1, 0], [0, 1, -1, -1]])
KERNEL_AXIS = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)
KERNEL = np.kron(KERNEL_AXIS, KERNEL_AXIS)


def pays(shape: Sequence[int], outputs: int, windows: Windows) -> bool:
    """Whether `convolve` and `slopes` are faster than patches for images of `shape` (B, H, W, C) and O `outputs`."""
    steps = {*windows.strides, *windows.dilation, *windows.spread, windows.groups}
    if windows.size != (3, 3) or steps != {1}:
        return False
    batch, *image, inputs = shape
    tiles = batch * math.prod(-(-m // 2) for m in windows.outputs(image))
    # Or else transforming the kernel takes longer than the products.
    has_enough_tiles = 8 * tiles >= max(inputs, outputs)
    return min(inputs, outputs) >= FEWEST_CHANNELS and has_enough_tiles


def convolve(x: Array, kernel: Array, windows: Windows) -> Array:
    """Convolution (B, H, W, C) -> (B, H', W', O) with a kernel (3, 3, C, O); see `convolutions.convolve`."""
    height, width = windows.outputs(x.shape[1:-1])
    tiles = _tiles(x, windows)
    weights = _weights(kernel)

    def product(x: Array) -> Array:
        pixels = _transformed(x, tiles.padding, PIXELS)
        y = _rows(pixels) @ weights
        y = y.reshape(4, 4, *pixels.shape[2:-1], -1)
        halves = [jnp.stack(_sums(half, RESULTS), axis=3) for half in _sums(y, RESULTS)]
        y = jnp.stack(halves, axis=2)
        # From (B, tiles, 2, tiles, 2, O).
        return y.reshape(len(x), 2 * y.shape[1], 2 * y.shape[3], -1)

    y = in_blocks(product, num_blocks(x.shape, weights, tiles), x)
    return y[:, :height, :width]


def slopes(dy: Array, x: Array, kernel: Array, windows: Windows) -> tuple[Array, Array]:
    """The gradients of `convolve` with respect to x and the kernel, given that of its result."""
    tiles = _tiles(x, windows)
    weights = _weights(kernel)
    odd = [(0, m % 2) for m in dy.shape[1:-1]]

    def product(x: Array, dy: Array) -> Array:
        pixels = _transformed(x, tiles.padding, PIXELS)
        results = _transformed(dy, odd, RESULTS.T)
        # On a CPU, this order is faster.
        return jnp.einsum("pno,pnc->poc", _rows(results), _rows(pixels))

    dweights = in_blocks(product, num_blocks(x.shape, weights, tiles), x, dy, add=True)
    dkernel = KERNEL.T @ dweights.reshape(len(weights), -1)
    dkernel = dkernel.reshape(3, 3, *dweights.shape[1:])
    dx = convolve(dy, turned(kernel, 1), back(windows, x.shape[1:-1], dy.shape[1:-1]))
    return dx, jnp.swapaxes(dkernel, -1, -2)


def _tiles(x: Array, windows: Windows) -> Windows:
    """The windows of 4 x 4 pixels, two apart, from which tiles of 2 x 2 results come; the last may be half empty."""
    sizes = windows.outputs(x.shape[1:-1])
    padding = [(low, high + m % 2) for (low, high), m in zip(windows.padding, sizes, strict=True)]
    return windows._replace(size=(4, 4), strides=(2, 2), padding=padding)


def _weights(kernel: Array) -> Array:
    """G g G^T, a matrix for each pixel of a tile: (3, 3, C, O) -> (16, C, O)."""
    return (KERNEL @ kernel.reshape(9, -1)).reshape(-1, *kernel.shape[2:])


def _transformed(x: Array, padding: Sequence[tuple[int, int]], signs: np.ndarray) -> Array:
    """S d S^T for windows d, two apart, and `signs` S (4, n): (B, H, W, C) -> (4, 4, B, tiles, tiles, C)."""
    x = pad(x, padding)
    size = signs.shape[1]
    for axis in (-2, -3):  # one after the other: half the code to compile, and fewer sums
        stop = x.shape[axis] - size + 1
        pixels = [jax.lax.slice_in_dim(x, start, stop + start, 2, axis) for start in range(size)]
        x = jnp.stack(_sums(pixels, signs))
    return x


def _rows(pixels: Array) -> Array:
    """(4, 4, ..., C) -> (16, rows, C)."""
    return pixels.reshape(16, -1, pixels.shape[-1])


def _sums(terms: Sequence[Array] | Array, signs: np.ndarray) -> list[Array]:
    """Sums of terms with signs of 1, -1 or 0: one for each row of `signs` (n, terms)."""
    signed = []
    for row in signs:
        pairs = zip(terms, row, strict=True)
        signed.append([term if sign > 0 else -term for term, sign in pairs if sign])
    return [functools.reduce(jnp.add, row) for row in signed]
