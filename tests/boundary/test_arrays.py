"""Arrays that users have, made by other libraries: the examples are theirs, or one line says what is wrong."""

import collections
import decimal
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from samples import check, params, sample

import pfljax as pfl

N = 12
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 3)).astype(np.float32)
Y = np.arange(N) % 2
CLIENT = np.arange(N) // 4
WORDS = np.array(["dog", "cat"])[Y]
HOLE = np.arange(N * 3).reshape(N, 3) == 7  # of row 2
PIXELS = RNG.integers(0, 256, (N, 4, 4, 3)).astype(np.uint8)
PIXELS[0, 0, 0] = 0, 255, 128
MASK = RNG.integers(0, 3, (N, 4, 4))
MASK[0, 0, :3] = 0, 1, 2
VOID = MASK.copy()
VOID[:, 0] = 255
VOID[0, 1, :3] = 0, 1, 2
IGNORED = np.where(VOID == 255, -1, VOID)
TOKENS = RNG.integers(0, 50, (N, 5))
SERIES = RNG.normal(size=(N, 6, 2)).astype(np.float32)


class Right(NamedTuple):
    """What a federation must hold, as worked out with NumPy."""

    x: Any
    y: Any = Y
    num_classes: int = 2
    task: str = "classification"
    dtype: str = "float32"


class Case(NamedTuple):
    """What a user has.

    Attributes:
        kind: What sort of input it is.
        make: Makes arguments of `from_arrays`, beside x, y and client.
        right: What is right, or a regular expression of the error.
        told: A regular expression of the warning; "" if there is none.
    """

    kind: str
    make: Callable[[], dict[str, Any]]
    right: Right | str
    told: str = ""


def pandas():
    return pytest.importorskip("pandas")


def pyarrow():
    return pytest.importorskip("pyarrow")


def torch():
    return pytest.importorskip("torch")


def frame(values=X):
    return pandas().DataFrame(values, columns=[f"c{number}" for number in range(values.shape[1])])


def sparse(form):
    import scipy.sparse

    return getattr(scipy.sparse, form)(np.where(np.abs(X) > 1, X, 0))


def with_value(values, value):
    values = np.array(values, object)
    values[3] = value
    return values


