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
IGNORED = -1  # target of a position of a sequence or image without a class
MOST_TOKENS = 10**6  # vocabularies are smaller
FEW = 9  # classes that may be missing between others
# numbers that often stand for no class
NO_CLASS = (99, 127, 254, 255, 999, 9999, 32767, 65534, 65535)
# strings of missing values that became text
MISSING = ("", "nan", "NaN", "None", "<NA>", "NaT", "null")
NUMBERS = "accepted: numbers"


def as_arrays(x: Any, **others: Any) -> dict[str, Any]:
    """A user's arguments, y among them, as arrays; x may be a tree of arrays. Leaves out what is None.

    A dict, a named tuple, or a tuple that does not have one entry for each example is a tree.
    """
    warn_of_order({"x": x, **others})
    arrays: dict[str, Any] = {}
    for name, values in others.items():
        if values is not None:
            arrays[name] = to_numpy(name, values)
    is_plain_tuple = isinstance(x, tuple) and not hasattr(x, "_fields")
    is_rows = is_plain_tuple and "y" in arrays and arrays["y"].shape[:1] == (len(x),)
    if is_rows or not isinstance(x, Mapping | tuple):
        arrays["x"] = to_numpy("x", x, NUMBERS)
        return arrays

    def convert(path: Any, values: Any) -> np.ndarray:
        return to_numpy(f"x{jax.tree_util.keystr(path)}", values, NUMBERS)

    arrays["x"] = jax.tree.map_with_path(convert, x, is_leaf=lambda node: isinstance(node, list))
    return arrays


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
    channels_first: bool = False,
    name: str,
) -> Source:
    """Checks arrays and makes a `Source` from them.

    Args:
        arrays: x (n, *features) numbers, or a tree of such arrays, and y (n, ...) numbers, or (n,) strings; optionally
            client (n,) integers or strings, coarse (n,) integers, is_test (n,) booleans and time (n,) numbers, dates
            or texts such as 2024-05-31.
        rows: Rows to keep. The classes are determined from all rows.
        num_classes: Number of classes C; None: inferred from y.
        task: "classification", "regression", "multilabel" for labels 0 or 1 in y (n, C), or "auto": regression if y
            contains floats, multilabel if it is boolean (n, C). Strings in y are classes, numbered in sorted order.
        ignored_index: Class of positions of sequences and images that are ignored, besides negative ones.
        images: Whether uint8 values in x that are not standardized are pixels, which are divided by 255 unless they
            stay in a file.
        standardize: Whether models are to give each channel of images, or each feature, mean 0 and standard deviation
            1, measured on the training examples once these are known. Integers stay, since they may be tokens; but
            uint8 are pixels.
        fill: Whether NaN in x are missing numbers, to be replaced by the mean of the training examples.
        features: The columns of x, if it was a table.
        channels_first: Whether images in x are (n, channels, height, width).
        name: Name for titles.

    Raises:
        ArgumentError: if an array, task or num_classes is not accepted; the message names it.

    Examples:
        >>> import numpy as np
        >>> from pfljax.data import sources
        >>> arrays = {"x": np.ones((3, 2)), "y": ["no", "yes", "no"], "client": ["a", "b", "a"]}
        >>> source = sources.make_source(arrays, name="answers")
        >>> source.y.tolist(), source.class_names, source.client.tolist()
        ([0, 1, 0], ('no', 'yes'), [0, 1, 0])
    """
    arrays = _plain(arrays)
    _check_shapes(arrays)
    y, class_names = _numbered(arrays["y"], task)
    if class_names and task == "auto":
        task = "classification"
    y, num_classes, task = targets(y, task, num_classes, ignored_index)
    rows = _with_targets(y, rows, task)
    is_test = _test_marks(arrays.get("is_test"), rows)
    if not channels_first:
        _warn_of_channels(arrays["x"])
    x, standardized = _inputs(arrays["x"], rows, images=images, standardize=standardize, fill=fill)
    client = None
    client_names = None
    if arrays.get("client") is not None:
        client, client_names = _numbered_clients(arrays["client"][rows])
    coarse = None
    if arrays.get("coarse") is not None:
        coarse = _coarse_labels(arrays["coarse"][rows])
    time = None
    if arrays.get("time") is not None:
        time = _order_in_time(arrays["time"])[rows]
    return Source(
        x=x,
        y=y[rows],
        client=client,
        is_test=is_test,
        num_classes=num_classes,
        task=task,
        name=name,
        coarse=coarse,
        class_names=class_names,
        client_names=client_names,
        standardize=standardized,
        fill=fill,
        channels_first=channels_first,
        features=features,
        time=time,
    )


