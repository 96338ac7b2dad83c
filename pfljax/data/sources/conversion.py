"""Arrays, columns and tables of other libraries as plain NumPy arrays."""

from __future__ import annotations

import decimal
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pfljax.contract.errors import ArgumentError, shown, warn
from pfljax.contract.host import free_memory, readable

ONE_KIND = "accepted: only integers, or only strings"
LONGEST = 60  # characters of a value in a message
# Columns of these types become one array without a look at each.
PLAIN_DTYPES = {np.dtype(dtype) for dtype in (np.float32, np.float64, bool, np.uint8)}


def to_numpy(name: str, values: Any, accepted: str = ONE_KIND) -> np.ndarray:
    """Converts what a user passes to an array of numbers, booleans, strings or another plain dtype.

    Args:
        name: Name of the argument.
        values: An array of NumPy or JAX, a masked array without masked values, a list, a column or table of pandas or
            pyarrow, a PyTorch tensor, or a sparse matrix of SciPy.
        accepted: What to accept instead of Python objects of several types, for messages.

    Raises:
        ArgumentError: if a value is missing, or if the values are not an array of one type.
    """
    try:
        array = _array(name, values)
    except ArgumentError:
        raise
    except Exception as error:  # other libraries raise anything
        reason = shown(str(error).partition("\n")[0])
        text = f"is a {type(values).__name__} that NumPy cannot read ({reason})"
        raise ArgumentError(name, f"{text}; accepted: an array") from error
    if array.dtype.isbuiltin == 2:  # types of other packages, such as bfloat16
        return _builtin(name, array)
    if array.dtype.kind == "O":
        return _from_objects(name, array, values, accepted)
    if array.dtype.kind == "T":
        return _from_objects(name, array.astype(object), values, accepted)
    return array


def warn_of_order(arguments: Mapping[str, Any]) -> None:
    """Warns if columns or tables of pandas have the same rows, by their index, in another order than the first."""
    indices = {}
    for name, values in arguments.items():
        if _library(values) == "pandas" and hasattr(values, "index"):
            indices[name] = values.index
    if len(indices) < 2:
        return
    first, *others = indices
    for name in others:
        index = indices[name]
        same_rows = len(index) == len(indices[first]) and set(index) == set(indices[first])
        if same_rows and not index.equals(indices[first]):
            text = f"has the rows of {first} in another order, by its index"
            matching = "but rows are matched by their position"
            warn(name, f"{text}, {matching}; pass {name}.loc[{first}.index]")


def _library(values: Any) -> str:
    """The package that a value's type is from."""
    return type(values).__module__.partition(".")[0]


def _array(name: str, values: Any) -> np.ndarray:
    """The values as an array, which may still hold Python objects."""
    library = _library(values)
    if np.ma.isMaskedArray(values):
        return _unmasked(name, values)
    if isinstance(values, list | tuple):
        return _from_list(name, values)
    if hasattr(values, "detach") and hasattr(values, "layout"):
        return _from_torch(values)
    if library == "scipy" and hasattr(values, "toarray"):
        return _from_sparse(name, values)
    if library == "pyarrow" and hasattr(values, "column_names"):
        return _from_frame(name, values.to_pandas(ignore_metadata=True))
    if library == "pyarrow" and getattr(values, "null_count", 0):
        missing = np.asarray(values.is_null())
        raise _missing(name, missing)
    if library == "pandas" and getattr(values, "ndim", 0) == 2:
        return _from_frame(name, values)
    if library == "pandas":
        return _from_column(name, values)
    return np.asarray(values)


def _missing(name: str, missing: np.ndarray) -> ArgumentError:
    """The error for missing values, given which of the rows (n, ...) they are in."""
    rows = np.flatnonzero(missing.reshape(len(missing), -1).any(axis=1))
    text = f"has missing values in {len(rows)} rows; the first is row {rows[0]}"
    return ArgumentError(name, text)


def _unmasked(name: str, values: np.ma.MaskedArray) -> np.ndarray:
    masked = np.ma.getmaskarray(values)
    if masked.any():
        raise _missing(name, np.atleast_1d(masked))
    return np.asarray(np.ma.getdata(values))


def _from_list(name: str, values: Sequence[Any]) -> np.ndarray:
    """An array of a list's items, which may be arrays of other libraries themselves."""
    plain = (numbers.Number, str, bytes, list, tuple, type(None), np.generic)
    if any(not isinstance(item, plain) and type(item) is not np.ndarray for item in values):
        return np.stack([_array(name, item) for item in values])
    try:
        array = np.asarray(values)
    except ValueError as error:
        lengths = [_length(item) for item in values]
        others = [row for row, length in enumerate(lengths) if length != lengths[0]]
        if not others:
            raise
        row = others[0]
        text = (
            f"has rows of different lengths: {lengths[0]} in row 0, but {lengths[row]} in row {row}"
        )
        accepted = "accepted: rows of one length, such as padded ones"
        raise ArgumentError(name, f"{text}; {accepted}") from error
    # NumPy would write numbers and NaN among strings as text.
    if array.dtype.kind == "U" and not all(isinstance(item, str) for item in values):
        return np.array(values, object)
    return array