SPARSE = np.where(np.abs(X) > 1, X, 0)
WHOLE = np.round(X * 10).astype(int)
DECIMALS = np.array([[decimal.Decimal(int(value)) / 4 for value in row] for row in WHOLE], object)
CASES = {
    "float32": Case("numpy", lambda: {}, Right(X)),
    "float64": Case("numpy", lambda: {"x": X.astype(np.float64)}, Right(X)),
    "float16": Case("numpy", lambda: {"x": X.astype(np.float16)}, Right(X.astype(np.float16))),
    "long double": Case("numpy", lambda: {"x": X.astype(np.longdouble)}, Right(X)),
    "big-endian": Case("numpy", lambda: {"x": X.astype(">f4"), "y": Y.astype(">i2")}, Right(X)),
    "Fortran order": Case("numpy", lambda: {"x": np.asfortranarray(X)}, Right(X)),
    "strides of a slice": Case("numpy", lambda: {"x": np.repeat(X, 2, axis=0)[::2]}, Right(X)),
    "a matrix": Case("numpy", lambda: {"x": X.tolist()}, Right(X)),
    "complex": Case("numpy", lambda: {"x": X + 1j}, r"x: is complex\d+; accepted: numbers"),
    "dates": Case(
        "numpy", lambda: {"x": np.array(["2020-01-01"] * N, "M8[D]")[:, None]}, "x: is datetime64"
    ),
    "a record array": Case(
        "numpy", lambda: {"x": np.zeros(N, [("a", "f4"), ("b", "f4")])}, r"x: is \[\('a'.*numbers"
    ),
    "text in x": Case("numpy", lambda: {"x": WORDS[:, None]}, "x: is <U3; accepted: numbers"),
    "one column without its axis": Case(
        "numpy", lambda: {"x": X[:, 0]}, r"x: has shape \(12,\).*such as x\[:, None\]"
    ),
    "masked without masked values": Case(
        "masked", lambda: {"x": np.ma.masked_array(X, np.zeros_like(HOLE))}, Right(X)
    ),
    "masked x": Case(
        "masked",
        lambda: {"x": np.ma.masked_array(X, HOLE)},
        "x: has missing values in 1 rows.*row 2",
    ),
    "masked y": Case(
        "masked",
        lambda: {"y": np.ma.masked_array(Y, Y == 1)},
        "y: has missing values in 6 rows.*row 1",
    ),
    "masked client": Case(
        "masked",
        lambda: {"client": np.ma.masked_array(CLIENT, CLIENT == 2)},
        "client: has missing values in 4 rows",
    ),
    "masked rows in a list": Case(
        "masked", lambda: {"x": list(np.ma.masked_array(X, HOLE))}, "x: has missing values"
    ),
    "masked in a dict": Case(
        "masked", lambda: {"x": {"a": np.ma.masked_array(X, HOLE)}}, r"x\['a'\]: has missing"
    ),
    "NaN": Case(
        "missing",
        lambda: {"x": np.where(HOLE, np.nan, X)},
        "x: is NaN or infinite in 1 rows.*row 2",
    ),
    "None among strings": Case(
        "missing", lambda: {"y": with_value(WORDS, None)}, "y: has missing values.*row 3"
    ),
    "NaN among strings": Case(
        "missing", lambda: {"y": with_value(WORDS, np.nan)}, "y: is nan in row 3; accepted: only"
    ),
    "NaN in a list of strings": Case(
        "missing",
        lambda: {"client": [*WORDS[:-1].tolist(), float("nan")]},
        "client: is nan in row 11; accepted: only",
    ),
    "empty strings": Case(
        "missing",
        lambda: {"y": np.where(Y == 1, "", "dog")},
        Right(X, 1 - Y),
        "y: has '' in 6 rows, as a class of its own; leave rows without a class out",
    ),
    "NaN that became text": Case(
        "missing",
        lambda: {"client": np.where(CLIENT == 2, "nan", "a")},
        Right(X),
        "client: has 'nan' in 4 rows, as a client of its own",
    ),
    "numbers among strings": Case(
        "objects", lambda: {"y": with_value(WORDS, 5)}, "y: is 5 in row 3; accepted: only"
    ),
    "numbers among strings of a list": Case(
        "objects", lambda: {"y": ["a", 1] * 6}, "y: is 1 in row 1; accepted: only"
    ),
    "objects that are numbers": Case(
        "objects", lambda: {"x": X.astype(object), "y": Y.astype(object)}, Right(X)
    ),
    "decimals": Case("objects", lambda: {"x": DECIMALS}, Right(WHOLE / 4)),
    "objects with text": Case(
        "objects", lambda: {"x": with_value(X, "?")}, r"x: is '\?' in row 3; accepted: numbers"
    ),
    "integers of 100 bits": Case(
        "objects", lambda: {"y": with_value(Y, 2**100)}, "y: has integers of more than 64"
    ),
    "booleans as objects": Case("objects", lambda: {"y": (Y == 1).astype(object)}, Right(X)),
    "ragged lists": Case(
        "lists",
        lambda: {"x": [[1.0], *[[1.0, 2.0]] * (N - 1)]},
        "x: has rows of different lengths: 1 in row 0, but 2",
    ),
    "ragged arrays": Case(
        "lists", lambda: {"x": [np.ones(2 + (row == 5)) for row in range(N)]}, "x: has rows of diff"
    ),
    "ragged objects": Case(
        "lists", lambda: {"x": np.array([[1], [1, 2]] * 6, object)}, r"x: is \[1\] in row 0; acc"
    ),
    "rows of jax": Case("lists", lambda: {"x": [jnp.asarray(row) for row in X]}, Right(X)),
    "a generator": Case(
        "lists", lambda: {"x": (row for row in X)}, "x: is a generator; accepted: an array"
    ),
    "bfloat16": Case("jax", lambda: {"x": jnp.asarray(WHOLE, jnp.bfloat16)}, Right(WHOLE)),
    "int4": Case(
        "jax", lambda: {"x": jnp.asarray(WHOLE % 5, jnp.int4)}, Right(WHOLE % 5, dtype="int32")
    ),
    "sparse rows": Case("sparse", lambda: {"x": sparse("csr_matrix")}, Right(SPARSE)),
    "a sparse array": Case("sparse", lambda: {"x": sparse("coo_array")}, Right(SPARSE)),
    "sparse labels": Case(
        "sparse", lambda: {"y": sparse("csc_array")}, Right(X, SPARSE, 1, "regression")
    ),
    "a sparse matrix larger than memory": Case(
        "sparse",
        lambda: {"x": __import__("scipy.sparse").sparse.csr_matrix((N, 2**44))},
        "x: is a sparse .* matrix, which needs .* of memory, but only",
    ),
    "a frame": Case("pandas", lambda: {"x": frame()}, Right(X)),
    "a frame of whole numbers": Case("pandas", lambda: {"x": frame(WHOLE)}, Right(WHOLE)),
    "a frame of several types": Case(
        "pandas",
        lambda: {"x": frame().assign(c1=WHOLE[:, 0], c2=Y == 1)},
        Right(np.stack([X[:, 0], WHOLE[:, 0], Y], 1)),
    ),
    "a nullable frame": Case("pandas", lambda: {"x": frame().convert_dtypes()}, Right(X)),
    "a nullable frame with a hole": Case(
        "pandas",
        lambda: {"x": frame(np.where(HOLE, np.nan, X)).convert_dtypes()},
        r"x\['c1'\]: has missing .*row 2",
    ),
    "a frame with text": Case(
        "pandas", lambda: {"x": frame().assign(c0=WORDS)}, r"x\['c0'\]: holds <U3, not numbers"
    ),
    "columns of pyarrow": Case(
        "pandas", lambda: {"x": frame().convert_dtypes(dtype_backend="pyarrow")}, Right(X)
    ),
    "a frame in another order": Case(
        "pandas",
        lambda: {"x": frame().iloc[::-1], "y": pandas().Series(Y)},
        Right(X[::-1]),
        r"y: has the rows of x in another order, .* pass y.loc\[x.index\]",
    ),
    "a frame with an index of its own": Case(
        "pandas",
        lambda: {"x": frame().set_index(np.arange(N) + 100), "y": pandas().Series(Y)},
        Right(X),
    ),
    "a label column": Case(
        "pandas", lambda: {"y": pandas().DataFrame({"label": WORDS})}, Right(X, 1 - Y)
    ),
    "nullable labels": Case("pandas", lambda: {"y": pandas().Series(Y).convert_dtypes()}, Right(X)),
    "nullable labels with a hole": Case(
        "pandas",
        lambda: {"y": pandas().Series([*Y[:-1].tolist(), None], dtype="Int64")},
        "y: has missing .* row 11",
    ),
    "categories": Case(
        "pandas", lambda: {"y": pandas().Series(WORDS, dtype="category")}, Right(X, 1 - Y)
    ),
    "test marks as objects": Case(
        "pandas", lambda: {"is_test": pandas().Series(Y == 1, dtype=object)}, Right(X)
    ),
    "a table of pyarrow": Case(
        "pyarrow",
        lambda: {"x": pyarrow().table({"a": X[:, 0], "b": Y})},
        Right(np.stack([X[:, 0], Y], 1)),
    ),
    "an array of pyarrow with a hole": Case(
        "pyarrow",
        lambda: {"y": pyarrow().array([None, *Y[1:].tolist()])},
        "y: has missing values in 1 rows.*row 0",
    ),
    "a tensor": Case("torch", lambda: {"x": torch().tensor(X), "y": torch().tensor(Y)}, Right(X)),
    "a tensor with a gradient": Case(
        "torch", lambda: {"x": torch().tensor(X, requires_grad=True)}, Right(X)
    ),
    "a tensor of bfloat16": Case(
        "torch", lambda: {"x": torch().tensor(WHOLE).bfloat16()}, Right(WHOLE)
    ),
    "a sparse tensor": Case(
        "torch", lambda: {"x": torch().tensor(SPARSE).to_sparse()}, Right(SPARSE)
    ),
    "a list of tensors": Case("torch", lambda: {"x": [torch().tensor(row) for row in X]}, Right(X)),
    "pixels": Case(
        "pixels", lambda: {"x": PIXELS}, Right(PIXELS, dtype="uint8"), "x: looks like pixels"
    ),
    "pixels as int64": Case(
        "pixels",
        lambda: {"x": PIXELS.astype(int), "standardize": True},
        Right(PIXELS, dtype="int32"),
        r"x: holds integers from 0 to 255.* pass x.astype\('uint8'\)",
    ),
    "flat pixels as int32": Case(
        "pixels",
        lambda: {"x": PIXELS.reshape(N, -1).astype(np.int32), "standardize": True},
        Right(PIXELS.reshape(N, -1), dtype="int32"),
        "x: holds integers from 0 to 255",
    ),
    "differences as int16": Case(
        "pixels",
        lambda: {"x": WHOLE.astype(np.int16), "standardize": True},
        Right(WHOLE, dtype="int32"),
        r"x: holds integers from -\d+ to \d+.* pass x.astype\(float\)",
    ),
    "tokens": Case(
        "pixels", lambda: {"x": TOKENS, "standardize": True}, Right(TOKENS, dtype="int32")
    ),
    "series": Case("numpy", lambda: {"x": SERIES}, Right(SERIES)),
    "a mask with 255": Case(
        "masks",
        lambda: {"y": VOID.astype(np.uint8)},
        Right(X, VOID, 256),
        "y: has no class from 3 to 254.*ignored_index",
    ),
    "a mask of floats with 255 ignored": Case(
        "masks",
        lambda: {"y": VOID.astype(np.float32), "ignored_index": 255},
        "ignored_index=255: accepted only for classification, but the targets are float32, so the task is regression",
    ),
    "a mask with 255 that lacks a class": Case(
        "masks",
        lambda: {"y": np.where(VOID == 2, 3, VOID).astype(np.uint8)},
        Right(X, np.where(VOID == 2, 3, VOID), 256),
        "y: has no class from 4 to 254.*ignored_index",
    ),
    **{
        f"a mask of {dtype} with {top} ignored": Case(
            "masks",
            lambda dtype=dtype, top=top: {
                "y": np.where(VOID == 255, top, VOID).astype(dtype),
                "ignored_index": top,
            },
            Right(X, IGNORED, 3),
        )
        for dtype, top in [
            ("uint8", 255),
            ("uint16", 65535),
            ("uint32", 2**32 - 1),
            ("uint64", 2**64 - 1),
            ("int8", 127),
            ("int16", -32768),
            ("int64", 2**63 - 1),
        ]
    },
    "labels with 255": Case(
        "masks", lambda: {"y": Y * 255}, Right(X, Y * 255, 256), "y: has no class from 1 to 254"
    ),
    "nothing but ignored places": Case(
        "masks", lambda: {"y": MASK * 0 - 1}, "y: has no class: all positions are ignored"
    ),
    "labels from a rare class": Case(
        "masks", lambda: {"y": np.where(Y, 42, 3), "num_classes": 62}, Right(X, Y * 39 + 3, 62)
    ),
    "several labels as floats": Case(
        "tasks",
        lambda: {"y": np.tile([1.0, 1, 0], (N, 1))},
        Right(X, np.tile([1, 1, 0], (N, 1)), 1, "regression"),
        r"y: has rows of 0 and 1, which are several numbers to predict; .* pass y.astype\(bool\)",
    ),
    "several labels as booleans": Case(
        "tasks",
        lambda: {"y": np.tile([True, True, False], (N, 1))},
        Right(X, np.tile([1, 1, 0], (N, 1)), 3, "multilabel"),
    ),
    "a regression on words": Case(
        "tasks",
        lambda: {"y": WORDS, "task": "regression"},
        "y: has strings, such as 'dog'; accepted for regression: num",
    ),
    "labels of words": Case(
        "tasks",
        lambda: {"y": WORDS, "task": "multilabel"},
        "y: has strings, such as 'dog'; accepted for multilabel: num",
    ),
    "whole floats in a column": Case(
        "tasks",
        lambda: {"y": Y[:, None].astype(float)},
        Right(X, Y[:, None], 1, "regression"),
        r"y: has floats, so the task is regression; .* y\[:, 0\].astype\(int\)",
    ),
    "two examples a client": Case(
        "sizes", lambda: {"x": X[:4], "y": Y[:4], "client": [0, 0, 1, 1]}, Right(X[:4], Y[:4])
    ),
    "one example": Case("sizes", lambda: {"x": X[:1], "y": Y[:1], "client": [0]}, ".*"),
    "no examples": Case("sizes", lambda: {"x": X[:0], "y": Y[:0], "client": []}, "x: is empty"),
}


