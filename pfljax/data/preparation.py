"""What is measured on training examples and done to all: filling, categories and standardization."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.mapped import in_file, release
from pfljax.contract.types import PyTree
from pfljax.data.sources.source import Features, Scaling, Source

BLOCK = 1024  # rows that are in float64 at a time
SAMPLE = 10_000  # rows of a file that its mean and deviation are measured on
ALL_ROWS = slice(None)
Rows = np.ndarray | slice


class Preparation(NamedTuple):
    """How raw examples become those of clients, which models scale.

    Attributes:
        fill: (F,) numbers that replace NaN; None: there is no NaN.
        columns: (F,) bool, the columns of a table that clients have; None: all.
        scaling: How models scale x, after that; None: they do not.
    """

    fill: np.ndarray | None
    columns: np.ndarray | None
    scaling: Scaling | None

    def __call__(self, x: PyTree, rows: Rows = ALL_ROWS) -> PyTree:
        """Examples `rows` of x, complete but not scaled. With all rows, arrays that need nothing are not copied."""
        return jax.tree.map(lambda leaf: self._completed(leaf, rows), x)

    def names(self, features: Features | None) -> tuple[str, ...]:
        """Names of the columns of prepared examples; () if they are not those of a table."""
        if features is None:
            return ()
        if self.columns is None:
            return features.names
        columns = np.flatnonzero(self.columns)
        return tuple(features.names[column] for column in columns)

    def _completed(self, x: Any, rows: Rows) -> Any:
        is_everything = isinstance(rows, slice) and rows == ALL_ROWS
        if self.fill is None and self.columns is None:
            return x if is_everything else x[rows]
        ids = np.arange(len(x))[rows]
        width = x.shape[1] if self.columns is None else int(self.columns.sum())
        completed = np.empty((len(ids), width), x.dtype)
        for start in range(0, len(ids), BLOCK):
            # A slice of a file reads its rows at once.
            block = slice(start, start + BLOCK)
            values = x[block] if is_everything else x[ids[block]]
            completed[block] = complete(values, self.fill, self.columns)
            release(x)
        return completed


def complete(x: np.ndarray, fill: np.ndarray | None, columns: np.ndarray | None) -> np.ndarray:
    """Fills missing numbers in rows (n, F) of a table and leaves columns out; see `Preparation`."""
    if fill is not None:
        x = np.where(np.isnan(x), fill, x)
    return x if columns is None else x[:, columns]


def fit(source: Source, rows: np.ndarray) -> Preparation:
    """Measures what a source's examples need on the training examples `rows`, ascending ids."""
    fill = _column_means(source, rows) if source.fill else None
    columns = _occurring(source.x, source.features, rows)
    return Preparation(fill, columns, scaling(source, rows, fill, columns))


def scaling(
    source: Source,
    rows: np.ndarray,
    fill: np.ndarray | None = None,
    columns: np.ndarray | None = None,
) -> Scaling | None:
    """Measures how models scale a source's examples on its `rows`; see `Preparation`. None: they do not."""
    if not any(source.standardize):
        return None
    one_hot = None if source.features is None else source.features.one_hot
    if one_hot is not None and columns is not None:
        one_hot = one_hot[columns]
    leaves, structure = jax.tree.flatten(source.x)
    means = []
    deviations = []
    for leaf, standardize in zip(leaves, source.standardize, strict=True):
        mean = None
        std = None
        if standardize:
            has_channels_first = source.channels_first and leaf.ndim > 2
            mean, std = _measure(leaf, rows, fill, columns, has_channels_first)
            # Columns of 0 and 1 are not scaled.
            if one_hot is not None:
                mean = np.where(one_hot, 0, mean)
                std = np.where(one_hot, 1, std)
        means.append(mean)
        deviations.append(std)
    return Scaling(structure.unflatten(means), structure.unflatten(deviations))


def prepared(source: Source) -> Source:
    """The source with its examples complete and scaled, by all but official test examples; for use before a split."""
    rows = np.arange(len(source.y)) if source.is_test is None else np.flatnonzero(~source.is_test)
    preparation = fit(source, rows)
    x = preparation(source.x)
    if preparation.scaling is not None:
        x = preparation.scaling(x)
    return dataclasses.replace(source, x=x, standardize=(), fill=False, features=None)


def _column_means(source: Source, rows: np.ndarray) -> np.ndarray:
    """(F,) the mean of the numbers that are not missing. Raises `ArgumentError` for a column without any."""
    x = source.x
    total = np.zeros(x.shape[1])
    count = np.zeros(x.shape[1], np.int64)
    for block in _blocks(rows):
        values = x[block].astype(np.float64)
        is_number = ~np.isnan(values)
        total += np.where(is_number, values, 0).sum(axis=0)
        count += is_number.sum(axis=0)
    if not count.all():
        column = int(np.argmin(count))
        name = source.features.names[column] if source.features else f"column {column} of x"
        text = f"{name} has no number in any training example; accepted: x without it"
        raise ArgumentError("fill", text)
    return total / count


def _occurring(x: np.ndarray, features: Features | None, rows: np.ndarray) -> np.ndarray | None:
    """(F,) bool: the columns of a table but those of categories that no training example has. None: all columns."""
    if features is None or features.complete or not features.one_hot.any():
        return None
    occurs = np.zeros(x.shape[1], bool)
    for block in _blocks(rows):
        occurs |= (x[block] != 0).any(axis=0)
    columns = occurs | ~features.one_hot
    return None if columns.all() else columns


def _blocks(rows: np.ndarray) -> list[np.ndarray]:
    return np.array_split(rows, len(rows) // BLOCK + 1)


def _measure(
    x: Any,
    rows: np.ndarray,
    fill: np.ndarray | None,
    columns: np.ndarray | None,
    channels_first: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of some rows of x (n, *features), one of each for gray images (n, rows, columns).

    With `channels_first`, x is (n, C, *S), and they are (C, 1, ...).
    """
    # A file is sampled evenly.
    if in_file(x):
        rows = rows[:: -(-len(rows) // SAMPLE)]
    is_gray = x.dtype == np.uint8 and x.ndim == 3 and not channels_first
    axes = tuple(range(x.ndim if is_gray else x.ndim - 1))

    def values_of(rows: np.ndarray) -> np.ndarray:
        values = complete(x[rows].astype(np.float64), fill, columns)
        return np.moveaxis(values, 1, -1) if channels_first else values

    def blocks() -> Iterator[np.ndarray]:
        for block in _blocks(rows):
            yield values_of(block)
            release(x)

    # Differences from a first number make a constant's deviation exactly 0.
    first = values_of(rows[:1])
    origin = first.flat[0] if is_gray else first.reshape(-1, first.shape[-1])[0]
    count = len(rows) * first.size // origin.size
    total = np.zeros(())
    for values in blocks():
        total = total + (values - origin).sum(axes)
    mean = origin + total / count

    squares = np.zeros(())
    for values in blocks():
        squares = squares + np.square(values - mean).sum(axes)
    std = np.sqrt(squares / count)
    # A constant feature becomes 0.
    std = np.where(std > 0, std, 1)
    if channels_first:
        shape = (-1, *[1] * (x.ndim - 2))
        return mean.reshape(shape), std.reshape(shape)
    return mean, std
