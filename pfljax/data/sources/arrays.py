"""Plain arrays, checked and brought into the form of a Source."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pfljax.core.errors import ArgumentError
from pfljax.core.types import Task
from pfljax.data.sources.source import Source

TASKS = ("auto", "classification", "regression")


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
    """A Source of the given arrays, after a look at each.

    Args:
        arrays: x (n, *features) numbers and y (n,) numbers or strings; optionally client (n,) integers or strings,
            coarse (n,) integers and is_test (n,) booleans.
        rows: Which of them to keep. The classes are those of all.
        num_classes: Classes C; None: as many as y tells.
        task: "classification", "regression" or "auto": floats in y make a regression. Strings in y are classes,
            numbered in sorted order.
        images: Whether x of uint8 is pixels, to be divided by 255, and x (n, height, width) or (n,) gets a last axis
            of one channel.
        standardize: Whether each channel of images, and each feature otherwise, gets mean 0 and standard deviation 1,
            measured on the examples that are not for testing.
        name: For titles.

    Raises:
        ArgumentError: naming the array, or task or num_classes.
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
            raise ArgumentError("is_test", "holds for every example, so that there is none to train on")
    if standardize:
        _standardize(x, is_test)
    client, coarse = (None if arrays.get(key) is None else arrays[key][rows] for key in ("client", "coarse"))
    return Source(
        x,
        y[rows],
        None if client is None else _client_ids(client),
        is_test,
        num_classes,
        task,
        name,
        coarse=None if coarse is None else _coarse_labels(coarse),
        class_names=names,
    )


def _numbered(y: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Strings (n,) as classes 0..C-1 in sorted order, and their names; numbers as they are."""
    if y.dtype.kind != "U":
        return y, ()
    names, numbers = np.unique(y, return_inverse=True)
    return numbers, tuple(names.tolist())


def targets(y: np.ndarray, task: str = "auto", num_classes: int | None = None) -> tuple[np.ndarray, int, Task]:
    """Checks the targets (n,); returns them as int32 classes or float32, with C and the task."""
    if task not in TASKS:
        raise ArgumentError("task", f"accepted: {', '.join(TASKS)}", task)
    if y.dtype.kind not in "biuf":
        hint = "; y.astype(str) makes strings of it" if y.dtype.kind in "OS" else ""
        raise ArgumentError("y", f"is {y.dtype}; accepted: integers or strings (classes), floats (a regression){hint}")
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
    if num_classes is None and found > max(len(y), 1000):  # each class has its own output: these are hardly classes
        raise ArgumentError("y", f"reaches {y.max()} in {len(y)} rows; classes are 0..C-1, floats a regression")
    if num_classes is not None and found > num_classes:
        raise ArgumentError("num_classes", f"y reaches {y.max()}; accepted: {found} or more", num_classes)
    return y.astype(np.int32), num_classes or found, "classification"


def _check_shapes(arrays: Mapping[str, np.ndarray]) -> None:
    shape = arrays["x"].shape
    if not shape or not arrays["x"].size:
        raise ArgumentError("x", f"is empty, its shape is {shape}; accepted: (n, *features)")
    for key, array in arrays.items():
        if key != "x" and array.shape != shape[:1]:
            raise ArgumentError(key, f"has shape {array.shape}, x has {shape}; accepted: one value for each row of x")


def _client_ids(client: np.ndarray) -> np.ndarray:
    """Numbers the clients 0..K-1 in sorted order: (n,) int64 from integers or strings."""
    if client.dtype.kind not in "iuUS":
        raise ArgumentError("client", f"is {client.dtype}; accepted: integers and strings")
    return np.unique(client, return_inverse=True)[1].astype(np.int64)


def _coarse_labels(coarse: np.ndarray) -> np.ndarray:
    """Checks the coarse labels (n,); returns them as int32."""
    if coarse.dtype.kind not in "iu":
        raise ArgumentError("coarse", f"is {coarse.dtype}; accepted: integers")
    return coarse.astype(np.int32)


def _features(x: np.ndarray, rows: np.ndarray, images: bool) -> np.ndarray:
    """The examples x (n, *features), rows (n,) of their data set, as float32 (see `make_source` for `images`)."""
    if x.dtype.kind not in "biuf":
        raise ArgumentError("x", f"is {x.dtype}; accepted: numbers")
    if x.ndim == 1 and not images:
        raise ArgumentError("x", f"has shape {x.shape}; accepted: (n, *features), such as x[:, None]")
    pixels = images and x.dtype == np.uint8
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused below
        x = x.astype(np.float32)
    if pixels:
        x /= 255
    _check_finite("x", x, rows)
    return x[..., None] if images and x.ndim in (1, 3) else x


def _check_finite(name: str, values: np.ndarray, rows: np.ndarray) -> None:
    bad = rows[~np.isfinite(values).reshape(len(values), -1).all(axis=1)]
    if bad.size:
        raise ArgumentError(name, f"is NaN or infinite in {bad.size} rows, the first is row {bad[0]}")


def _standardize(x: np.ndarray, is_test: np.ndarray | None) -> None:
    """Shifts and scales x (n, *features) in place by what its non-test rows measure."""
    rows = np.arange(len(x)) if is_test is None else np.flatnonzero(~is_test)
    blocks = np.array_split(rows, len(rows) // 1024 + 1)  # no float64 copy of a whole image set
    axes = tuple(range(x.ndim - 1))
    count, zero = len(rows) * x[0, ..., 0].size, np.zeros(())
    x -= (sum((x[block].sum(axes, dtype=np.float64) for block in blocks), zero) / count).astype(np.float32)
    std = np.sqrt(sum((np.square(x[block], dtype=np.float64).sum(axes) for block in blocks), zero) / count)
    x /= np.where(std > 0, std, 1).astype(np.float32)  # a constant feature becomes 0