def kind_of(case):
    return CASES[case[0]].kind


NAMES = [(name,) for name in CASES]
SOME = sample(NAMES, kind_of)


def test_the_sample_has_every_kind():
    check(NAMES, SOME, kind_of)


def rows_of(*arrays):
    """Examples as a counted set of rows, whose order does not matter."""
    flat = np.concatenate(
        [np.asarray(array, np.float64).reshape(len(array), -1) for array in arrays], axis=1
    )
    return collections.Counter(map(tuple, flat.round(4).tolist()))


def examples_of(clients):
    """All clients' examples, as `rows_of` gives them."""
    parts = [
        rows_of(split.x[k][: split.size[k]], split.y[k][: split.size[k]])
        for split in (clients.train, clients.test)
        for k in range(clients.num_clients)
    ]
    return sum(parts, collections.Counter())


@pytest.mark.parametrize("name", params(NAMES, SOME, SOME))
def test_examples_are_what_was_given_or_one_line_tells(name):
    case = CASES[name]
    arguments = {"x": X, "y": Y, "client": CLIENT, "standardize": False} | case.make()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if isinstance(case.right, str):
            with pytest.raises(pfl.ArgumentError, match=f"^{case.right}") as caught:
                pfl.Federation.from_arrays(**arguments)
            assert "\n" not in str(caught.value)
            return
        clients = pfl.Federation.from_arrays(**arguments)
    assert (clients.task, clients.num_classes) == (case.right.task, case.right.num_classes)
    assert clients.train.x.dtype == case.right.dtype
    assert examples_of(clients) == rows_of(case.right.x, case.right.y)
    texts = [str(each.message) for each in told]
    assert [text for text in texts if re.match(case.told, text)] if case.told else not texts


