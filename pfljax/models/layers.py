"""Layers that stay fast when K clients' weights are stacked.

A stacked convolution is a grouped convolution, which XLA runs slowly; patches times a matrix is a batched matmul.
The gradients are also patches times matrices, not the scatter that differentiating the patches would give.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfljax.core.types import Array

UNSET: Any = None  # number of outputs until the network is built for data
CACHE_BYTES = 6 << 20  # patches of this size stay in a CPU's cache (measured: BUILD_NOTES.md)


def windows(x: Array, size: int, stride: int = 1, margin: int | None = None) -> list[Array]:
    """One array (B, H', W', C) for each of the size * size positions in a sliding window, in reading order.

    Args:
        x: Images (B, H, W, C).
        size: Height and width of the window.
        stride: Pixels from one window to the next.
        margin: Zeros on every side; by default (size - 1) // 2, which keeps H and W at stride 1.
    """
    margin = (size - 1) // 2 if margin is None else margin
    x = jnp.pad(x, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    height, width = ((length - size) // stride * stride + 1 for length in x.shape[1:3])
    return [x[:, i : i + height : stride, j : j + width : stride] for i in range(size) for j in range(size)]


def patches(x: Array, size: int, stride: int = 1, margin: int | None = None) -> Array:
    """The windows side by side: (B, H, W, C) -> (B, H', W', size * size * C)."""
    return jnp.concatenate(windows(x, size, stride, margin), axis=-1)


def _blocks(x: Array, size: int) -> int:
    """Number of blocks to split a batch into: one, but on a CPU as many as keep a block's patches in cache."""
    batch = x.shape[0]
    if jax.default_backend() != "cpu":
        return 1
    per_image = max(1, CACHE_BYTES // (x[0].size * size * size * x.dtype.itemsize))
    return batch // max(d for d in range(1, batch + 1) if batch % d == 0 and d <= max(per_image, 1))


def _cut(x: Array, blocks: int) -> Array:
    return x.reshape(blocks, -1, *x.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def convolve(x: Array, kernel: Array, size: int, margin: int) -> Array:
    """Convolution with stride 1, without bias.

    Args:
        x: Images (B, H, W, C).
        kernel: (size * size * C, O), rows in the order of `patches`.
        size: Height and width of the window.
        margin: Zeros on every side, less than `size`.

    Returns:
        (B, H', W', O), H' = H + 2 margin - size + 1.
    """
    return _apply(x, kernel, size, margin)


def _apply(x: Array, kernel: Array, size: int, margin: int) -> Array:
    blocks = _blocks(x, size)
    if blocks == 1:
        return patches(x, size, 1, margin) @ kernel
    _, y = jax.lax.scan(lambda _, images: (None, patches(images, size, 1, margin) @ kernel), None, _cut(x, blocks))
    return y.reshape(x.shape[0], *y.shape[2:])


def _convolve_forward(x, kernel, size, margin):
    return _apply(x, kernel, size, margin), (x, kernel)


def _convolve_backward(size, margin, saved, dy):
    x, kernel = saved
    flipped = kernel.reshape(size, size, x.shape[-1], -1)[::-1, ::-1].transpose(0, 1, 3, 2)
    dx = _apply(dy, flipped.reshape(-1, x.shape[-1]), size, size - 1 - margin)

    def dkernel(x, dy):
        # Transposed: the product in this order is faster on a CPU.
        return dy.reshape(-1, dy.shape[-1]).T @ patches(x, size, 1, margin).reshape(-1, kernel.shape[0])

    blocks = _blocks(x, size)
    if blocks == 1:
        return dx, dkernel(x, dy).T
    zeros = jnp.zeros(kernel.shape[::-1], kernel.dtype)
    total, _ = jax.lax.scan(lambda t, b: (t + dkernel(*b), None), zeros, (_cut(x, blocks), _cut(dy, blocks)))
    return dx, total.T


convolve.defvjp(_convolve_forward, _convolve_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def convolve_depthwise(x: Array, kernel: Array, size: int, stride: int) -> Array:
    """Depthwise convolution: a separate window per channel, odd `size`, margin (size - 1) / 2, without bias.

    Sums shifted images, which XLA fuses into one pass; its grouped convolution is 20 to 30 times slower on a CPU.

    Args:
        x: Images (B, H, W, C).
        kernel: (size * size, C).
        size: Height and width of the window.
        stride: Pixels from one window to the next.

    Returns:
        (B, ceil(H / stride), ceil(W / stride), C).
    """
    return _shifted_sum(x, kernel, size, stride)


def _shifted_sum(x: Array, kernel: Array, size: int, stride: int) -> Array:
    return jnp.asarray(sum(part * row for part, row in zip(windows(x, size, stride), kernel, strict=True)))


def _depthwise_forward(x, kernel, size, stride):
    return _shifted_sum(x, kernel, size, stride), (x, kernel)


def _depthwise_backward(size, stride, saved, dy):
    x, kernel = saved

    def dkernel(total, image):  # image by image, so that each is read into cache once instead of once per window
        x, dy = image
        return total + jnp.stack([(part[0] * dy).sum((0, 1)) for part in windows(x[None], size, stride)]), None

    total, _ = jax.lax.scan(dkernel, jnp.zeros_like(kernel), (x, dy))
    if stride > 1:  # zeros between the rows and columns that the windows skipped
        spread = [dim for n in dy.shape[1:3] for dim in (n, stride)]
        wide = jnp.zeros((dy.shape[0], *spread, dy.shape[-1]), dy.dtype).at[:, :, 0, :, 0].set(dy)
        dy = wide.reshape(dy.shape[0], spread[0] * stride, spread[2] * stride, -1)[:, : x.shape[1], : x.shape[2]]
    return _shifted_sum(dy, kernel[::-1], size, 1), total


convolve_depthwise.defvjp(_depthwise_forward, _depthwise_backward)


class DepthwiseConv(nn.Module):
    """`convolve_depthwise` with its kernel."""

    size: int = 3
    stride: int = 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=())
        kernel = self.param("kernel", scale, (self.size * self.size, x.shape[-1]))
        return convolve_depthwise(x, kernel, self.size, self.stride)


class PatchConv(nn.Module):
    """Convolution with odd size and stride 1, NHWC, as one matrix product; then optional max pooling.

    The bias is added after the pooling: the same result for a quarter of the work.
    """

    features: int
    size: int = 3
    pool: bool = False
    margin: int | None = None  # zeros on every side; None: keeps height and width
    bias: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        rows = self.size * self.size * x.shape[-1]
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (rows, self.features))
        x = convolve(x, kernel, self.size, (self.size - 1) // 2 if self.margin is None else self.margin)
        x = max_pool(x) if self.pool else x
        return x + self.param("bias", nn.initializers.zeros, (self.features,)) if self.bias else x


def _corners(x: Array) -> list[Array]:
    """The four pixels of every 2 x 2 window, in reading order, each (B, H // 2, W // 2, C)."""
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2].reshape(batch, height // 2, 2, width // 2, 2, channels)
    return [x[:, :, i, :, j] for i in range(2) for j in range(2)]


@jax.custom_vjp
def max_pool(x: Array) -> Array:
    """2 x 2 max pooling with stride 2; drops an odd last row or column. In a tie, the gradient goes to the first
    pixel."""
    return functools.reduce(jnp.maximum, _corners(x))


def _max_pool_forward(x):
    y = max_pool(x)
    return y, (x, y)


def _max_pool_backward(saved, dy):
    x, y = saved
    taken, grads = False, []
    for corner in _corners(x):
        chosen = (corner == y) & ~jnp.asarray(taken)
        taken = taken | chosen
        grads.append(jnp.where(chosen, dy, 0))
    batch, height, width, channels = y.shape
    rows = [jnp.stack(grads[:2], axis=3), jnp.stack(grads[2:], axis=3)]
    dx = jnp.stack(rows, axis=2).reshape(batch, 2 * height, 2 * width, channels)
    return (jnp.pad(dx, ((0, 0), (0, x.shape[1] - 2 * height), (0, x.shape[2] - 2 * width), (0, 0))),)


max_pool.defvjp(_max_pool_forward, _max_pool_backward)
