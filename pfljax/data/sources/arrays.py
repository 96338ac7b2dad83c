"""Checks plain arrays and converts them to a `Source`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from pfljax.contract.errors import ArgumentError, warn
from pfljax.contract.fields import MOST
from pfljax.contract.mapped import in_file, release
from pfljax.contract.types import PyTree, Task
from pfljax.data.sources.source import WHITE, Scaling, Source

BLOCK = 1024  # rows that are in float64 at a time
SAMPLE = 10_000  # rows of a file that its mean and deviation are measured on
LARGEST = np.finfo(np.float32).max
TaskName = Literal["auto", "classification", "regression", "multilabel"]
IGNORED = -1  # target of a place of a sequence or image without a class


def as_arrays(x: Any, **others: Any) -> dict[str, Any]:
    """What a user gives, y among it, as arrays; x may be a tree of arrays. Leaves out what is None.

    A dict, a named tuple, or a tuple that does not have one entry for each example is a tree.
    """
    found = {key: np.asarray(array) for key, array in others.items() if array is not None}
    rows = isinstance(x, tuple) and not hasattr(x, "_fields") and "y" in found and found["y"].shape[:1] == (len(x),)
    if rows or not isinstance(x, Mapping | tuple):
        return found | {"x": np.asarray(x)}
    return found | {"x": jax.tree.map(np.asarray, x, is_leaf=lambda node: isinstance(node, list))}


def make_source(
    arrays: Mapping[str, Any],
    rows: np.ndarray | slice = slice(None),
    *,
    num_classes: int | None = None,
    task: str = "auto",
    ignored_index: int | None = None,
    images: bool = True,
    standardize: bool = False,
    name: str,
) -> Source:
    """Checks arrays and makes a `Source` from them.

    Args:
        arrays: x (n, *features) numbers, or a tree of such arrays, and y (n, ...) numbers, or (n,) strings; optionally
            client (n,) integers or strings, coarse (n,) integers and is_test (n,) booleans.
        rows: Rows to keep. The classes are determined from all rows.
        num_classes: Number of classes C; None: inferred from y.
        task: "classification", "regression", "multilabel" for labels 0 or 1 in y (n, C), or "auto": regression if y
            contains floats, multilabel if it is boolean (n, C). Strings in y are classes, numbered in sorted order.
        ignored_index: Class of places of sequences and images that are ignored, besides negative ones.
        images: Whether uint8 values in x are pixels, which are divided by 255, and x (n, height, width) or (n,) gets a
            last axis with one channel.
        standardize: Whether to give each channel of images, or each feature, mean 0 and standard deviation 1, computed
            on the non-test examples: models do so, and x is kept. Integers may be tokens, but uint8 are pixels.
        name: Name for titles.

    Raises:
        ArgumentError: if an array, task or num_classes is not accepted; the message names it.
    """
    _check_shapes(arrays)
    y, names = _numbered(_plain("y", arrays["y"]))
    y, num_classes, task = targets(
        y, "classification" if names and task == "auto" else task, num_classes, ignored_index
    )
    rows, is_test = _with_targets(y, rows, task), arrays.get("is_test")
    if is_test is not None:
        if is_test.dtype.kind not in "biu" or not np.isin(is_test, (0, 1)).all():
            raise ArgumentError("is_test", "is not boolean")
        is_test = is_test[rows].astype(bool)
        if is_test.all():
            raise ArgumentError("is_test", "is true for every example; there are none to train on")
    x, scaling = _inputs(arrays["x"], rows, is_test, images, standardize)
    client, coarse = (None if arrays.get(key) is None else arrays[key][rows] for key in ("client", "coarse"))
    client, client_names = (None, None) if client is None else _numbered_clients(_plain("client", client))
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


def _with_targets(y: np.ndarray, rows: np.ndarray | slice, task: Task) -> np.ndarray | slice:
    """The rows without examples whose places are all ignored, which would count as examples in every mean."""
    if task != "classification" or y.ndim == 1:
        return rows
    empty = (y == IGNORED).all(axis=tuple(range(1, y.ndim)))
    if not empty.any():
        return rows
    warn("y", f"has nothing to predict in {empty.sum()} of {len(y)} examples, which are left out")
    return np.arange(len(y))[rows][~empty[rows]]


def _plain(name: str, values: np.ndarray) -> np.ndarray:
    """Converts an array (n,) of Python objects, such as a pandas column, to one of strings or integers."""
    if values.dtype.kind not in "OT":
        return values
    kind = str if isinstance(values[0], str) else int | np.integer
    odd = next((row for row, value in enumerate(values) if not isinstance(value, kind)), None)
    if odd is not None:
        raise ArgumentError(name, f"is {values[odd]!r} in row {odd}; accepted: only integers, or only strings")
    return np.array(values.tolist())


def _numbered(y: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Numbers strings (n,) as classes 0..C-1 in sorted order, and returns their names. Keeps numbers unchanged."""
    if y.dtype.kind != "U" or y.ndim > 1:
        return y, ()
    names, numbers = np.unique(y, return_inverse=True)
    return numbers, tuple(names.tolist())


