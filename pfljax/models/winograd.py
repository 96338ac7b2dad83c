"""Convolutions of 3 x 3 windows with 16 products for four results instead of 36, by sums of views.

"Fast algorithms for convolutional neural networks" (Lavin and Gray, CVPR 2016), F(2 x 2, 3 x 3) and its symbols: a tile
of 2 x 2 results is A^T [(G g G^T) * (B^T d B)] A, for a kernel g and 4 x 4 places d; tiles overlap by two places. The
gradients are of the same form. Values differ from those of other forms by about 1e-6 of the largest one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from pfljax.contract.types import Array
from pfljax.models.convolutions import Windows, back, in_blocks, num_blocks, turned, views

FEWEST_CHANNELS = 32  # with fewer, sums take as long as the products that they save (docs/results/speed.md)

# B^T (x) B^T, G (x) G and A^T (x) A^T: the matrices for both axes.
PLACES = np.kron(*[np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])] * 2)
KERNEL = np.kron(*[np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)] * 2)
RESULTS = np.kron(*[np.array([[1, 1, 1, 0], [0, 1, -1, -1]])] * 2)


def pays(shape: Sequence[int], outputs: int, windows: Windows) -> bool:
    """Whether `convolve` and `slopes` are faster than patches for images of `shape` (B, H, W, C) and O `outputs`."""
    if windows.size != (3, 3) or {*windows.strides, *windows.dilation, *windows.spread, windows.groups} != {1}:
        return False
    batch, *places, inputs = shape
    tiles = batch * math.prod(-(-m // 2) for m in windows.outputs(places))
    enough = 8 * tiles >= max(inputs, outputs)  # or else transforming the kernel takes longer than the products
    return min(inputs, outputs) >= FEWEST_CHANNELS and enough


def convolve(x: Array, kernel: Array, windows: Windows) -> Array:
    """Convolution (B, H, W, C) -> (B, H', W', O) with a kernel (3, 3, C, O); see `convolutions.convolve`."""
    (height, width), of_tiles, weights = windows.outputs(x.shape[1:-1]), _tiles(x, windows), _weights(kernel)

    def product(x):
        rows = _sums(views(x, of_tiles), PLACES)
        y = rows.reshape(len(PLACES), -1, x.shape[-1]) @ weights
        y = _sums(y.reshape(*rows.shape[:-1], -1), RESULTS)  # (4, B, tiles, tiles, O)
        y = y.reshape(2, 2, *y.shape[1:]).transpose(2, 3, 0, 4, 1, 5)
        return y.reshape(len(x), 2 * y.shape[1], 2 * y.shape[3], -1)

    return in_blocks(product, num_blocks(x.shape, weights, of_tiles), x)[:, :height, :width]


def slopes(dy: Array, x: Array, kernel: Array, windows: Windows) -> tuple[Array, Array]:
    """The gradients of `convolve` with respect to x and the kernel, given that of its result."""
    of_tiles, weights = _tiles(x, windows), _weights(kernel)
    results = Windows((2, 2), (2, 2), (1, 1), [(0, m % 2) for m in dy.shape[1:-1]], (1, 1))

    def product(x, dy):
        rows, dy = _sums(views(x, of_tiles), PLACES), _sums(views(dy, results), RESULTS.T)
        rows, dy = (array.reshape(len(PLACES), -1, array.shape[-1]) for array in (rows, dy))
        return jnp.einsum("pno,pnc->poc", dy, rows)  # on a CPU, this order is faster

    dweights = in_blocks(product, num_blocks(x.shape, weights, of_tiles), x, dy, add=True)
    dkernel = (KERNEL.T @ dweights.reshape(len(PLACES), -1)).reshape(3, 3, *dweights.shape[1:])
    dx = convolve(dy, turned(kernel, 1), back(windows, x.shape[1:-1], dy.shape[1:-1]))
    return dx, jnp.swapaxes(dkernel, -1, -2)


def _tiles(x: Array, windows: Windows) -> Windows:
    """The windows of 4 x 4 places, two apart, from which tiles of 2 x 2 results come; the last may be half empty."""
    padding = [
        (low, high + m % 2) for (low, high), m in zip(windows.padding, windows.outputs(x.shape[1:-1]), strict=True)
    ]
    return windows._replace(size=(4, 4), strides=(2, 2), padding=padding)


def _weights(kernel: Array) -> Array:
    """G g G^T, a matrix for each place: (3, 3, C, O) -> (16, C, O)."""
    return (KERNEL @ kernel.reshape(9, -1)).reshape(-1, *kernel.shape[2:])


def _sums(parts: Sequence[Array] | Array, signs: np.ndarray) -> Array:
    """Sums of parts with signs of 1, -1 or 0, stacked: `signs` (n, parts) -> (n, ...)."""
    signed = [[part if sign > 0 else -part for part, sign in zip(parts, row, strict=True) if sign] for row in signs]
    return jnp.stack([sum(terms[1:], terms[0]) for terms in signed])
