"""What is measured on training examples and done to all: filling, categories and standardization."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from pfljax.contract.mapped import in_file, release
from pfljax.contract.types import PyTree
from pfljax.data.sources.source import Features, Scaling, Source

BLOCK = 1024  # rows that are in float64 at a time
SAMPLE = 10_000  # rows of a file that its mean and deviation are measured on
Rows = np.ndarray | slice


class Preparation(NamedTuple):
    """How raw examples become those that are trained on.

    Attributes:
        fill: (F,) numbers that replace NaN; None: there is no NaN.
        kept: (F,) bool, the columns of a table that are kept; None: all are.
        scaling: How x is standardized, after that; None: it is not.
    """

    fill: np.ndarray | None
    kept: np.ndarray | None
    scaling: Scaling | None

    def __call__(self, x: PyTree, rows: Rows = slice(None)) -> PyTree:
        """Prepares examples `rows` of x, block by block. Pixels in a file stay there, raw and with all rows."""
        leaves, structure = jax.tree.flatten(x)
        means = [None] * len(leaves) if self.scaling is None else _leaves(self.scaling.mean)
        stds = [None] * len(leaves) if self.scaling is None else _leaves(self.scaling.std)
        arrays = zip(leaves, means, stds, strict=True)
        return structure.unflatten([self._prepared(leaf, mean, std, rows) for leaf, mean, std in arrays])

    def names(self, features: Features | None) -> tuple[str, ...]:
        """Names of the columns of prepared examples; () if they are not those of a table."""
        if features is None or self.kept is None:
            return () if features is None else features.names
        return tuple(name for name, kept in zip(features.names, self.kept, strict=True) if kept)

    def _prepared(self, x: Any, mean: np.ndarray | None, std: np.ndarray | None, rows: Rows) -> Any:
        if stays_in_file(x, scaled=mean is not None):
            return x
        if mean is None and self.fill is None and self.kept is None:
            return x[rows]
        ids = np.arange(len(x))[rows]
        width = x.shape[1:] if self.kept is None else (int(self.kept.sum()),)
        values = np.empty((len(ids), *width), np.float32)
        for start in range(0, len(ids), BLOCK):
            block = complete(x[_block(ids, rows, start)], self.fill, self.kept)
            values[start : start + BLOCK] = block if mean is None else (block - mean) / std
            release(x)
        return values


def _block(ids: np.ndarray, rows: Rows, start: int) -> Rows:
    """An index of the next rows; a slice where all rows are asked for, which copies nothing."""
    everything = isinstance(rows, slice) and rows == slice(None)
    return slice(start, start + BLOCK) if everything else ids[start : start + BLOCK]


def _leaves(tree: PyTree) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)


def stays_in_file(x: Any, scaled: bool) -> bool:
    """Whether examples stay in their file: pixels, which are scaled in each mini-batch, and what is not scaled."""
    return in_file(x) and (x.dtype == np.uint8 or not scaled)


def any_stays_in_file(source: Source) -> bool:
    """Whether an array of a source's x stays in its file."""
    leaves = jax.tree.leaves(source.x)
    scaled = source.standardize or (False,) * len(leaves)
    return any(map(stays_in_file, leaves, scaled))


def complete(x: np.ndarray, fill: np.ndarray | None, kept: np.ndarray | None) -> np.ndarray:
    """Fills holes in rows (n, F) of a table and leaves columns out; see `Preparation`."""
    if fill is not None:
        x = np.where(np.isnan(x), fill, x)
    return x if kept is None else x[:, kept]


def fit(source: Source, rows: np.ndarray) -> Preparation:
    """Measures what a source's examples need on the training examples `rows`, ascending ids."""
    fill = _column_means(source.x, rows) if source.fill else None
    kept = _occurring(source.x, source.features, rows)
    if not any(source.standardize):
        return Preparation(fill, kept, None)
    one_hot = None if source.features is None else source.features.one_hot
    if one_hot is not None and kept is not None:
        one_hot = one_hot[kept]
    leaves, structure = jax.tree.flatten(source.x)
    measured = [
        _measure(leaf, rows, fill, kept, one_hot) if scaled else (None, None)
        for leaf, scaled in zip(leaves, source.standardize, strict=True)
    ]
    mean, std = (structure.unflatten(column) for column in zip(*measured, strict=True))
    return Preparation(fill, kept, Scaling(mean, std))


def prepared(source: Source) -> Source:
    """The source with its examples prepared, by all that are not official test examples; for use before a split."""
    rows = np.arange(len(source.y)) if source.is_test is None else np.flatnonzero(~source.is_test)
    x = fit(source, rows)(source.x)
    return dataclasses.replace(source, x=x, standardize=(), fill=False, features=None)


def _column_means(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(F,) the mean of the numbers that are there; 0 for a column without any."""
    total = np.zeros(x.shape[1])
    count = np.zeros(x.shape[1], np.int64)
    for block in _blocks(rows):
        part = x[block].astype(np.float64)
        there = ~np.isnan(part)
        total += np.where(there, part, 0).sum(axis=0)
        count += there.sum(axis=0)
    return total / np.maximum(count, 1)


def _occurring(x: np.ndarray, features: Features | None, rows: np.ndarray) -> np.ndarray | None:
    """(F,) bool: the columns of a table but those of categories that no training example has. None: all columns."""
    if features is None or not features.one_hot.any():
        return None
    occurs = np.zeros(x.shape[1], bool)
    for block in _blocks(rows):
        occurs |= (x[block] != 0).any(axis=0)
    kept = occurs | ~features.one_hot
    return None if kept.all() else kept


def _blocks(rows: np.ndarray) -> list[np.ndarray]:
    return np.array_split(rows, len(rows) // BLOCK + 1)


def _measure(
    x: Any, rows: np.ndarray, fill: np.ndarray | None, kept: np.ndarray | None, one_hot: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of some rows of x (n, *features), one of each for gray images (n, rows, columns)."""
    if stays_in_file(x, scaled=True):
        rows = rows[:: -(-len(rows) // SAMPLE)]
    gray = x.dtype == np.uint8 and x.ndim == 3
    axes = tuple(range(x.ndim if gray else x.ndim - 1))

    def numbers(ids: np.ndarray) -> np.ndarray:
        return complete(x[ids].astype(np.float64), fill, kept)

    # Differences from a first number make a constant's deviation exactly 0.
    first = numbers(rows[:1])
    origin = first.flat[0] if gray else first.reshape(-1, first.shape[-1])[0]
    count = len(rows) * first.size // origin.size
    total = np.zeros(())
    for block in _blocks(rows):
        total = total + (numbers(block) - origin).sum(axes)
        release(x)
    mean = origin + total / count
    squares = np.zeros(())
    for block in _blocks(rows):
        squares = squares + np.square(numbers(block) - mean).sum(axes)
        release(x)
    std = np.sqrt(squares / count)
    std = np.where(std > 0, std, 1)  # a constant feature becomes 0
    if one_hot is not None:
        mean = np.where(one_hot, 0, mean)
        std = np.where(one_hot, 1, std)
    return mean, std
