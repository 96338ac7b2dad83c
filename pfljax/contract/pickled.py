"""Reading pickles of plain values: numbers, texts, lists, dicts and NumPy arrays, without running what a file names.

`pickle.load` calls any function that a file names. Here, a file can name only what makes NumPy's arrays, dtypes and
scalars, under the names of NumPy 1 and 2. The functions below stand for these names; a file calls nothing else.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable
from typing import Any, BinaryIO, Literal

import numpy as np

# Arrays of booleans, numbers, texts, bytes and objects
DTYPE = re.compile(r"b1|[iufcSU]\d+|O8?")


class NotPlain(pickle.UnpicklingError):
    """A pickle that is not of plain values."""


class _Array:
    """An array while its pickle is read."""

    def __init__(self) -> None:
        self.values: np.ndarray | None = None

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, is_fortran, content = state
        self.values = _filled(content, dtype, shape, "F" if is_fortran else "C")


class _DType:
    """A dtype while its pickle is read; its state says the order of the bytes."""

    def __init__(self, text: str, *_: bool) -> None:
        if not isinstance(text, str) or not DTYPE.fullmatch(text):
            raise NotPlain(f"it has an array of {text!r}")
        # "O8" is the size of a pointer where the file was written.
        self.values = np.dtype("O" if text.startswith("O") else text)

    def __setstate__(self, state: tuple) -> None:
        byte_order = state[1]
        if byte_order in ("<", ">"):
            self.values = self.values.newbyteorder(byte_order)


def _filled(content: Any, dtype: Any, shape: tuple, order: Literal["C", "F"]) -> np.ndarray:
    """An array with its content: bytes, or the list of its objects."""
    if not isinstance(dtype, _DType):
        raise NotPlain("it has an array without a dtype")
    if not dtype.values.hasobject:
        if isinstance(content, str):
            # NumPy's arrays of Python 2
            content = content.encode("latin1")
        return np.frombuffer(content, dtype.values).reshape(shape, order=order)
    if not isinstance(content, list) or len(content) != math.prod(shape):
        raise NotPlain("it has an array of objects without its objects")
    values = np.empty(len(content), object)
    for place, value in enumerate(content):
        values[place] = value
    return values.reshape(shape, order=order)


def _new_array(*_: Any) -> _Array:
    """NumPy's `_reconstruct`: an empty array, which its state fills."""
    return _Array()


def _array_from_buffer(content: Any, dtype: Any, shape: tuple, order: Literal["C", "F"]) -> _Array:
    """NumPy's `_frombuffer`, with which protocol 5 makes arrays."""
    array = _Array()
    array.values = _filled(content, dtype, shape, order)
    return array


def _scalar(dtype: Any, content: Any = b"") -> Any:
    """NumPy's `scalar`: a number or text with a dtype."""
    return _filled(content, dtype, (), "C")[()]


class _Named:
    """What a name in a file stands for. A file can call it, but cannot change it."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *arguments: Any) -> Any:
        return self.make(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise NotPlain("it changes what a name stands for")


ARRAY = _Named(_new_array)
ADMITTED: dict[tuple[str, str], _Named] = {
    ("numpy", "ndarray"): ARRAY,
    ("numpy", "matrix"): ARRAY,
    ("numpy.matrixlib.defmatrix", "matrix"): ARRAY,
    ("numpy", "dtype"): _Named(_DType),
}
for core in ("numpy.core", "numpy._core"):  # of NumPy 1 and of NumPy 2
    ADMITTED[f"{core}.multiarray", "_reconstruct"] = ARRAY
    ADMITTED[f"{core}.multiarray", "scalar"] = _Named(_scalar)
    ADMITTED[f"{core}.numeric", "_frombuffer"] = _Named(_array_from_buffer)


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> _Named:
        if (module, name) in ADMITTED:
            return ADMITTED[module, name]
        raise NotPlain(
            f"it has {module}.{name}, and not only numbers, texts, lists, dicts and arrays"
        )


def load(stream: BinaryIO, encoding: str = "ascii") -> Any:
    """Reads a pickle of numbers, texts, lists, tuples, dicts and arrays (`numpy.matrix` becomes an array).

    Args:
        stream: Where the pickle begins.
        encoding: How texts of Python 2 are read; "latin1" also reads its arrays.

    Raises:
        NotPlain: if the pickle has anything else; nothing of it is called.
        Exception: of any type if the pickle is damaged.

    Examples:
        >>> import io, pickle
        >>> import numpy as np
        >>> from pfljax.contract import pickled
        >>> pickled.load(io.BytesIO(pickle.dumps({"x": np.arange(3)})))
        {'x': array([0, 1, 2])}
        >>> pickled.load(io.BytesIO(pickle.dumps({"x": print})))
        Traceback (most recent call last):
        ...
        pfljax.contract.pickled.NotPlain: it has builtins.print, and not only numbers, texts, lists, dicts and arrays
    """
    return _finished(_Plain(stream, encoding=encoding).load())


def _finished(value: Any) -> Any:
    """A value with the arrays in it in place of what they are while they are read."""
    if isinstance(value, _Array) and value.values is not None:
        return _finished(value.values)
    if isinstance(value, dict):
        return {key: _finished(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_finished, value))
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        values = np.empty(value.size, object)
        for place, entry in enumerate(value.ravel()):
            values[place] = _finished(entry)
        return values.reshape(value.shape)
    if isinstance(value, _Named | _Array | _DType):
        raise NotPlain("it has values that are no numbers, texts, lists, dicts or arrays")
    return value
