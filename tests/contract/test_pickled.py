"""Pickles of plain values: what NumPy 1 and 2 write is read, and nothing that a file names is run."""

import io
import os
import pickle
import subprocess

import numpy as np
import pytest

from pfljax.contract import pickled

RNG = np.random.default_rng(0)
VALUES = {
    "floats": RNG.normal(size=(3, 2, 5)).astype(np.float32),
    "big endian": np.arange(4, dtype=">i8"),
    "fortran": np.asfortranarray(RNG.integers(9, size=(3, 4))),
    "pixels": RNG.integers(256, size=(2, 3), dtype=np.uint8),
    "booleans": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "texts": np.array(["a", "łódź"]),
    "bytes": np.array([b"ab", b"c"]),
    "none": np.zeros((0, 3)),
    "one": np.array(2.5),
    "scalar": np.float32(1.5),
    "objects": np.array([[1, 2], [3], "x"], object),
    "arrays": np.array([np.arange(2), np.arange(3)], object),
}


def read(content):
    return pickled.load(io.BytesIO(content))


def assert_same(read_value, value):
    assert type(read_value) is type(value)
    if isinstance(value, np.ndarray):
        assert read_value.dtype == value.dtype and read_value.shape == value.shape
        for one, other in zip(read_value.ravel(), value.ravel(), strict=True):
            assert_same(one, other)
    else:
        assert read_value == value


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("name", VALUES)
def test_values_are_read_as_pickle_reads_them(name, protocol):
    content = pickle.dumps({"data": [VALUES[name], (1, None)]}, protocol)
    value = read(content)["data"]
    assert_same(value[0], VALUES[name])
    assert value[1] == (1, None)


def by_numpy_1(content, protocol):
    """The same pickle with the names of NumPy 1, which are one character shorter."""
    for name in ("numpy._core.multiarray", "numpy._core.numeric"):
        former = name.replace("._core", ".core")
        # From protocol 4 on, a text is written after its length.
        lengths = [bytes([len(text)]) if protocol > 3 else b"" for text in (name, former)]
        content = content.replace(lengths[0] + name.encode(), lengths[1] + former.encode())
    if protocol > 3:
        # The first frame is all that follows its length, 8 bytes from byte 3 on.
        content = content[:3] + (len(content) - 11).to_bytes(8, "little") + content[11:]
    return content


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("name", ["floats", "scalar", "objects"])
def test_the_names_of_numpy_1_are_read_too(name, protocol):
    content = by_numpy_1(pickle.dumps(VALUES[name], protocol), protocol)
    assert b"numpy.core" in content and b"numpy._core" not in content
    assert_same(read(content), VALUES[name])


def test_a_matrix_is_read_as_an_array():
    matrix = np.arange(6).reshape(2, 3).view(np.matrix)
    value = read(pickle.dumps(matrix))
    assert type(value) is np.ndarray
    np.testing.assert_array_equal(value, np.arange(6).reshape(2, 3))


class Calls:
    """Pickled as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (os.system, ("touch {}",)),
        (os.mkdir, ("{}",)),
        (eval, ("__import__('os').mkdir({!r})",)),
        (subprocess.check_call, (["touch", "{}"],)),
        (np.load, ("{}",)),
        (np.fromfile, ("{}",)),
        (getattr, (np, "load")),
    ],
)
@pytest.mark.parametrize("where", ["value", "inside", "object array"])
def test_a_pickle_that_calls_functions_is_refused_and_calls_none(
    function, arguments, where, tmp_path
):
    mark = tmp_path / "ran"

    def placed(argument):
        if isinstance(argument, list):
            return [placed(part) for part in argument]
        return argument.format(str(mark)) if isinstance(argument, str) else argument

    call = Calls(function, *map(placed, arguments if function is not getattr else (1, "real")))
    value = {
        "value": call,
        "inside": {"x": [call], "y": np.zeros(2)},
        "object array": np.array([call, 1], object),
    }[where]
    content = pickle.dumps(value)
    with pytest.raises(pickled.NotPlain, match=rf"it has \S*\.{function.__name__}, and not only"):
        read(content)
    assert not mark.exists()


@pytest.mark.parametrize("state", [b"}\x8c\x01aK\x01s", b"N}\x8c\x0c__defaults__)s\x86"])
def test_a_pickle_changes_nothing_that_it_names(state):
    """The operation BUILD would set attributes of the functions that make arrays."""
    for name in (b"numpy._core.multiarray\nscalar", b"numpy\nndarray", b"numpy\ndtype"):
        with pytest.raises(pickled.NotPlain, match="it changes what a name stands for"):
            read(b"\x80\x04c" + name + b"\n" + state + b"b.")


def state_of(array, **changes):
    """A pickle of an array whose state has other entries."""
    make, arguments, state = array.__reduce__()
    names = ("version", "shape", "dtype", "is_fortran", "content")
    entries = dict(zip(names, state, strict=True)) | changes

    class Changed:
        def __reduce__(self):
            return make, arguments, tuple(entries.values())

    return pickle.dumps(Changed())


@pytest.mark.parametrize(
    "content",
    [
        state_of(np.arange(4.0), shape=(10**12,)),
        state_of(np.arange(4.0), shape=(5,)),
        state_of(np.arange(4.0), dtype=np.dtype("V8")),
        state_of(np.arange(4.0), dtype=np.dtype([("a", "O")])),
        state_of(np.arange(4.0), dtype="f8"),
        state_of(np.arange(4.0), dtype=np.dtype("O")),
        state_of(np.array([1, 2], object), content=[1]),
        pickle.dumps(np.ndarray),
        pickle.dumps({"x": np.dtype("f4")}),
        pickle.dumps(np.dtype("M8[s]")),
        pickle.dumps(np.zeros(3))[:-20],
        b"",
    ],
)
def test_what_is_damaged_or_no_value_is_an_error(content):
    with pytest.raises(Exception):  # noqa: B017
        read(content)