def targets(
    y: np.ndarray, task: str = "auto", num_classes: int | None = None, ignored_index: int | None = None
) -> tuple[np.ndarray, int, Task]:
    """Checks the targets (n, ...). Returns int32 classes, uint8 labels or float32 values, with C and the task."""
    if y.dtype.kind not in "biuf":
        hint = "; y.astype(str) converts it to strings" if y.dtype.kind == "S" else ""
        raise ArgumentError("y", f"is {y.dtype}; accepted: integers or strings (classes), floats (regression){hint}")
    _check_finite("y", y, np.arange(len(y)))
    if task == "auto":
        task = "regression" if y.dtype.kind == "f" else "classification"
        task = "multilabel" if y.dtype.kind == "b" and y.ndim == 2 else task
        _warn_of_classes(y)
    if task == "regression":
        return y.astype(np.float32), 1, "regression"
    if task == "multilabel":
        if y.ndim != 2 or not np.isin(y, (0, 1)).all():
            raise ArgumentError("y", f"has shape {y.shape}; accepted for multilabel: labels 0 or 1 of shape (n, C)")
        return y.astype(np.uint8), y.shape[1], "multilabel"
    if ignored_index is not None and y.ndim == 1:
        raise ArgumentError("ignored_index", "accepted only for sequences and images, with y (n, ...)", ignored_index)
    if y.ndim > 1:
        y = np.where((y < 0) | (y == ignored_index), IGNORED, y)
    wrong = np.argwhere(((y < 0) & (y.ndim == 1)) | (y != np.floor(y)))
    if wrong.size:
        raise ArgumentError("y", f"is {y[tuple(wrong[0])]} in row {wrong[0][0]}; classes are integers 0..C-1")
    found = int(y.max()) + 1
    if not found:
        raise ArgumentError("y", "has no class: all places are ignored")
    if num_classes is None and found > max(y.size, 1000):  # hardly classes: each has an output
        raise ArgumentError("y", f"reaches {y.max()} in {len(y)} rows; classes are 0..C-1, regression needs floats")
    if num_classes is not None and found > num_classes:
        raise ArgumentError("num_classes", f"y reaches {y.max()}; accepted: {found} or more", num_classes)
    if num_classes is None and y.ndim == 1 and y.min() > 0:
        text = f"has labels from {y.min()}: classes are counted from 0, so that C is {found} and no example has class 0"
        warn("y", f"{text}; subtract {y.min()}, or set num_classes={found}")
    return y.astype(np.int32), num_classes or found, "classification"


def _warn_of_classes(y: np.ndarray) -> None:
    """Warns if targets (n, ...) of no stated task are taken for something else but look like classes."""
    silent = "or set the task to keep them as they are"
    if y.dtype.kind in "iuf" and y.ndim == 2 and y.shape[1] > 1 and np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all():
        warn("y", f"has one-hot rows; if these are classes, pass y.argmax(axis=1), {silent}")
    elif y.dtype.kind in "iu" and y.shape[1:] == (1,):
        text = f"has shape {y.shape}, which is one class for each place of sequences of length 1"
        warn("y", f"{text}; if examples have one class each, pass y[:, 0], {silent}")
    elif y.dtype.kind == "f" and y.ndim == 1 and (y == np.floor(y)).all() and len(np.unique(y)) < min(100, len(y)):
        warn("y", f"has floats, so the task is regression; if they are classes, pass y.astype(int), {silent}")