def _length(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.shape[0]
    return len(value) if isinstance(value, Sequence) and not isinstance(value, str) else 0


def _from_torch(tensor: Any) -> np.ndarray:
    """A PyTorch tensor, of any device, layout and precision, without its gradient."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if "strided" not in str(tensor.layout):
        tensor = tensor.to_dense()
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    # NumPy has no such floats.
    if any(dtype in str(tensor.dtype) for dtype in ("bfloat16", "float8")):
        tensor = tensor.float()
    return tensor.numpy()


def _from_sparse(name: str, matrix: Any) -> np.ndarray:
    needed = math.prod(matrix.shape) * matrix.dtype.itemsize
    free = free_memory()
    if needed > free:
        shape = " x ".join(map(str, matrix.shape))
        text = f"is a sparse {shape} matrix, which needs {readable(needed)} of memory"
        raise ArgumentError(name, f"{text}, but only {readable(free)} is free")
    return matrix.toarray()


def _from_frame(name: str, frame: Any) -> np.ndarray:
    """The numbers in a table of pandas (n, F). Those of x are features: whole numbers in them are no tokens."""
    if not frame.shape[1] or not len(frame):
        return np.zeros(frame.shape)
    if name.partition("[")[0] != "x" and frame.shape[1] == 1:
        return _from_column(name, frame.iloc[:, 0])
    if {*frame.dtypes} <= PLAIN_DTYPES:
        return _features(name, frame.to_numpy())
    columns = []
    for number, column in enumerate(frame.columns):
        column_name = f"{name}[{shown(column, LONGEST)!r}]"
        values = to_numpy(column_name, frame.iloc[:, number])
        if values.dtype.kind not in "biuf":
            text = f"holds {values.dtype}, not numbers"
            accepted = "accepted: columns of numbers, such as pandas.get_dummies makes"
            raise ArgumentError(column_name, f"{text}; {accepted}")
        columns.append(values)
    return _features(name, np.stack(columns, axis=1))


def _features(name: str, values: np.ndarray) -> np.ndarray:
    """The columns of a table; as in a file, those of x become floats unless all are pixels."""
    is_x = name.partition("[")[0] == "x"
    is_whole = values.dtype.kind in "biu" and values.dtype != np.uint8
    return values.astype(np.float64) if is_x and is_whole else values


def _from_column(name: str, column: Any) -> np.ndarray:
    """A column of pandas, also a nullable one or one of pyarrow's types."""
    if not isinstance(column.dtype, np.dtype):
        missing = np.asarray(column.isna())
        if missing.any():
            raise _missing(name, missing)
        return np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)
    return np.asarray(column)


def _builtin(name: str, array: np.ndarray) -> np.ndarray:
    """An array of a type that NumPy does not have itself, in one that it has."""
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(np.float32)
    if jnp.issubdtype(array.dtype, jnp.integer):
        return array.astype(np.int32)
    raise ArgumentError(name, f"is {array.dtype}; accepted: numbers")


def _from_objects(name: str, array: np.ndarray, values: Any, accepted: str) -> np.ndarray:
    """An array of Python objects, all numbers, all booleans or all strings, in a plain dtype.

    Args:
        name: Name of the argument.
        array: The objects.
        values: What the user passed.
        accepted: See `to_numpy`.
    """
    if not array.ndim:
        raise ArgumentError(name, f"is a {type(values).__name__}; accepted: an array")
    if not array.size:
        return np.zeros(array.shape)
    flat = array.ravel().tolist()
    number = (numbers.Real, decimal.Decimal, np.bool)
    for python_type, dtype in (
        (str, str),
        ((bool, np.bool), bool),
        (numbers.Integral, None),
        (number, np.float64),
    ):
        if all(isinstance(value, python_type) for value in flat):
            converted = np.array(flat, dtype)
            if converted.dtype.kind == "O":
                text = "has integers of more than 64 bits; accepted: smaller ones"
                raise ArgumentError(name, text)
            return converted.reshape(array.shape)
    is_missing = [value is None or type(value).__name__ in ("NAType", "NaTType") for value in flat]
    if any(is_missing):
        raise _missing(name, np.reshape(is_missing, array.shape))

    # The first value of another type than the first one
    first_type = str if isinstance(flat[0], str) else number
    others = [position for position, value in enumerate(flat) if not isinstance(value, first_type)]
    position = others[0] if others else 0
    row = position * len(array) // len(flat)
    text = f"is {shown(repr(flat[position]), LONGEST)} in row {row}"
    raise ArgumentError(name, f"{text}; {accepted}")
