"""Layers that stay fast when K clients' weights are stacked.

A stacked convolution is a grouped convolution, which XLA runs badly; patches times a matrix is a batched matmul.
The gradients are patches times matrices too (and not the scatter that differentiating the patches would give).
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfljax.types import Array

CACHE_BYTES = 6 << 20  # on a CPU, patches of so many bytes at a time stay in cache (measured: BUILD_NOTES.md)


def patches(x: Array, size: int) -> Array:
    """The size x size neighborhood of every pixel under SAME padding: (B, H, W, C) -> (B, H, W, size * size * C)."""
    before = (size - 1) // 2
    height, width = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (before, size - 1 - before), (before, size - 1 - before), (0, 0)))
    return jnp.concatenate([x[:, i : i + height, j : j + width] for i in range(size) for j in range(size)], axis=-1)


def _blocks(x: Array, size: int) -> int:
    """Into how many blocks of images to cut a batch: one, but on a CPU so many that a block's patches stay in cache."""
    batch = x.shape[0]
    if jax.default_backend() != "cpu":
        return 1
    per_image = max(1, CACHE_BYTES // (x[0].size * size * size * x.dtype.itemsize))
    return batch // max(d for d in range(1, batch + 1) if batch % d == 0 and d <= max(per_image, 1))


def _cut(x: Array, blocks: int) -> Array:
    return x.reshape(blocks, -1, *x.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve(x: Array, kernel: Array, size: int) -> Array:
    """A convolution of odd `size`, stride 1, SAME padding, without bias.

    Args:
        x: Images (B, H, W, C).
        kernel: (size * size * C, O), rows in the order of `patches`.
        size: Height and width of the window.

    Returns:
        (B, H, W, O).
    """
    return _apply(x, kernel, size)


def _apply(x: Array, kernel: Array, size: int) -> Array:
    blocks = _blocks(x, size)
    if blocks == 1:
        return patches(x, size) @ kernel
    _, y = jax.lax.scan(lambda _, images: (None, patches(images, size) @ kernel), None, _cut(x, blocks))
    return y.reshape(*x.shape[:3], -1)


def _convolve_forward(x, kernel, size):
    return _apply(x, kernel, size), (x, kernel)


def _convolve_backward(size, saved, dy):
    x, kernel = saved
    flipped = kernel.reshape(size, size, x.shape[-1], -1)[::-1, ::-1].transpose(0, 1, 3, 2)
    dx = _apply(dy, flipped.reshape(-1, x.shape[-1]), size)

    def dkernel(x, dy):
        # Transposed: the product in this order is the faster one on a CPU.
        return dy.reshape(-1, dy.shape[-1]).T @ patches(x, size).reshape(-1, kernel.shape[0])

    blocks = _blocks(x, size)
    if blocks == 1:
        return dx, dkernel(x, dy).T
    zeros = jnp.zeros(kernel.shape[::-1], kernel.dtype)
    total, _ = jax.lax.scan(lambda t, b: (t + dkernel(*b), None), zeros, (_cut(x, blocks), _cut(dy, blocks)))
    return dx, total.T


convolve.defvjp(_convolve_forward, _convolve_backward)


class PatchConv(nn.Module):
    """A convolution of odd size, stride 1 and SAME padding, NHWC, as one matrix product; then max pooling, if asked.

    The bias is added after the pooling: the same numbers, for a quarter of the work.
    """

    features: int
    size: int = 3
    pool: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        rows = self.size * self.size * x.shape[-1]
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (rows, self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        x = convolve(x, kernel, self.size)
        return (max_pool(x) if self.pool else x) + bias


def _corners(x: Array) -> list[Array]:
    """The four pixels of every 2 x 2 window, in reading order, each (B, H // 2, W // 2, C)."""
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2].reshape(batch, height // 2, 2, width // 2, 2, channels)
    return [x[:, :, i, :, j] for i in range(2) for j in range(2)]


@jax.custom_vjp
def max_pool(x: Array) -> Array:
    """2 x 2 max pooling with stride 2; an odd last row or column is dropped. A tie's gradient goes to the first."""
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