def _leaves(x: PyTree) -> dict[str, np.ndarray]:
    """The arrays of a tree by name, such as "x['image']"."""
    return {f"x{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree.leaves_with_path(x)}


def _check_shapes(arrays: Mapping[str, Any]) -> None:
    inputs = _leaves(arrays["x"])
    if not inputs:
        raise ArgumentError("x", "has no arrays; accepted: (n, *features), or a dict or tuple of such arrays")
    first, shape = next((key, array.shape) for key, array in inputs.items())
    for key, array in inputs.items():
        if not array.size or not array.ndim:
            raise ArgumentError(key, f"is empty, with shape {array.shape}; accepted: (n, *features)")
        if len(array) != shape[0]:
            raise ArgumentError(key, f"has {len(array)} rows, but {first} has {shape[0]}; accepted: one per example")
    for key, array in arrays.items():
        if key == "y" and array.ndim > 1 and len(array) == shape[0] and array.size:
            continue
        if key != "x" and array.shape != shape[:1]:
            text = f"has shape {array.shape}, but {first} has {shape}; accepted: one value per row of x"
            raise ArgumentError(key, text)


def _numbered_clients(client: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Numbers the clients (n,) 0..K-1 in sorted order, and returns their ids (K,); None if they are the numbers."""
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


def _inputs(
    x: PyTree, rows: np.ndarray | slice, is_test: np.ndarray | None, images: bool, standardize: bool
) -> tuple[PyTree, Scaling | None]:
    """Some rows of all arrays of x, converted as in `make_source`, and how models scale them."""
    ids = np.arange(len(jax.tree.leaves(x)[0]))[rows]
    found = [_features(key, leaf[rows], ids, is_test, images, standardize) for key, leaf in _leaves(x).items()]
    x, *scaling = (jax.tree.unflatten(jax.tree.structure(x), column) for column in zip(*found, strict=True))
    return x, Scaling(*scaling) if jax.tree.leaves(scaling) else None


def _features(
    key: str, x: np.ndarray, rows: np.ndarray, is_test: np.ndarray | None, images: bool, standardize: bool
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Converts one array of examples (n, *features), rows (n,) of their data set; with mean and deviation.

    What models scale stays as it is, as do pixels; other integers of 32 bits become int32; all else becomes float32.
    Pixels, and floats that need no conversion, stay in their file.
    """
    if x.dtype.kind not in "biuf":
        raise ArgumentError(key, f"is {x.dtype}; accepted: numbers")
    if x.ndim == 1 and not images:
        raise ArgumentError(key, f"has shape {x.shape}; accepted: (n, *features), such as {key}[:, None]")
    x, scaling, pixels = x[..., None] if images and x.ndim in (1, 3) else x, None, x.dtype == np.uint8
    _check_finite(key, x, rows)
    _warn_of_channels(key, x)
    if standardize and (pixels or x.dtype.kind == "f"):
        scaling = _measure(x, is_test, gray=pixels and x.ndim == 3)
    elif images and pixels and not in_file(x):
        scaling = Scaling(np.zeros(()), np.full((), WHITE))
    mapped = isinstance(x, np.ndarray) and scaling is not None  # other files are read once
    if in_file(x) and (pixels or mapped or (x.dtype == np.float32 and not standardize)):
        values = x
    elif scaling:
        values = np.array(x)  # not the user's own array, which may change
    elif pixels:
        values = x
    else:
        x = np.asarray(x)
        tokens = x.dtype.kind in "iu" and -MOST <= int(x.min()) <= int(x.max()) <= MOST
        values = x.astype(np.int32 if tokens else np.float32)
    if scaling is None and (x.dtype.kind == "f" or (pixels and x.ndim > 2)):
        some = values[:BLOCK]
        if some.min() >= 0 and 127 < some.max() <= 255 and np.array_equal(some, np.floor(some)):
            warn(key, "looks like pixels from 0 to 255 that are not standardized; networks expect x / 255")
    return (values, scaling.mean, scaling.std) if scaling else (values, None, None)


def _warn_of_channels(key: str, x: np.ndarray) -> None:
    """Warns of images with their channels first, such as PyTorch's: (n, 1 or 3, size, size)."""
    if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[2] == x.shape[3] > 4:
        text = f"has shape {x.shape}, which is {x.shape[3]} channels of {x.shape[1]} x {x.shape[2]} pixels"
        warn(key, f"{text}; if channels are first, pass {key}.transpose(0, 2, 3, 1)")


def _check_finite(name: str, values: np.ndarray, rows: np.ndarray) -> None:
    if values.dtype.kind != "f":  # all fit
        return
    fits = np.empty(len(values), bool)
    for start in range(0, len(values), BLOCK):
        part = values[start : start + BLOCK].reshape(len(values[start : start + BLOCK]), -1)
        fits[start : start + BLOCK] = ((part >= -LARGEST) & (part <= LARGEST)).all(axis=1)
        release(values)
    bad = rows[~fits]
    if bad.size:
        raise ArgumentError(name, f"is NaN or infinite in {bad.size} rows; the first is row {bad[0]}")


def _measure(x: np.ndarray, is_test: np.ndarray | None, gray: bool) -> Scaling:
    """Mean and standard deviation of the non-test rows of x (n, *features), one of each for gray images."""
    rows = np.arange(len(x)) if is_test is None else np.flatnonzero(~is_test)
    if in_file(x):
        rows = rows[:: -(-len(rows) // SAMPLE)]
    blocks = np.array_split(rows, len(rows) // BLOCK + 1)
    axes = tuple(range(x.ndim if gray else x.ndim - 1))
    first = x[rows[0]].astype(np.float64)
    origin = first.flat[0] if gray else first.reshape(-1, first.shape[-1])[0]  # differences of a constant are exactly 0
    count, zero = len(rows) * first.size // origin.size, np.zeros(())
    mean = origin + sum(((x[block] - origin).sum(axes) for block in blocks), zero) / count
    std = np.sqrt(sum((np.square(x[block] - mean).sum(axes) for block in blocks), zero) / count)
    return Scaling(mean, np.where(std > 0, std, 1))  # a constant feature becomes 0
