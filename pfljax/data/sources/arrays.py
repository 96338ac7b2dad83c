"""Checks plain arrays and converts them to a `Source`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from pfljax.contract.errors import ArgumentError, warn
from pfljax.contract.mapped import in_file, release
from pfljax.contract.types import PyTree, Task
from pfljax.data.sources.conversion import to_numpy, warn_of_order
from pfljax.data.sources.source import WHITE, Features, Source
from pfljax.settings.fields import MOST

BLOCK = 1024  # rows that are checked at a time
LARGEST = np.finfo(np.float32).max
TaskName = Literal["auto", "classification", "regression", "multilabel"]
IGNORED = -1  # target of a place of a sequence or image without a class
MOST_TOKENS = 10**6  # vocabularies are smaller
FEW = 9  # classes that may be missing between others
# numbers that often stand for no class
NO_CLASS = (99, 127, 254, 255, 999, 9999, 32767, 65534, 65535)
# strings of missing values that became text
MISSING = ("", "nan", "NaN", "None", "<NA>", "NaT", "null")
NUMBERS = "accepted: numbers"


def as_arrays(x: Any, **others: Any) -> dict[str, Any]:
    """What a user gives, y among it, as arrays; x may be a tree of arrays. Leaves out what is None.

    A dict, a named tuple, or a tuple that does not have one entry for each example is a tree.
    """
    warn_of_order({"x": x, **others})
    arrays: dict[str, Any] = {
        key: to_numpy(key, values) for key, values in others.items() if values is not None
    }
    is_rows = isinstance(x, tuple) and not hasattr(x, "_fields")
    is_rows = is_rows and "y" in arrays and arrays["y"].shape[:1] == (len(x),)
    if is_rows or not isinstance(x, Mapping | tuple):
        return arrays | {"x": to_numpy("x", x, NUMBERS)}

    def leaf(path: Any, values: Any) -> np.ndarray:
        return to_numpy(f"x{jax.tree_util.keystr(path)}", values, NUMBERS)

    return arrays | {
        "x": jax.tree.map_with_path(leaf, x, is_leaf=lambda node: isinstance(node, list))
    }


def make_source(
    arrays: Mapping[str, Any],
    rows: np.ndarray | slice = slice(None),
    *,
    num_classes: int | None = None,
    task: str = "auto",
    ignored_index: int | None = None,
    images: bool = True,
    standardize: bool = False,
    fill: bool = False,
    features: Features | None = None,
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
        images: Whether uint8 values in x that are not standardized are pixels, which are divided by 255 unless they
            stay in a file.
        standardize: Whether models are to give each channel of images, or each feature, mean 0 and standard deviation
            1, measured on the training examples once these are known. Integers are kept, since they may be tokens; but
            uint8 are pixels.
        fill: Whether NaN in x are missing numbers, to be replaced by the mean of the training examples.
        features: The columns of x, if it was a table.
        name: Name for titles.

    Raises:
        ArgumentError: if an array, task or num_classes is not accepted; the message names it.
    """
    arrays = _plain(arrays)
    _check_shapes(arrays)
    y, names = _numbered(arrays["y"], task)
    task = "classification" if names and task == "auto" else task
    y, num_classes, task = targets(y, task, num_classes, ignored_index)
    rows = _with_targets(y, rows, task)
    is_test = _test_marks(arrays.get("is_test"), rows)
    x, standardized = _inputs(arrays["x"], rows, images=images, standardize=standardize, fill=fill)
    client = None
    client_names = None
    if arrays.get("client") is not None:
        client, client_names = _numbered_clients(arrays["client"][rows])
    return Source(
        x=x,
        y=y[rows],
        client=client,
        is_test=is_test,
        num_classes=num_classes,
        task=task,
        name=name,
        coarse=None if arrays.get("coarse") is None else _coarse_labels(arrays["coarse"][rows]),
        class_names=names,
        client_names=client_names,
        standardize=standardized,
        fill=fill,
        features=features,
    )


