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
        text = shown(str(error).partition("\n")[0])
        kind = type(values).__name__
        raise ArgumentError(
            name, f"is a {kind} that NumPy cannot read ({text}); accepted: an array"
        ) from error
    if array.dtype.isbuiltin == 2:  # types of other packages, such as bfloat16
        return _builtin(name, array)
    if array.dtype.kind == "O":
        return _from_objects(name, array, values, accepted)
    if array.dtype.kind == "T":
        return _from_objects(name, array.astype(object), values, accepted)
    return array


def warn_of_order(arguments: Mapping[str, Any]) -> None:
    """Warns if columns or tables of pandas have the same rows, by their index, in another order than the first."""
    indices = {
        name: values.index
        for name, values in arguments.items()
        if type(values).__module__.partition(".")[0] == "pandas" and hasattr(values, "index")
    }
    if len(indices) < 2:
        return
    first, *others = indices
    for name in others:
        index = indices[name]
        same_rows = len(index) == len(indices[first]) and set(index) == set(indices[first])
        if same_rows and not index.equals(indices[first]):
            text = f"has the rows of {first} in another order, by its index, but rows are matched by their position"
            warn(name, f"{text}; pass {name}.loc[{first}.index]")


def _array(name: str, values: Any) -> np.ndarray:
    """The values as an array, which may still hold Python objects."""
    library = type(values).__module__.partition(".")[0]
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
    return ArgumentError(
        name, f"has missing values in {len(rows)} rows; the first is row {rows[0]}"
    )


def _unmasked(name: str, values: np.ma.MaskedArray) -> np.ndarray:
    masked = np.ma.getmaskarray(values)
    if masked.any():
        raise _missing(name, np.atleast_1d(masked))
    return np.asarray(np.ma.getdata(values))


def _from_list(name: str, values: Sequence[Any]) -> np.ndarray:
    """An array of a list's items, which may be arrays of other libraries themselves."""
    plain = (numbers.Number, str, bytes, list, tuple, type(None), np.generic)
    if any(not isinstance(each, plain) and type(each) is not np.ndarray for each in values):
        return np.stack([_array(name, each) for each in values])
    try:
        array = np.asarray(values)
        if array.dtype.kind == "U" and not all(isinstance(each, str) for each in values):
            # NumPy would write numbers and NaN among strings as text
            return np.array(values, object)
        return array
    except ValueError as error:
        lengths = [
            np.shape(each)[0] if isinstance(each, np.ndarray) else _length(each) for each in values
        ]
        different = next((row for row, length in enumerate(lengths) if length != lengths[0]), None)
        if different is None:
            raise
        text = f"has rows of different lengths: {lengths[0]} in row 0, but {lengths[different]} in row {different}"
        raise ArgumentError(
            name, f"{text}; accepted: rows of one length, such as padded ones"
        ) from error


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sequence) and not isinstance(value, str) else 0


def _from_torch(tensor: Any) -> np.ndarray:
    """A PyTorch tensor, of any device, layout and precision, without its gradient."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if "strided" not in str(tensor.layout):
        tensor = tensor.to_dense()
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    # which NumPy does not have
    if any(kind in str(tensor.dtype) for kind in ("bfloat16", "float8")):
        tensor = tensor.float()
    return tensor.numpy()


def _from_sparse(name: str, matrix: Any) -> np.ndarray:
    needed = math.prod(matrix.shape) * matrix.dtype.itemsize
    if needed > free_memory():
        text = f"is a sparse {' x '.join(map(str, matrix.shape))} matrix, which needs {readable(needed)} of memory"
        raise ArgumentError(name, f"{text}, but only {readable(free_memory())} is free")
    return matrix.toarray()


def _from_frame(name: str, frame: Any) -> np.ndarray:
    """The numbers in a table of pandas (n, F). Those of x are features: whole numbers in them are no tokens."""
    if not frame.shape[1] or not len(frame):
        return np.zeros(frame.shape)
    if name.partition("[")[0] != "x" and frame.shape[1] == 1:
        return _from_column(name, frame.iloc[:, 0])
    if {*frame.dtypes} <= {
        np.dtype(np.float32),
        np.dtype(np.float64),
        np.dtype(bool),
        np.dtype(np.uint8),
    }:
        return _features(name, frame.to_numpy())
    columns = []
    for number, column in enumerate(frame.columns):
        values = to_numpy(f"{name}[{shown(column, LONGEST)!r}]", frame.iloc[:, number])
        if values.dtype.kind not in "biuf":
            text = f"holds {values.dtype}, not numbers; accepted: columns of numbers, such as pandas.get_dummies makes"
            raise ArgumentError(f"{name}[{shown(column, LONGEST)!r}]", text)
        columns.append(values)
    return _features(name, np.stack(columns, axis=1))


def _features(name: str, values: np.ndarray) -> np.ndarray:
    """The columns of a table; as in a file, those of x become floats unless all are pixels."""
    is_x = name.partition("[")[0] == "x"
    return (
        values.astype(np.float64)
        if is_x and values.dtype.kind in "biu" and values.dtype != np.uint8
        else values
    )


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


def _from_objects(name: str, array: np.ndarray, given: Any, accepted: str) -> np.ndarray:
    """An array of Python objects, all numbers, all booleans or all strings, in a plain dtype."""
    if not array.ndim:
        raise ArgumentError(name, f"is a {type(given).__name__}; accepted: an array")
    if not array.size:
        return np.zeros(array.shape)
    flat = array.ravel().tolist()
    number = (numbers.Real, decimal.Decimal, np.bool)
    for kind, dtype in (
        (str, str),
        ((bool, np.bool), bool),
        (numbers.Integral, None),
        (number, np.float64),
    ):
        if all(isinstance(value, kind) for value in flat):
            converted = np.array(flat, dtype)
            if converted.dtype.kind == "O":
                raise ArgumentError(
                    name, "has integers of more than 64 bits; accepted: smaller ones"
                )
            return converted.reshape(array.shape)
    missing = [value is None or type(value).__name__ in ("NAType", "NaTType") for value in flat]
    if any(missing):
        raise _missing(name, np.reshape(missing, array.shape))
    first = str if isinstance(flat[0], str) else number
    place = next((place for place, value in enumerate(flat) if not isinstance(value, first)), 0)
    row = place * len(array) // len(flat)
    raise ArgumentError(name, f"is {shown(repr(flat[place]), LONGEST)} in row {row}; {accepted}")
