"""Examples that clients hold by reference: one pool and an index of each client's examples."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pfljax.contract.lazy import LazyArray
from pfljax.contract.mapped import release

Array = jax.Array | np.ndarray
BLOCK = 1024  # examples that are standardized at a time
FEW_CHANNELS = 4  # of images, whose pixels are looked up


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pooled(LazyArray):
    """Stacked examples (K, n_max, *features) as a pool and an index: client k's example i is pool[index[k, i]].

    Replaces an array in a `Split` and is indexed like one; it reads zeros where the index is -1. `x[ids]` for an array
    or slice of clients is again `Pooled` and copies no examples; any other index reads examples.

    Attributes:
        pool: (P, *features), which may stay in a file. On the devices its last row is zeros, so that index -1 needs no
            mask.
        index: (K, n_max) int32; -1 is padding.
        spread: Whether the pool is spread over the devices. Each device then holds the rows that its own clients need,
            an equal number per device, and the index counts rows over all devices.
    """

    pool: Array
    index: Array
    spread: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.index.shape, *self.pool.shape[self.index.ndim - 1 :])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.pool.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.index.shape[0]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) or getattr(key, "ndim", 0) == 1:
            return dataclasses.replace(self, index=self.index[key])
        key = key if isinstance(key, tuple) else (key,)

        # An ellipsis stands for as many whole axes as are not named.
        ellipses = [number for number, part in enumerate(key) if part is Ellipsis]
        if ellipses:
            position = ellipses[0]
            whole_axes = [slice(None)] * (self.ndim - len(key) + 1)
            key = (*key[:position], *whole_axes, *key[position + 1 :])

        # Its first two entries are for clients and their examples, the others for features.
        index = self.index[key[:2]]
        all_examples = (slice(None),) * index.ndim
        return self.examples(index)[all_examples + key[2:]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self[...], dtype)

    def examples(self, index: Array) -> Array:
        """The examples (..., *features) at entries (...) of the index."""
        if isinstance(self.pool, jax.Array) or isinstance(index, Tracer):
            return jnp.asarray(self.pool).at[index].get(mode="promise_in_bounds")
        examples = self.rows(np.asarray(index))
        if np.min(index, initial=0) < 0:
            is_padding = np.less(index, 0)
            examples[is_padding] = 0
        return examples

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Copies of rows (...) of a pool on the host, as examples are read. Shape (..., *features)."""
        pool: Any = self.pool
        rows = np.take(pool, positions, axis=0)
        release(pool)
        return rows

    def for_run(self, run: int) -> Pooled:
        """The examples of one of several runs, which are stacked on the leading axis."""
        return jax.tree.map(lambda leaf: leaf[run], self)

    def on_device(self, device: Array) -> Pooled:
        """One device's part of a spread pool: its own rows and an index into them."""
        first = device * self.pool.shape[0]
        index = jnp.where(self.index < 0, -1, self.index - first)
        return dataclasses.replace(self, index=index, spread=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Filed(Pooled):
    """Pooled examples that stay in a file whose pool is only used like an array.

    JAX takes no such pool as an argument, so it is no leaf. Compiled code that reads an example has all in memory.
    """

    pool: Any = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Standardized(Pooled):
    """Pooled examples on the host that are standardized when they are read: float32 (pool - mean) / std.

    The pool has the numbers that the user gave, and is never copied as a whole. Padding reads zeros.

    Attributes:
        mean: Mean of the examples, float64, which broadcasts against an example: (), or (channels,) or (features,).
        std: Their standard deviation, of the same shape.
    """

    mean: np.ndarray = dataclasses.field(kw_only=True)
    std: np.ndarray = dataclasses.field(kw_only=True)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def examples(self, index: Array) -> Array:
        if not isinstance(index, Tracer):
            return super().examples(index)
        examples = super().examples(index).astype(np.float32)  # only where shapes are traced
        return (examples - self.mean) / self.std

    def rows(self, positions: np.ndarray) -> np.ndarray:
        positions = np.asarray(positions)
        rows = super().rows(positions.reshape(-1))
        examples = standardized(rows, self.mean, self.std)
        return examples.reshape(*positions.shape, *examples.shape[1:])


def standardized(x: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """float32 (x - mean) / std of examples (n, *features), computed in float64, a block of examples at a time."""
    result = np.empty(x.shape, np.float32)
    is_image = x.dtype == np.uint8 and x.ndim > 1 and np.size(mean) <= FEW_CHANNELS
    for start in range(0, len(x), BLOCK):
        block = slice(start, start + BLOCK)
        if is_image:
            look_up(x[block], mean, std, result[block])
        else:
            result[block] = (x[block] - mean) / std
    return result


def look_up(x: np.ndarray, mean: np.ndarray, std: np.ndarray, result: np.ndarray) -> None:
    """Writes the standardized values of pixels x (n, ..., C), each of which has one of 256 values, into `result`."""
    values = np.arange(256, dtype=np.uint8)[:, None]
    table = ((values - mean) / std).astype(np.float32)
    if table.shape[1] == 1:
        np.take(table[:, 0], x, out=result, mode="clip")
        return
    for channel in range(table.shape[1]):
        result[..., channel] = np.take(table[:, channel], x[..., channel])


def is_pooled(leaf: Any) -> bool:
    """For `jax.tree.map(..., is_leaf=is_pooled)`: treats examples as one leaf."""
    return isinstance(leaf, Pooled)