def _plain(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, with Python objects and numbers of other packages' types in plain dtypes."""
    plain = {
        key: to_numpy(key, values)
        for key, values in arrays.items()
        if key != "x" and values is not None
    }

    def leaf(path: Any, values: Any) -> Any:
        in_memory = isinstance(values, np.ndarray) and not in_file(values)
        return to_numpy(f"x{jax.tree_util.keystr(path)}", values, NUMBERS) if in_memory else values

    return plain | {"x": jax.tree.map_with_path(leaf, arrays["x"])}


def _test_marks(is_test: np.ndarray | None, rows: np.ndarray | slice) -> np.ndarray | None:
    """Checks which examples are for testing. Returns some rows of them as booleans."""
    if is_test is None:
        return None
    if is_test.dtype.kind not in "biu" or not np.isin(is_test, (0, 1)).all():
        raise ArgumentError("is_test", "is not boolean")
    is_test = is_test[rows].astype(bool)
    if is_test.all():
        raise ArgumentError("is_test", "is true for every example; there are none to train on")
    return is_test


def _with_targets(y: np.ndarray, rows: np.ndarray | slice, task: Task) -> np.ndarray | slice:
    """The rows without examples whose places are all ignored, which would count as examples in every mean."""
    if task != "classification" or y.ndim == 1:
        return rows
    empty = (y == IGNORED).all(axis=tuple(range(1, y.ndim)))
    if not empty.any():
        return rows
    warn("y", f"has nothing to predict in {empty.sum()} of {len(y)} examples, which are left out")
    return np.arange(len(y))[rows][~empty[rows]]


def _numbered(y: np.ndarray, task: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Numbers strings (n,) as classes 0..C-1 in sorted order, and returns their names. Keeps numbers unchanged."""
    if y.dtype.kind != "U" or y.ndim > 1:
        return y, ()
    if task not in ("auto", "classification"):
        raise ArgumentError(
            "y", f"has strings, such as {str(y[0])!r}; accepted for {task}: numbers"
        )
    warn_of_missing("y", y)
    names, numbers = np.unique(y, return_inverse=True)
    return numbers, tuple(names.tolist())


def warn_of_missing(name: str, texts: np.ndarray) -> None:
    """Warns of strings that say that a value is missing, or are empty."""
    suspects = np.unique(texts[np.isin(np.char.strip(texts), MISSING)]).tolist()
    if suspects:
        count = int(np.isin(texts, suspects).sum())
        kind = {"y": "class", "categorical": "category"}.get(name, "client")
        shown = " and ".join(map(repr, suspects))
        warn(
            name,
            f"has {shown} in {count} rows, as a {kind} of its own; leave rows without a {kind} out",
        )


def targets(
    y: np.ndarray,
    task: str = "auto",
    num_classes: int | None = None,
    ignored_index: int | None = None,
) -> tuple[np.ndarray, int, Task]:
    """Checks the targets (n, ...). Returns int32 classes, uint8 labels or float32 values, with C and the task."""
    if y.dtype.kind not in "biuf":
        hint = "; y.astype(str) converts it to strings" if y.dtype.kind == "S" else ""
        raise ArgumentError(
            "y", f"is {y.dtype}; accepted: integers or strings (classes), floats (regression){hint}"
        )
    _check_finite("y", y, np.arange(len(y)))
    if task == "auto":
        task = "regression" if y.dtype.kind == "f" else "classification"
        task = "multilabel" if y.dtype.kind == "b" and y.ndim == 2 else task
        _warn_of_classes(y)
    if ignored_index is not None and task != "classification":
        text = f"accepted only for classification, but the targets are {y.dtype}, so the task is {task}"
        raise ArgumentError("ignored_index", f"{text}; pass y.astype(int)", ignored_index)
    if task == "regression":
        return y.astype(np.float32), 1, "regression"
    if task == "multilabel":
        if y.ndim != 2 or not np.isin(y, (0, 1)).all():
            raise ArgumentError(
                "y", f"has shape {y.shape}; accepted for multilabel: labels 0 or 1 of shape (n, C)"
            )
        return y.astype(np.uint8), y.shape[1], "multilabel"
    if ignored_index is not None and y.ndim == 1:
        raise ArgumentError(
            "ignored_index",
            "accepted only for sequences and images, with y (n, ...)",
            ignored_index,
        )
    ignored = (y < 0) | (y == ignored_index) if y.ndim > 1 else np.zeros(y.shape, bool)
    wrong = np.argwhere(~ignored & ((y < 0) | (y != np.floor(y))))
    if wrong.size:
        raise ArgumentError(
            "y", f"is {y[tuple(wrong[0])]} in row {wrong[0][0]}; classes are integers 0..C-1"
        )
    if ignored.all():
        raise ArgumentError("y", "has no class: all places are ignored")
    largest = int(np.max(y, initial=0, where=~ignored))
    found = largest + 1
    if num_classes is not None and found > num_classes:
        raise ArgumentError(
            "num_classes", f"y reaches {largest}; accepted: {found} or more", num_classes
        )
    # hardly classes: each has an output
    if found > max(y.size, 1000) and (num_classes is None or found > MOST):
        raise ArgumentError(
            "y", f"reaches {largest} in {len(y)} rows; classes are 0..C-1, regression needs floats"
        )
    # before IGNORED, which unsigned integers do not have
    classes = np.where(ignored, 0, y).astype(np.int32)
    if num_classes is None:
        _warn_of_gaps(classes[~ignored], places=y.ndim > 1)
    classes[ignored] = IGNORED
    return classes, num_classes or found, "classification"


def _warn_of_gaps(classes: np.ndarray, places: bool) -> None:
    """Warns if many classes below the largest do not occur, as when 255 or 65535 stands for no class.

    With few examples, classes may be missing by chance, so that only numbers that often stand for no class count.
    """
    occurring = np.flatnonzero(np.bincount(classes))
    largest = occurring[-1]
    if not places and occurring[0] > 0:
        text = f"has labels from {occurring[0]}: classes are counted from 0, so that C is {largest + 1}"
        rest = (
            f"and no example has class 0; subtract {occurring[0]}, or set num_classes={largest + 1}"
        )
        warn("y", f"{text} {rest}")
        return
    gaps = np.diff(occurring) - 1
    if not gaps.size:
        return
    widest = int(np.argmax(gaps))
    below = occurring[widest]
    above = occurring[widest + 1]
    is_suspect = above in NO_CLASS or len(classes) > 3 * largest
    if is_suspect and gaps[widest] > max(below + 1, FEW):
        text = f"has no class from {below + 1} to {above - 1}, but class {above}, so that C is {largest + 1}"
        no_class = "pass ignored_index" if places else "leave these examples out"
        warn(
            "y",
            f"{text}; if {above} stands for no class, {no_class}; otherwise set num_classes={largest + 1}",
        )


def _warn_of_classes(y: np.ndarray) -> None:
    """Warns if targets (n, ...) of no stated task are taken for something else but look like classes or labels."""
    silent = "or set the task to keep them as they are"
    is_number = y.dtype.kind in "iuf"
    is_float = y.dtype.kind == "f"
    if is_number and y.ndim == 2 and y.shape[1] > 1 and np.isin(y, (0, 1)).all():
        if (y.sum(axis=1) == 1).all():
            warn("y", f"has one-hot rows; if these are classes, pass y.argmax(axis=1), {silent}")
        else:
            taken = (
                "several numbers to predict" if is_float else "a class for each place of a sequence"
            )
            text = f"has rows of 0 and 1, which are {taken}; if each says whether a label applies"
            warn("y", f"{text}, pass y.astype(bool), {silent}")
    elif y.dtype.kind in "iu" and y.shape[1:] == (1,):
        text = f"has shape {y.shape}, which is one class for each place of sequences of length 1"
        warn("y", f"{text}; if examples have one class each, pass y[:, 0], {silent}")
    elif (
        is_float
        and y.shape[1:] in ((), (1,))
        and (y == np.floor(y)).all()
        and len(np.unique(y)) < min(100, len(y))
    ):
        column = "y.astype(int)" if y.ndim == 1 else "y[:, 0].astype(int)"
        warn(
            "y",
            f"has floats, so the task is regression; if they are classes, pass {column}, {silent}",
        )


def _leaves(x: PyTree) -> dict[str, np.ndarray]:
    """The arrays of a tree by name, such as "x['image']"."""
    return {f"x{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree.leaves_with_path(x)}


def _check_shapes(arrays: Mapping[str, Any]) -> None:
    inputs = _leaves(arrays["x"])
    if not inputs:
        raise ArgumentError(
            "x", "has no arrays; accepted: (n, *features), or a dict or tuple of such arrays"
        )
    first, shape = next((key, array.shape) for key, array in inputs.items())
    for key, array in inputs.items():
        if not array.size or not array.ndim:
            raise ArgumentError(
                key, f"is empty, with shape {array.shape}; accepted: (n, *features)"
            )
        if len(array) != shape[0]:
            raise ArgumentError(
                key, f"has {len(array)} rows, but {first} has {shape[0]}; accepted: one per example"
            )
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
    if client.dtype.kind == "U":
        warn_of_missing("client", client)
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
    x: PyTree, rows: np.ndarray | slice, *, images: bool, standardize: bool, fill: bool
) -> tuple[PyTree, tuple[bool, ...]]:
    """Some rows of all arrays of x, checked and converted, and whether models standardize each."""
    ids = np.arange(len(jax.tree.leaves(x)[0]))[rows]
    leaves = []
    standardized = []
    for key, leaf in _leaves(x).items():
        _check_numbers(key, leaf)
        part = leaf[rows]
        _check_finite(key, part, ids, fill=fill)
        _warn_of_channels(key, part)
        standardized.append(standardize and _has_measurements(key, part))
        if standardized[-1]:
            leaves.append(_to_standardize(part))
        elif images and part.dtype == np.uint8 and not in_file(part):
            leaves.append(np.asarray(part, np.float32) / WHITE)
        else:
            leaves.append(_as_given(key, part))
    return jax.tree.unflatten(jax.tree.structure(x), leaves), tuple(standardized)


def _check_numbers(key: str, x: Any) -> None:
    if x.dtype.kind not in "biuf":
        raise ArgumentError(key, f"is {x.dtype}; {NUMBERS}")
    if x.ndim == 1:
        raise ArgumentError(
            key, f"has shape {x.shape}; accepted: (n, *features), such as {key}[:, None]"
        )


def _has_measurements(key: str, x: Any) -> bool:
    """Whether examples are measurements: pixels, floats, and integers too large for tokens."""
    if x.dtype == np.uint8 or x.dtype.kind == "f":
        return True
    if x.dtype.kind == "b":
        return False
    if not _fits_int32(x):
        return True
    _warn_of_unscaled(key, x)
    return False


def _fits_int32(x: Any) -> bool:
    return x.dtype.kind in "iu" and -MOST <= int(np.min(x)) <= int(np.max(x)) <= MOST


def _to_standardize(x: Any) -> Any:
    """Examples (n, *features) that models standardize: numbers as they are, in their file if it maps them."""
    if x.dtype.kind in "iu" and x.dtype != np.uint8:
        return np.asarray(x, np.float64)
    # other files are read once
    if in_file(x) and (x.dtype == np.uint8 or isinstance(x, np.ndarray)):
        return x
    return np.array(x)  # not the user's own array, which may change


def _as_given(key: str, x: Any) -> Any:
    """Examples (n, *features) that nobody scales.

    Pixels stay uint8, other integers of 32 bits become int32, and all else becomes float32. What needs no conversion
    stays in its file.
    """
    is_pixels = x.dtype == np.uint8
    if is_pixels or (in_file(x) and x.dtype == np.float32):
        values = x
    else:
        x = np.asarray(x)
        values = x.astype(np.int32 if _fits_int32(x) else np.float32)
    if x.dtype.kind == "f" or (is_pixels and x.ndim > 2):
        some = values[:BLOCK]
        if some.min() >= 0 and 127 < some.max() <= 255 and np.array_equal(some, np.floor(some)):
            warn(
                key,
                "looks like pixels from 0 to 255 that are not standardized; networks expect x / 255",
            )
    return values


def _warn_of_unscaled(key: str, x: np.ndarray) -> None:
    """Warns of integers that are not scaled, since they may be tokens, but are no tokens by their shape or range."""
    smallest = int(np.min(x))
    largest = int(np.max(x))
    is_bits = smallest >= 0 and largest <= 1
    if is_bits or not (x.ndim > 2 or smallest < 0 or 127 < largest <= 255 or largest > MOST_TOKENS):
        return
    pixels = (
        f"if they are pixels, pass {key}.astype('uint8')" if 0 <= smallest <= largest <= 255 else ""
    )
    numbers = f"if they are {'other ' * bool(pixels)}measurements, pass {key}.astype(float)"
    hints = "; ".join(filter(None, (pixels, numbers)))
    text = f"holds integers from {smallest} to {largest}, which are not scaled, since they may be tokens"
    warn(key, f"{text}; {hints}; standardize=False keeps them as they are")


def _warn_of_channels(key: str, x: np.ndarray) -> None:
    """Warns of images with their channels first, such as PyTorch's: (n, 1 or 3, size, size)."""
    if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[2] == x.shape[3] > 4:
        text = f"has shape {x.shape}, which is {x.shape[3]} channels of {x.shape[1]} x {x.shape[2]} pixels"
        warn(key, f"{text}; if channels are first, pass {key}.transpose(0, 2, 3, 1)")


def _check_finite(name: str, values: np.ndarray, rows: np.ndarray, fill: bool = False) -> None:
    """Raises `ArgumentError` for numbers that float32 does not have; `fill` accepts NaN."""
    if values.dtype.kind != "f":  # all fit
        return
    fits = np.empty(len(values), bool)
    for start in range(0, len(values), BLOCK):
        part = values[start : start + BLOCK].reshape(len(values[start : start + BLOCK]), -1)
        finite = (part >= -LARGEST) & (part <= LARGEST)
        fits[start : start + BLOCK] = (finite | np.isnan(part) if fill else finite).all(axis=1)
        release(values)
    bad = rows[~fits]
    if bad.size:
        raise ArgumentError(
            name, f"is NaN or infinite in {bad.size} rows; the first is row {bad[0]}"
        )
