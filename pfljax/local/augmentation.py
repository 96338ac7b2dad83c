"""Random crops and flips of training images; evaluation uses the original images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Key, PyTree

Augment = Literal["none", "crop_flip"]
MARGIN = 4  # largest shift of a crop in pixels, on every side


def crop_flip(key: Key, x: Array) -> Array:
    """Shifts images (B, H, W, C) randomly by up to 4 pixels either way, and mirrors each with probability 1/2.

    A shift is a crop, of the image's size, from the image padded with 4 zeros on every side. In standardized images
    zero is the mean color; in the usual order, padding before standardizing, the margin is black.
    """
    draws = jax.random.uniform(key, (x.shape[0], 3))
    shifts = jnp.floor(draws[:, :2] * (2 * MARGIN + 1))
    moves = shifts.astype(jnp.int32) - MARGIN
    return move_and_flip(x, moves, draws[:, 2] < 0.5)


def move_and_flip(x: Array, moves: Array, flips: Array) -> Array:
    """Pixel (i, j) of the crop of image b is pixel (i, j) + moves[b] of the image, or zero; flips then mirror rows.

    Args:
        x: (B, H, W, C).
        moves: (B, 2) int32.
        flips: (B,) bool.
    """
    num_images, height, width, _ = x.shape

    # The row (B, H, 1) and column (B, 1, W) of each pixel in the image, which may be outside.
    columns = jnp.where(flips[:, None], jnp.arange(width)[::-1], jnp.arange(width))
    rows = jnp.arange(height) + moves[:, :1]
    columns = columns + moves[:, 1:]
    row_is_inside = (rows >= 0) & (rows < height)
    row_is_inside = row_is_inside[:, :, None]
    column_is_inside = (columns >= 0) & (columns < width)
    is_inside = row_is_inside & column_is_inside[:, None, :]

    rows = jnp.clip(rows, 0, height - 1)
    columns = jnp.clip(columns, 0, width - 1)
    images = jnp.arange(num_images)[:, None, None]
    pixels = x[images, rows[:, :, None], columns[:, None, :]]
    return jnp.where(is_inside[..., None], pixels, 0)


def crop_flip_channels_first(key: Key, x: Array) -> Array:
    """As `crop_flip`, for images (B, C, H, W)."""
    return jnp.moveaxis(crop_flip(key, jnp.moveaxis(x, 1, -1)), -1, 1)


def augmentation(
    name: str, inputs: PyTree, channels_first: bool = False
) -> Callable[[Key, Array], Array] | None:
    """Returns the function that augments a mini-batch's inputs (B, *features); None for "none".

    Args:
        name: One of `Augment`.
        inputs: The inputs' shape (B, *features), or a tree of shapes.
        channels_first: Whether images are (B, C, H, W) instead of (B, H, W, C).

    Raises:
        ArgumentError: if the inputs are not images.
    """
    if name == "none":
        return None
    if getattr(inputs, "ndim", None) != 4:
        shapes = jax.tree.map(lambda leaf: leaf.shape[1:], inputs)
        axes = "channels, height, width" if channels_first else "height, width, channels"
        text = f"needs images ({axes})"
        raise ArgumentError("augment", f"{text}; accepted for inputs of shape {shapes}: none", name)
    return crop_flip_channels_first if channels_first else crop_flip
