"""Checks plain arrays and converts them to a `Source`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from pfljax.core.errors import ArgumentError
from pfljax.core.types import Task
from pfljax.data.sources.source import Scaling, Source

TaskName = Literal["auto", "classification", "regression"]


def make_source(
    arrays: Mapping[str, np.ndarray],
    rows: np.ndarray | slice = slice(None),
    *,
    num_classes: int | None = None,
    task: str = "auto",
    images: bool = True,
    standardize: bool = False,
    name: str,
) -> Source:
    """Checks arrays and makes a `Source` from them.

    Args:
        arrays: x (n, *features) numbers and y (n,) numbers or strings; optionally client (n,) integers or strings,
            coarse (n,) integers and is_test (n,) booleans.
        rows: Rows to keep. The classes are determined from all rows.
        num_classes: Number of classes C; None: inferred from y.
        task: "classification", "regression" or "auto", which means regression if y contains floats. Strings in y are
            classes, numbered in sorted order.
        images: Whether uint8 values in x are pixels, which are divided by 255, and x (n, height, width) or (n,) gets a
            last axis with one channel.
        standardize: Whether to give each channel of images, or each feature, mean 0 and standard deviation 1, computed
            on the non-test examples. Integers are kept, since they may be tokens; but uint8 are pixels.
        name: Name for titles.

    Raises:
        ArgumentError: if an array, task or num_classes is not accepted; the message names it.
    """
    _check_shapes(arrays)
    y, names = _numbered(arrays["y"])
    y, num_classes, task = targets(y, "classification" if names and task == "auto" else task, num_classes)
    x = _features(arrays["x"][rows], np.arange(len(y))[rows], images)
    is_test = arrays.get("is_test")
    if is_test is not None:
        if is_test.dtype.kind not in "biu" or not np.isin(is_test, (0, 1)).all():
            raise ArgumentError("is_test", "is not boolean")
        is_test = is_test[rows].astype(bool)
        if is_test.all():
            raise ArgumentError("is_test", "is true for every example; there are none to train on")
    given = arrays["x"]
    scaling = None
    if standardize and (given.dtype.kind == "f" or given.dtype == np.uint8):
        scaling = _standardize(x, is_test, gray=given.dtype == np.uint8 and x.ndim == 3)
        if images and given.dtype == np.uint8:
            scaling = Scaling(255 * scaling.mean, 255 * scaling.std)  # of the pixels as they were given
    client, coarse = (None if arrays.get(key) is None else arrays[key][rows] for key in ("client", "coarse"))
    client, client_names = (None, None) if client is None else _numbered_clients(client)
    return Source(
        x,
        y[rows],
        client,
        is_test,
        num_classes,
        task,
        name,
        coarse=None if coarse is None else _coarse_labels(coarse),
        class_names=names,
        client_names=client_names,
        scaling=scaling,
    )


def _numbered(y: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Numbers strings (n,) as classes 0..C-1 in sorted order, and returns their names. Keeps numbers unchanged."""
    if y.dtype.kind != "U":
        return y, ()
    names, numbers = np.unique(y, return_inverse=True)
    return numbers, tuple(names.tolist())


def targets(y: np.ndarray, task: str = "auto", num_classes: int | None = None) -> tuple[np.ndarray, int, Task]:
    """Checks the targets (n,). Returns them as int32 classes or float32 values, with C and the task."""
    if y.dtype.kind not in "biuf":
        hint = "; y.astype(str) converts it to strings" if y.dtype.kind in "OS" else ""
        raise ArgumentError("y", f"is {y.dtype}; accepted: integers or strings (classes), floats (regression){hint}")
    if task == "auto":
        task = "regression" if y.dtype.kind == "f" else "classification"
    with np.errstate(over="ignore"):
        values = y.astype(np.float32)
    _check_finite("y", values, np.arange(len(y)))
    if task == "regression":
        return values, 1, "regression"
    wrong = np.flatnonzero((y < 0) | (y != np.floor(y)))
    if wrong.size:
        raise ArgumentError("y", f"is {y[wrong[0]]} in row {wrong[0]}; classes are integers 0..C-1")
    found = int(y.max()) + 1
    if num_classes is None and found > max(len(y), 1000):  # hardly classes: each has an output
        raise ArgumentError("y", f"reaches {y.max()} in {len(y)} rows; classes are 0..C-1, regression needs floats")
    if num_classes is not None and found > num_classes:
        raise ArgumentError("num_classes", f"y reaches {y.max()}; accepted: {found} or more", num_classes)
    return y.astype(np.int32), num_classes or found, "classification"