def _plain(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, with Python objects and numbers of other packages' types in plain dtypes."""
    plain = {}
    for name, values in arrays.items():
        if name != "x" and values is not None:
            plain[name] = to_numpy(name, values)

    def convert(path: Any, values: Any) -> Any:
        in_memory = isinstance(values, np.ndarray) and not in_file(values)
        if not in_memory:
            return values
        return to_numpy(f"x{jax.tree_util.keystr(path)}", values, NUMBERS)

    plain["x"] = jax.tree.map_with_path(convert, arrays["x"])
    return plain


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


def _order_in_time(time: np.ndarray) -> np.ndarray:
    """Numbers times (n,) in their order, equal ones alike: int64 (n,)."""
    accepted = "accepted: numbers, dates, or texts such as 2024-05-31 or 2024-05-31T12:00"
    if time.dtype.kind == "U":
        try:
            time = time.astype("datetime64[us]")
        except ValueError as error:
            raise ArgumentError("time", f"{error}; {accepted}") from error
    if time.dtype.kind not in "iufM":
        raise ArgumentError("time", f"is {time.dtype}; {accepted}")
    missing = np.isnat(time) if time.dtype.kind == "M" else ~np.isfinite(time)
    if missing.any():
        row = int(np.argmax(missing))
        raise ArgumentError("time", f"is missing or infinite in row {row}; {accepted}")
    return np.unique(time, return_inverse=True)[1].astype(np.int64)


def _with_targets(y: np.ndarray, rows: np.ndarray | slice, task: Task) -> np.ndarray | slice:
    """Drops examples in which every position is ignored, since they would count in every mean."""
    if task != "classification" or y.ndim == 1:
        return rows
    is_empty = (y == IGNORED).all(axis=tuple(range(1, y.ndim)))
    if not is_empty.any():
        return rows
    text = f"has nothing to predict in {is_empty.sum()} of {len(y)} examples"
    warn("y", f"{text}, which are left out")
    return np.arange(len(y))[rows][~is_empty[rows]]


def _numbered(y: np.ndarray, task: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Numbers strings (n,) as classes 0..C-1 in sorted order, and returns their names. Keeps numbers unchanged."""
    if y.dtype.kind != "U" or y.ndim > 1:
        return y, ()
    if task not in ("auto", "classification"):
        text = f"has strings, such as {str(y[0])!r}; accepted for {task}: numbers"
        raise ArgumentError("y", text)
    warn_of_missing("y", y)
    names, numbers = np.unique(y, return_inverse=True)
    return numbers, tuple(names.tolist())


def warn_of_missing(name: str, texts: np.ndarray) -> None:
    """Warns of strings that say that a value is missing, or are empty."""
    is_suspect = np.isin(np.char.strip(texts), MISSING)
    if is_suspect.any():
        suspects = np.unique(texts[is_suspect]).tolist()
        meaning = {"y": "class", "categorical": "category"}.get(name, "client")
        text = f"has {' and '.join(map(repr, suspects))} in {is_suspect.sum()} rows"
        advice = f"leave rows without a {meaning} out"
        warn(name, f"{text}, as a {meaning} of its own; {advice}")


def targets(
    y: np.ndarray,
    task: str = "auto",
    num_classes: int | None = None,
    ignored_index: int | None = None,
) -> tuple[np.ndarray, int, Task]:
    """Checks the targets.

    Args:
        y: (n, ...) targets.
        task: See `make_source`.
        num_classes: See `make_source`.
        ignored_index: See `make_source`.

    Returns:
        int32 classes, uint8 labels or float32 values (n, ...), the number of classes C, and the task.

    Raises:
        ArgumentError: if they do not fit the task.
    """
    if y.dtype.kind not in "biuf":
        hint = "; y.astype(str) converts it to strings" if y.dtype.kind == "S" else ""
        accepted = f"accepted: integers or strings (classes), floats (regression){hint}"
        raise ArgumentError("y", f"is {y.dtype}; {accepted}")
    _check_finite("y", y, np.arange(len(y)))
    if task == "auto":
        task = "regression" if y.dtype.kind == "f" else "classification"
        if y.dtype.kind == "b" and y.ndim == 2:
            task = "multilabel"
        _warn_of_classes(y)
    if ignored_index is not None and task != "classification":
        text = f"accepted only for classification, but the targets are {y.dtype}"
        hint = f"so the task is {task}; pass y.astype(int)"
        raise ArgumentError("ignored_index", f"{text}, {hint}", ignored_index)
    if task == "regression":
        return y.astype(np.float32), 1, "regression"
    if task == "multilabel":
        if y.ndim != 2 or not np.isin(y, (0, 1)).all():
            accepted = "accepted for multilabel: labels 0 or 1 of shape (n, C)"
            raise ArgumentError("y", f"has shape {y.shape}; {accepted}")
        return y.astype(np.uint8), y.shape[1], "multilabel"
    classes, num_classes = _classes(y, num_classes, ignored_index)
    return classes, num_classes, "classification"


def _classes(
    y: np.ndarray, num_classes: int | None, ignored_index: int | None
) -> tuple[np.ndarray, int]:
    """Checks classes (n, ...). Returns them as int32, with `IGNORED` where they are ignored, and their number C."""
    if ignored_index is not None and y.ndim == 1:
        text = "accepted only for sequences and images, with y (n, ...)"
        raise ArgumentError("ignored_index", text, ignored_index)
    is_ignored = np.zeros(y.shape, bool)
    if y.ndim > 1:
        is_ignored = (y < 0) | (y == ignored_index)
    is_class = (y >= 0) & (y == np.floor(y))
    wrong = np.argwhere(~is_ignored & ~is_class)
    if wrong.size:
        text = f"is {y[tuple(wrong[0])]} in row {wrong[0][0]}; classes are integers 0..C-1"
        raise ArgumentError("y", text)
    if is_ignored.all():
        raise ArgumentError("y", "has no class: all positions are ignored")

    largest = int(np.max(y, initial=0, where=~is_ignored))
    least = largest + 1
    if num_classes is not None and least > num_classes:
        text = f"y reaches {largest}; accepted: {least} or more"
        raise ArgumentError("num_classes", text, num_classes)
    # So many are hardly classes: each has an output.
    if least > max(y.size, 1000) and (num_classes is None or least > MOST):
        text = f"reaches {largest} in {len(y)} rows; classes are 0..C-1, regression needs floats"
        raise ArgumentError("y", text)

    # Unsigned integers do not have IGNORED.
    classes = np.where(is_ignored, 0, y).astype(np.int32)
    if num_classes is None:
        _warn_of_gaps(classes[~is_ignored], has_positions=y.ndim > 1)
    classes[is_ignored] = IGNORED
    return classes, num_classes or least


def _warn_of_gaps(classes: np.ndarray, has_positions: bool) -> None:
    """Warns if many classes below the largest do not occur, as when 255 or 65535 stands for no class.

    With few examples, classes may be missing by chance, so that only numbers that often stand for no class count.

    Args:
        classes: (m,) all that are not ignored.
        has_positions: Whether an example has a class for each position of a sequence or image.
    """
    occurring = np.flatnonzero(np.bincount(classes))
    largest = occurring[-1]
    if not has_positions and occurring[0] > 0:
        text = f"has labels from {occurring[0]}: classes are counted from 0"
        consequence = f"so that C is {largest + 1} and no example has class 0"
        advice = f"subtract {occurring[0]}, or set num_classes={largest + 1}"
        warn("y", f"{text}, {consequence}; {advice}")
        return
    gaps = np.diff(occurring) - 1
    if not gaps.size:
        return
    widest = int(np.argmax(gaps))
    below = occurring[widest]
    above = occurring[widest + 1]
    is_suspect = above in NO_CLASS or len(classes) > 3 * largest
    if is_suspect and gaps[widest] > max(below + 1, FEW):
        text = f"has no class from {below + 1} to {above - 1}, but class {above}"
        advice = "pass ignored_index" if has_positions else "leave these examples out"
        warn(
            "y",
            f"{text}, so that C is {largest + 1}; if {above} stands for no class, {advice}; "
            f"otherwise set num_classes={largest + 1}",
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
            meaning = "a class for each position of a sequence"
            if is_float:
                meaning = "several numbers to predict"
            text = f"has rows of 0 and 1, which are {meaning}"
            warn(
                "y", f"{text}; if each says whether a label applies, pass y.astype(bool), {silent}"
            )
    elif y.dtype.kind in "iu" and y.shape[1:] == (1,):
        text = f"has shape {y.shape}, which is one class for each position of sequences of length 1"
        warn("y", f"{text}; if examples have one class each, pass y[:, 0], {silent}")
    elif (
        is_float
        and y.shape[1:] in ((), (1,))
        and (y == np.floor(y)).all()
        and len(np.unique(y)) < min(100, len(y))
    ):
        column = "y.astype(int)" if y.ndim == 1 else "y[:, 0].astype(int)"
        text = "has floats, so the task is regression"
        warn("y", f"{text}; if they are classes, pass {column}, {silent}")


def _leaves(x: PyTree) -> dict[str, np.ndarray]:
    """The arrays of a tree by name, such as "x['image']"."""
    return {f"x{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree.leaves_with_path(x)}


def _check_shapes(arrays: Mapping[str, Any]) -> None:
    inputs = _leaves(arrays["x"])
    if not inputs:
        text = "has no arrays; accepted: (n, *features), or a dict or tuple of such arrays"
        raise ArgumentError("x", text)
    first, shape = next((key, array.shape) for key, array in inputs.items())
    for key, array in inputs.items():
        if not array.size or not array.ndim:
            text = f"is empty, with shape {array.shape}; accepted: (n, *features)"
            raise ArgumentError(key, text)
        if len(array) != shape[0]:
            text = f"has {len(array)} rows, but {first} has {shape[0]}; accepted: one per example"
            raise ArgumentError(key, text)
    for key, array in arrays.items():
        if key == "y" and array.ndim > 1 and len(array) == shape[0] and array.size:
            continue
        if key != "x" and array.shape != shape[:1]:
            text = f"has shape {array.shape}, but {first} has {shape}"
            raise ArgumentError(key, f"{text}; accepted: one value per row of x")


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
        values = leaf[rows]
        _check_finite(key, values, ids, fill=fill)
        is_standardized = standardize and _has_measurements(key, values)
        if is_standardized:
            values = _to_standardize(values)
        elif images and values.dtype == np.uint8 and not in_file(values):
            values = np.asarray(values, np.float32) / WHITE
        else:
            values = _unscaled(key, values)
        leaves.append(values)
        standardized.append(is_standardized)
    return jax.tree.unflatten(jax.tree.structure(x), leaves), tuple(standardized)


def _check_numbers(key: str, x: Any) -> None:
    if x.dtype.kind not in "biuf":
        raise ArgumentError(key, f"is {x.dtype}; {NUMBERS}")
    if x.ndim == 1:
        text = f"has shape {x.shape}; accepted: (n, *features), such as {key}[:, None]"
        raise ArgumentError(key, text)


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
    # Pixels and memory maps stay in their file; other files are read once.
    if in_file(x) and (x.dtype == np.uint8 or isinstance(x, np.ndarray)):
        return x
    # The user's array may change.
    return np.array(x)


def _unscaled(key: str, x: Any) -> Any:
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
        first = values[:BLOCK]
        is_whole = np.array_equal(first, np.floor(first))
        if is_whole and first.min() >= 0 and 127 < first.max() <= 255:
            text = "looks like pixels from 0 to 255 that are not standardized"
            warn(key, f"{text}; networks expect x / 255")
    return values


def _warn_of_unscaled(key: str, x: np.ndarray) -> None:
    """Warns of integers that are not scaled, since they may be tokens, but are no tokens by their shape or range."""
    smallest = int(np.min(x))
    largest = int(np.max(x))
    is_bits = smallest >= 0 and largest <= 1
    if is_bits or not (x.ndim > 2 or smallest < 0 or 127 < largest <= 255 or largest > MOST_TOKENS):
        return
    hints = f"if they are measurements, pass {key}.astype(float)"
    if 0 <= smallest <= largest <= 255:
        pixels = f"if they are pixels, pass {key}.astype('uint8')"
        hints = f"{pixels}; if they are other measurements, pass {key}.astype(float)"
    text = f"holds integers from {smallest} to {largest}, which are not scaled"
    warn(
        key, f"{text}, since they may be tokens; {hints}; standardize=False keeps them as they are"
    )


def _warn_of_channels(x: PyTree) -> None:
    """Warns of images with their channels first, such as PyTorch's: (n, 1 or 3, size, size)."""
    for key, leaf in _leaves(x).items():
        shape = leaf.shape
        if len(shape) == 4 and shape[1] in (1, 3) and shape[2] == shape[3] > 4:
            channels = f"{shape[3]} channels of {shape[1]} x {shape[2]} pixels"
            text = f"has shape {shape}, which is {channels}; if channels are first"
            hint = "for a PyTorch module, channels_first=True to Federation.from_arrays"
            warn(key, f"{text}, pass {key}.transpose(0, 2, 3, 1) or, {hint}")


def _check_finite(name: str, values: np.ndarray, rows: np.ndarray, fill: bool = False) -> None:
    """Raises `ArgumentError` for numbers that float32 does not have; `fill` accepts NaN."""
    # All integers fit.
    if values.dtype.kind != "f":
        return
    is_accepted = np.empty(len(values), bool)
    for start in range(0, len(values), BLOCK):
        block = slice(start, start + BLOCK)
        numbers = values[block]
        numbers = numbers.reshape(len(numbers), -1)
        fits = (numbers >= -LARGEST) & (numbers <= LARGEST)
        if fill:
            fits |= np.isnan(numbers)
        is_accepted[block] = fits.all(axis=1)
        release(values)
    refused = rows[~is_accepted]
    if refused.size:
        text = f"is NaN or infinite in {refused.size} rows; the first is row {refused[0]}"
        raise ArgumentError(name, text)
