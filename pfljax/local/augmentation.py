"""Random crops and flips of the images that are trained on; evaluation sees the images themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from pfljax.core.errors import ArgumentError
from pfljax.core.types import Array, Key

Augment = Literal["none", "crop_flip"]
MARGIN = 4  # pixels by which a crop may be off on every side


def crop_flip(key: Key, x: Array) -> Array:
    """Images (B, H, W, C), each moved by up to 4 pixels either way and every other one mirrored, at random.

    That is a crop of the image's size out of the image with 4 zeros on every side. In standardized images zero is the
    mean color; in the usual order, padding before standardizing, the margin is black.
    """
    draws = jax.random.uniform(key, (x.shape[0], 3))
    moves = jnp.floor(draws[:, :2] * (2 * MARGIN + 1)).astype(jnp.int32) - MARGIN
    return move_and_flip(x, moves, draws[:, 2] < 0.5)


def move_and_flip(x: Array, moves: Array, flips: Array) -> Array:
    """Pixel (i, j) of the crop of image b is pixel (i, j) + moves[b] of the image, or zero; then rows are mirrored.

    Args:
        x: (B, H, W, C).
        moves: (B, 2) int32.
        flips: (B,) bool.
    """
    images, height, width, _ = x.shape
    across = jnp.where(flips[:, None], jnp.arange(width)[::-1], jnp.arange(width))
    rows, columns = jnp.arange(height) + moves[:, :1], across + moves[:, 1:]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    rows, columns = jnp.clip(rows, 0, height - 1), jnp.clip(columns, 0, width - 1)
    found = x[jnp.arange(images)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return jnp.where(inside[..., None], found, 0)


def augmentation(name: str, shape: tuple[int, ...]) -> Callable[[Key, Array], Array] | None:
    """What is done to a mini-batch's inputs (B, *features); None for nothing.

    Args:
        name: One of `Augment`.
        shape: (B, *features).

    Raises:
        ArgumentError: for inputs that are no images.
    """
    if name == "none":
        return None
    if len(shape) != 4:
        text = f"is for images (height, width, channels); accepted for inputs of shape {shape[1:]}: none"
        raise ArgumentError("augment", text, name)
    return crop_flip


def check(name: str) -> None:
    """Raises `ArgumentError` for a name that there is not."""
    if name not in get_args(Augment):
        raise ArgumentError("augment", f"accepted: {', '.join(get_args(Augment))}", name)
