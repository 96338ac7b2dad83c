"""The columns of one table in the order of another's, whose models then read the right ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pfljax.contract.errors import ArgumentError, few, warn
from pfljax.contract.pooled import Pooled, is_pooled
from pfljax.data.sources.source import Features, Scaling, Source

ABSENT = -1  # position of a column that is 0 in all rows


def positions(names: Sequence[str], known: Sequence[str], argument: str) -> np.ndarray:
    """(F,) the position in a table of each column that models read; `ABSENT` for a category that it does not have.

    A category that models do not know has no column, as one of test examples alone: all columns of its kind are 0.

    Args:
        names: The table's columns; COLUMN=CATEGORY for one of a categorical column.
        known: (F,) the columns that models read.
        argument: What the table is called in messages.

    Raises:
        ArgumentError: if the table lacks a column.
    """
    position = {name: number for number, name in enumerate(names)}
    categorical = {name.partition("=")[0] for name in names if "=" in name}
    matched = np.full(len(known), ABSENT)
    lacking = []
    for number, name in enumerate(known):
        column, is_category, _ = name.partition("=")
        if name in position:
            matched[number] = position[name]
        elif not is_category or column not in categorical:
            lacking.append(column if is_category else name)
    if lacking:
        accepted = f"expected {few(list(known))}"
        raise ArgumentError(
            argument, f"has no column {few(list(dict.fromkeys(lacking)))}; {accepted}"
        )
    read = {name.partition("=")[0] for name in known if "=" in name}
    unknown = [name for name in names if name not in known and name.partition("=")[0] in read]
    if unknown:
        text = f"has categories that training does not know: {few(unknown)}"
        warn(argument, f"{text}; all columns of their kind are 0")
    return matched


def take(x: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The columns of x (..., F) at some positions; zeros for `ABSENT`."""
    taken = np.take(x, np.maximum(columns, 0), axis=-1)
    return np.where(columns == ABSENT, np.zeros((), x.dtype), taken)


def take_pooled(x: Any, columns: np.ndarray) -> Any:
    """As `take`, of examples that may be pooled."""
    if is_pooled(x):
        pool = take(np.asarray(x.pool), columns)
        return Pooled(pool, x.index, x.spread)
    return take(np.asarray(x), columns)


def take_scaling(scaling: Scaling | None, columns: np.ndarray) -> Scaling | None:
    """The scaling of these columns; a column that is always 0 stays so."""
    if scaling is None:
        return None
    std = np.where(columns == ABSENT, 1, take(scaling.std, columns))
    return Scaling(take(scaling.mean, columns), std)


def like(source: Source, known: Sequence[str], argument: str) -> Source:
    """A table with the columns that models read, in their order; each category has its column.

    Raises:
        ArgumentError: if the table lacks a column.
    """
    if source.features is None or not known:
        return source
    columns = positions(source.features.names, known, argument)
    one_hot = (columns == ABSENT) | source.features.one_hot[columns]
    features = Features(tuple(known), one_hot, complete=True)
    return dataclasses.replace(source, x=take(source.x, columns), features=features)
