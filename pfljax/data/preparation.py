"""What is measured on training examples and done to all: filling, categories and standardization."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.mapped import in_file, release
from pfljax.contract.types import PyTree
from pfljax.data.sources.source import Features, Scaling, Source

BLOCK = 1024  # rows that are in float64 at a time
SAMPLE = 10_000  # rows of a file that its mean and deviation are measured on
Rows = np.ndarray | slice


class Preparation(NamedTuple):
    """How raw examples become those of clients, which models scale.

    Attributes:
        fill: (F,) numbers that replace NaN; None: there is no NaN.
        kept: (F,) bool, the columns of a table that are kept; None: all are.
        scaling: How models scale x, after that; None: they do not.
    """

    fill: np.ndarray | None
    kept: np.ndarray | None
    scaling: Scaling | None

    def __call__(self, x: PyTree, rows: Rows = slice(None)) -> PyTree:
        """Examples `rows` of x, complete but not scaled. With all rows, arrays that need nothing are not copied."""
        return jax.tree.map(lambda leaf: self._completed(leaf, rows), x)

    def names(self, features: Features | None) -> tuple[str, ...]:
        """Names of the columns of prepared examples; () if they are not those of a table."""
        if features is None or self.kept is None:
            return () if features is None else features.names
        return tuple(name for name, kept in zip(features.names, self.kept, strict=True) if kept)

    def _completed(self, x: Any, rows: Rows) -> Any:
        if self.fill is None and self.kept is None:
            return x if _is_everything(rows) else x[rows]
        ids = np.arange(len(x))[rows]
        width = x.shape[1] if self.kept is None else int(self.kept.sum())
        values = np.empty((len(ids), width), x.dtype)
        for start in range(0, len(ids), BLOCK):
            block = (
                slice(start, start + BLOCK) if _is_everything(rows) else ids[start : start + BLOCK]
            )
            values[start : start + BLOCK] = complete(x[block], self.fill, self.kept)
            release(x)
        return values


def _is_everything(rows: Rows) -> bool:
    return isinstance(rows, slice) and rows == slice(None)


def complete(x: np.ndarray, fill: np.ndarray | None, kept: np.ndarray | None) -> np.ndarray:
    """Fills holes in rows (n, F) of a table and leaves columns out; see `Preparation`."""
    if fill is not None:
        x = np.where(np.isnan(x), fill, x)
    return x if kept is None else x[:, kept]


def fit(source: Source, rows: np.ndarray) -> Preparation:
    """Measures what a source's examples need on the training examples `rows`, ascending ids."""
    fill = _column_means(source, rows) if source.fill else None
    kept = _occurring(source.x, source.features, rows)
    return Preparation(fill, kept, scaling(source, rows, fill, kept))


def scaling(
    source: Source, rows: np.ndarray, fill: np.ndarray | None = None, kept: np.ndarray | None = None
) -> Scaling | None:
    """Measures how models scale a source's examples on its `rows`; see `Preparation`. None: they do not."""
    if not any(source.standardize):
        return None
    one_hot = None if source.features is None else source.features.one_hot
    if one_hot is not None and kept is not None:
        one_hot = one_hot[kept]
    leaves, structure = jax.tree.flatten(source.x)
    measured = []
    for leaf, standardize in zip(leaves, source.standardize, strict=True):
        measured.append(_measure(leaf, rows, fill, kept, one_hot) if standardize else (None, None))
    mean, std = (structure.unflatten(column) for column in zip(*measured, strict=True))
    return Scaling(mean, std)


def prepared(source: Source) -> Source:
    """The source with its examples complete and scaled, by all but official test examples; for use before a split."""
    rows = np.arange(len(source.y)) if source.is_test is None else np.flatnonzero(~source.is_test)
    preparation = fit(source, rows)
    x = preparation(source.x)
    if preparation.scaling is not None:
        x = preparation.scaling(x)
    return dataclasses.replace(source, x=x, standardize=(), fill=False, features=None)


def _column_means(source: Source, rows: np.ndarray) -> np.ndarray:
    """(F,) the mean of the numbers that are there. Raises `ArgumentError` for a column without any."""
    x = source.x
    total = np.zeros(x.shape[1])
    count = np.zeros(x.shape[1], np.int64)
    for block in _blocks(rows):
        part = x[block].astype(np.float64)
        there = ~np.isnan(part)
        total += np.where(there, part, 0).sum(axis=0)
        count += there.sum(axis=0)
    if not count.all():
        column = int(np.argmin(count))
        name = source.features.names[column] if source.features else f"column {column} of x"
        raise ArgumentError(
            "fill", f"{name} has no number in any training example; accepted: x without it"
        )
    return total / count


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
    x: Any,
    rows: np.ndarray,
    fill: np.ndarray | None,
    kept: np.ndarray | None,
    one_hot: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of some rows of x (n, *features), one of each for gray images (n, rows, columns)."""
    if in_file(x):
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