def _check_shapes(arrays: Mapping[str, np.ndarray]) -> None:
    shape = arrays["x"].shape
    if not shape or not arrays["x"].size:
        raise ArgumentError("x", f"is empty, with shape {shape}; accepted: (n, *features)")
    for key, array in arrays.items():
        if key != "x" and array.shape != shape[:1]:
            raise ArgumentError(key, f"has shape {array.shape}, but x has {shape}; accepted: one value per row of x")


def _numbered_clients(client: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Numbers the clients 0..K-1 in sorted order.

    Returns:
        (n,) int64, and the ids (K,) that were numbered; None if they are the numbers.
    """
    if client.dtype.kind not in "iuUS":
        raise ArgumentError("client", f"is {client.dtype}; accepted: integers or strings")
    names, numbers = np.unique(client, return_inverse=True)
    if names.dtype.kind in "iu" and np.array_equal(names, np.arange(len(names))):
        names = None
    elif names.dtype.kind == "S":
        names = np.char.decode(names, "utf-8", "replace")
    return numbers.astype(np.int64), names


def _coarse_labels(coarse: np.ndarray) -> np.ndarray:
    """Checks the coarse labels (n,). Returns them as int32."""
    if coarse.dtype.kind not in "iu":
        raise ArgumentError("coarse", f"is {coarse.dtype}; accepted: integers")
    return coarse.astype(np.int32)


def _features(x: np.ndarray, rows: np.ndarray, images: bool) -> np.ndarray:
    """Converts the examples x (n, *features), rows (n,) of their data set, to float32; see `make_source`."""
    if x.dtype.kind not in "biuf":
        raise ArgumentError("x", f"is {x.dtype}; accepted: numbers")
    if x.ndim == 1 and not images:
        raise ArgumentError("x", f"has shape {x.shape}; accepted: (n, *features), such as x[:, None]")
    if images and x.dtype == np.uint8:
        x = np.divide(x, 255, dtype=np.float32)
    else:
        with np.errstate(over="ignore"):  # values too large for float32 become infinite, which raises an error below
            x = x.astype(np.float32)
        _check_finite("x", x, rows)
    return x[..., None] if images and x.ndim in (1, 3) else x


def _check_finite(name: str, values: np.ndarray, rows: np.ndarray) -> None:
    bad = rows[~np.isfinite(values).reshape(len(values), -1).all(axis=1)]
    if bad.size:
        raise ArgumentError(name, f"is NaN or infinite in {bad.size} rows; the first is row {bad[0]}")


def _standardize(x: np.ndarray, is_test: np.ndarray | None, gray: bool) -> Scaling:
    """Standardizes x (n, *features) in place with the statistics of its non-test rows, one of each for gray images."""
    rows = np.arange(len(x)) if is_test is None else np.flatnonzero(~is_test)
    blocks = np.array_split(rows, len(rows) // 1024 + 1)  # avoids a float64 copy of a whole image data set
    axes = tuple(range(x.ndim if gray else x.ndim - 1))
    count, zero = len(rows) * x[0, ..., 0].size * (x.shape[-1] if gray else 1), np.zeros(())
    mean = (sum((x[block].sum(axes, dtype=np.float64) for block in blocks), zero) / count).astype(np.float32)
    x -= mean
    std = np.sqrt(sum((np.square(x[block], dtype=np.float64).sum(axes) for block in blocks), zero) / count)
    std = np.where(std > 0, std, 1).astype(np.float32)  # a constant feature becomes 0
    x /= std
    return Scaling(mean, std)