DRAWN = {"official_test": False, "test_fraction": 0.5, "validation_fraction": 0.25}


@pytest.mark.parametrize("dtype", ["float64", "uint8"])
@pytest.mark.parametrize(
    "partition", [None, pfl.partitions.IID(), pfl.partitions.Dirichlet(alpha=10.0)]
)
def test_means_and_deviations_are_those_of_the_training_examples(dtype, partition):
    """Half of the examples are drawn for testing, whose numbers are 100 times as large: they change nothing."""
    n = 120
    x = RNG.integers(0, 200, (n, 5)).astype(dtype)
    y = np.arange(n) % 2
    options = {} if partition is None else {"partition": partition, "num_clients": 3}

    def load(x, **more):
        client = None if partition else np.arange(n) // 40
        return pfl.Federation.from_arrays(x, y, client=client, **options, **DRAWN, **more)

    numbered = load(np.arange(n, dtype=np.float32)[:, None], standardize=False)
    train = [
        numbered.train.x[k][:size, 0].astype(int) for k, size in enumerate(numbered.train.size)
    ]
    rows = np.concatenate(train)
    assert len(rows) < 60
    clients = load(x)
    np.testing.assert_allclose(clients.scaling.mean, x[rows].mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(clients.scaling.std, x[rows].std(axis=0), rtol=1e-12)
    expected = (x[train[0]] - x[rows].mean(axis=0)) / x[rows].std(axis=0)
    found = clients.standardized.train.x[0][: len(expected)]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    others = np.delete(np.arange(n), rows)
    changed = x.copy()
    changed[others] = 255 - changed[others]
    np.testing.assert_array_equal(load(changed).scaling.mean, clients.scaling.mean)


def test_a_file_on_disk_is_measured_on_training_examples_too(tmp_path):
    pixels = RNG.integers(0, 256, (60, 4, 4, 3)).astype(np.uint8)
    for name, array in {"x": pixels, "y": np.arange(60) % 2, "client": np.arange(60) // 20}.items():
        np.save(tmp_path / f"{name}.npy", array)
    clients = pfl.data.read(tmp_path, **DRAWN)
    rows = np.concatenate(
        [clients.train.x.index[k][:size] for k, size in enumerate(clients.train.size)]
    )
    assert len(rows) < 30
    np.testing.assert_allclose(clients.scaling.mean, pixels[rows].mean(axis=(0, 1, 2)))
    np.testing.assert_allclose(clients.scaling.std, pixels[rows].std(axis=(0, 1, 2)))
    assert clients.train.x.dtype == np.uint8


@pytest.mark.parametrize("kind", ["npz", "npy", "leaf"])
def test_windows_of_several_sensors_are_the_same_from_a_file_as_from_python(kind, tmp_path):
    """x (n, T, F) of an npz file had a channel axis, and one mean for all sensors."""
    import json

    y = np.arange(24) % 2
    client = np.arange(24) // 8
    x = np.concatenate(
        [RNG.normal(1000, 300, (24, 6, 1)), RNG.normal(0, 0.01, (24, 6, 1))], axis=2
    ).astype(np.float32)
    if kind == "npz":
        np.savez(tmp_path / "har.npz", x=x, y=y, client=client)
    elif kind == "npy":
        for name, array in {"x": x, "y": y, "client": client}.items():
            np.save(tmp_path / f"{name}.npy", array)
    else:
        (tmp_path / "train").mkdir()
        users = {
            str(k): {"x": x[client == k].tolist(), "y": y[client == k].tolist()} for k in range(3)
        }
        content = {"users": [*users], "num_samples": [8] * 3, "user_data": users}
        (tmp_path / "train" / "all.json").write_text(json.dumps(content))
    here = pfl.Federation.from_arrays(x, y, client=client)
    there = pfl.data.read(tmp_path / "har.npz" if kind == "npz" else tmp_path)
    assert there.inputs.shape == here.inputs.shape == (6, 2)
    np.testing.assert_allclose(there.scaling.std, here.scaling.std, rtol=1e-6)
    assert examples_of(there) == examples_of(here)


LAYOUTS = {
    "Fortran order": (np.asfortranarray(PIXELS), Y, CLIENT),
    "big-endian labels": (PIXELS, Y.astype(">i8"), CLIENT.astype(">i8")),
    "float32 in Fortran order": (np.asfortranarray(PIXELS.astype(np.float32)), Y, CLIENT),
    "big-endian floats": (PIXELS.astype(">f4"), Y, CLIENT),
    "float64": (PIXELS.astype(np.float64), Y, CLIENT),
    "float16": (PIXELS.astype(np.float16), Y, CLIENT),
    "boolean labels": (PIXELS, Y == 1, CLIENT),
    "names of clients": (PIXELS, Y, np.array(["a", "b", "c"])[CLIENT]),
}


@pytest.mark.filterwarnings("ignore:x. looks like pixels")
@pytest.mark.parametrize("name", LAYOUTS)
def test_npy_files_in_other_layouts_are_the_same_data(name, tmp_path):
    x, y, client = LAYOUTS[name]
    for part, array in {"x": x, "y": y, "client": client}.items():
        np.save(tmp_path / f"{part}.npy", array)
    assert examples_of(pfl.data.read(tmp_path, standardize=False)) == rows_of(PIXELS, Y)
