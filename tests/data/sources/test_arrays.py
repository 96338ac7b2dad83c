"""Arrays of a file: types, scaling, targets, clients, and rejected input."""

import re
import warnings

import numpy as np
import pytest

from pfljax.contract.errors import ArgumentError
from pfljax.data import Federation, sources
from pfljax.data.preparation import prepared

RNG = np.random.default_rng(0)
CLASSES = np.arange(30) % 3


@pytest.fixture
def npz(tmp_path):
    """Writes arrays to a file and loads it: npz(x=..., y=..., load={...})."""

    def load(load=None, **arrays):
        np.savez(tmp_path / "own.npz", **arrays)
        return sources.npz(str(tmp_path / "own.npz"), **(load or {}))

    return load


def test_strings_are_classes_in_sorted_order(npz):
    """Also those of a subsample, whose classes are those of all; NumPy sorts by code points, capitals first."""
    y = np.array(["dog", "cat", "Zebra", "cat", "ox", "dog"])
    source = npz(x=np.arange(6.0)[:, None], y=y)
    assert source.class_names == ("Zebra", "cat", "dog", "ox") and source.num_classes == 4
    assert (
        source.y.dtype == np.int32
        and source.y.tolist() == [2, 1, 0, 1, 3, 2]
        and source.task == "classification"
    )
    part = npz(x=np.arange(6.0)[:, None], y=y, load={"fraction": 0.5, "standardize": False})
    assert part.class_names == source.class_names
    np.testing.assert_array_equal(part.y, source.y[part.x[:, 0].astype(int)])


def test_standardization_is_measured_on_rows_that_are_not_official_tests_before_a_split(npz):
    x = RNG.normal(5, 3, size=(3000, 4)).astype(np.float32)
    x[:, 3] = 0.1  # constant: the guard keeps it from 0 / 0
    is_test = np.arange(3000) % 3 == 0
    x[is_test, :3] += 100
    source = npz(x=x, y=np.arange(3000) % 2, is_test=is_test)
    np.testing.assert_array_equal(source.x, x)  # raw, until the training examples are known
    found = prepared(source).x
    train = found[~is_test]
    np.testing.assert_allclose(train[:, :3].mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(train[:, :3].std(axis=0), 1, atol=1e-5)
    np.testing.assert_array_equal(found[:, 3], 0)
    assert found[is_test, :3].min() > 10
    np.testing.assert_array_equal(source.is_test, is_test)
    plain = npz({"standardize": False}, x=x, y=np.arange(3000))
    np.testing.assert_array_equal(prepared(plain).x, x)


def test_statistics_are_those_of_the_numbers_as_given(npz):
    """In float32, numbers of 1e9 are multiples of 64, so that most of their noise would be gone."""
    x = 1e9 + 10 * RNG.normal(size=(3000, 2))
    source = npz(x=x, y=np.arange(3000) % 2)
    np.testing.assert_allclose(prepared(source).x, (x - x.mean(axis=0)) / x.std(axis=0), atol=1e-5)


def test_a_constant_that_is_no_sum_of_powers_of_2_becomes_0(npz):
    x = np.full((3000, 2), [0.1, 1e9 + 0.1])  # 3000 times 0.1, divided by 3000, is not 0.1
    np.testing.assert_array_equal(prepared(npz(x=x, y=np.arange(3000) % 2)).x, 0)


def test_channels_that_come_first_are_told(npz):
    y = np.arange(6) % 3
    with pytest.warns(
        UserWarning, match=r"^x: has shape \(6, 3, 8, 8\).*pass x.transpose\(0, 2, 3, 1\)"
    ):
        npz(x=RNG.normal(size=(6, 3, 8, 8)), y=y)
    for shape in ((6, 8, 8, 3), (6, 8, 8, 16), (6, 3, 3, 3), (6, 3, 8, 7)):
        npz(x=RNG.normal(size=shape), y=y)


def test_likely_mistakes_are_told(npz):
    """Not those of a standardized x, of uint8 pixels (divided by 255), or of numbers that are not whole."""
    y = np.arange(50) % 3
    pixels = RNG.integers(0, 256, size=(50, 4, 4)).astype(float)
    raw = {"standardize": False}
    with pytest.warns(
        UserWarning, match="^x: looks like pixels from 0 to 255 that are not standardized"
    ):
        npz(raw, x=pixels, y=y)
    (
        npz(x=pixels, y=y),
        npz(raw, x=pixels.astype(np.uint8), y=y),
        npz(raw, x=pixels + 0.5, y=y),
        npz(raw, x=-pixels, y=y),
    )
    text = (
        "^y: has labels from 1: classes are counted from 0, so that C is 4 and no "
        "example has class 0; subtract 1, or"
    )
    with pytest.warns(UserWarning, match=text):
        assert npz(x=pixels, y=y + 1).num_classes == 4


@pytest.mark.parametrize(
    ("y", "text"),
    [
        (
            CLASSES.astype(float),
            r"^y: has floats, so the task is regression; .* pass y.astype\(int\)",
        ),
        (
            np.eye(3)[CLASSES],
            r"^y: has one-hot rows; if these are classes, pass y.argmax\(axis=1\)",
        ),
        (np.eye(3, dtype=int)[CLASSES], "^y: has one-hot rows"),
        (
            CLASSES[:, None],
            r"^y: has shape \(30, 1\), which is one class for each position .* pass y\[:, 0\]",
        ),
    ],
)
def test_targets_that_look_like_classes_are_named_unless_the_task_is_stated(y, text):
    x = np.ones((30, 2), np.float32)
    with pytest.warns(UserWarning, match=text):
        Federation.from_arrays(x, y, client=np.arange(30) % 2)
    task = "regression" if y.dtype.kind == "f" else "classification"
    others = [
        (y, task),
        (CLASSES, "auto"),
        (CLASSES + 0.5, "auto"),
        (np.ones((30, 2)) * 0.5, "auto"),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for values, stated in others:
            Federation.from_arrays(x, values, client=np.arange(30) % 2, task=stated)


def test_images_are_standardized_per_channel(npz):
    x = RNG.integers(0, 256, size=(50, 4, 5, 3), dtype=np.uint8)
    x[..., 1] //= 4
    y = np.arange(50) % 2
    divided = npz({"standardize": False}, x=x, y=y)
    np.testing.assert_array_equal(divided.x, x.astype(np.float32) / 255)
    assert prepared(divided).x is divided.x
    expected = (x - x.mean(axis=(0, 1, 2))) / x.std(axis=(0, 1, 2))
    np.testing.assert_allclose(prepared(npz(x=x, y=y)).x, expected, atol=1e-5)
    # one mean of all pixels, and the shape that the file has
    gray = prepared(npz(x=x[..., 0], y=y)).x
    np.testing.assert_allclose(gray, (x[..., 0] - x[..., 0].mean()) / x[..., 0].std(), atol=1e-5)


def test_targets_decide_the_task(npz):
    x = np.ones((4, 2))
    classes = npz(x=x, y=np.array([0, 5, 2, 2], np.uint8))
    assert (classes.task, classes.num_classes, classes.y.dtype) == ("classification", 6, np.int32)
    regression = npz(x=x, y=np.array([0.0, 1, 2, 3]))
    assert (regression.task, regression.num_classes, regression.y.dtype) == (
        "regression",
        1,
        np.float32,
    )
    assert npz({"task": "classification"}, x=x, y=np.array([0.0, 1, 2, 3])).num_classes == 4
    assert npz({"task": "regression"}, x=x, y=np.array([0, 1, 2, 3])).task == "regression"


def test_a_subsample_knows_all_classes(npz):
    source = npz({"fraction": 0.1}, x=np.ones((100, 2)), y=np.arange(100))
    assert len(source.y) == 10 and source.num_classes == 100


@pytest.mark.parametrize("client", [[30, -7, 30, 9], ["m", "a", "m", "b"]])
def test_clients_are_numbered_in_sorted_order(npz, client):
    np.testing.assert_array_equal(
        npz(x=np.ones((4, 2)), y=np.arange(4), client=client).client, [2, 0, 2, 1]
    )


def test_writers_are_clients_and_coarse_labels_are_kept(npz):
    arrays = {
        "x": np.ones((40, 2)),
        "y": np.arange(40),
        "coarse": np.arange(40, dtype=np.uint8) // 4,
    }
    source = npz({"fraction": 0.5}, **arrays, writer=np.arange(40) // 20)
    assert source.coarse.dtype == np.int32 and source.client.dtype == np.int64
    np.testing.assert_array_equal(source.coarse, source.y // 4)
    np.testing.assert_array_equal(source.client, source.y // 20)
    both = npz(**arrays, writer=np.zeros(40, int), client=np.arange(40) % 3)
    np.testing.assert_array_equal(both.client, np.arange(40) % 3)
    assert npz(x=arrays["x"], y=arrays["y"]).coarse is None


X = np.ones((4, 2))
Y = np.arange(4)
HOLE = np.array([[1.0, 1], [1, np.nan], [1, 1], [np.inf, 1]])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "lacks y.*found x"),
        ({"images": X, "labels": Y}, "lacks x and y.*found images, labels"),
        ({"x": X, "y": Y[:3]}, r"y has shape \(3,\), but x has \(4, 2\); accepted: one value"),
        ({"x": X, "y": np.ones((3, 1))}, r"y has shape \(3, 1\), but x has"),
        ({"x": X, "y": Y, "client": Y[:2]}, r"client has shape \(2,\)"),
        ({"x": X[:0], "y": Y[:0]}, "x is empty"),
        ({"x": np.array(1.0), "y": np.array(1)}, "x is empty"),
        ({"x": HOLE, "y": Y}, "x is NaN or infinite in 2 rows; the first is row 1"),
        ({"x": X * 1e300, "y": Y}, "x is NaN or infinite in 4 rows"),
        ({"x": X, "y": HOLE[:, 1]}, "y is NaN or infinite in 1 rows; the first is row 1"),
        ({"x": X, "y": Y - 2}, "y is -2 in row 0; classes are integers 0..C-1"),
        ({"x": X, "y": Y * 10**6}, "y reaches 3000000 in 4 rows"),
        (
            {"x": X, "y": Y.astype(bytes)},
            r"y is \|S.*accepted: integers or strings.*y\.astype\(str\) converts it",
        ),
        ({"x": X.astype(str), "y": Y}, "x is <U.*accepted: numbers"),
        ({"x": X.astype(object), "y": Y}, "no object arrays"),
        ({"x": X, "y": Y, "client": X[:, 0]}, "client is float64; accepted: integers or strings"),
        ({"x": X, "y": Y, "writer": X[:, 0]}, "writer is float64; accepted: integers or strings"),
        ({"x": X, "y": Y, "writer": Y[:2]}, r"writer has shape \(2,\)"),
        ({"x": X, "y": Y, "coarse": X[:, 0]}, "coarse is float64; accepted: integers"),
        ({"x": X, "y": Y, "coarse": Y[:2]}, r"coarse has shape \(2,\)"),
        ({"x": X, "y": Y, "is_test": Y}, "is_test is not boolean"),
        (
            {"x": X, "y": Y, "clients": Y},
            "has an unknown array clients; did you mean client. accepted: x, y, client, ",
        ),
        (
            {"x": X, "y": Y, "istest": Y > 1},
            "has an unknown array istest; did you mean is_test. accepted: .*is_test, time$",
        ),
        (
            {"x": X, "y": Y, "zzz": Y},
            "has an unknown array zzz; accepted: x, y, client, writer, coarse, is_test, time$",
        ),
        ({"x": X, "y": Y, "is_test": Y >= 0}, "is_test is true for every example"),
    ],
)
def test_malformed_files_are_refused_in_one_line(npz, arrays, message):
    with pytest.raises(ArgumentError, match=message) as error:
        npz(**arrays)
    assert re.match(r"file=.*own\.npz: ", str(error.value)) and "\n" not in str(error.value)


def test_fractional_classes_are_refused(npz):
    with pytest.raises(ArgumentError, match=r"y is 0\.5 in row 1"):
        npz({"task": "classification"}, x=X, y=np.array([0, 0.5, 1, 2]))


@pytest.mark.parametrize("content", [b"", b"x,y\n1,2\n", b"PK\x03\x04 torn", b"\x80\x04N."])
def test_files_that_are_no_npz_are_refused(tmp_path, content):
    (tmp_path / "f.npz").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"file=.*is not an npz"):
        sources.npz(str(tmp_path / "f.npz"))


def test_a_torn_npz_and_a_lone_array_are_refused(tmp_path):
    np.savez_compressed(tmp_path / "f.npz", x=RNG.normal(size=(50, 9)), y=np.arange(50))
    whole = (tmp_path / "f.npz").read_bytes()
    (tmp_path / "f.npz").write_bytes(whole[:500] + bytes(100) + whole[600:])
    with pytest.raises(ArgumentError, match="is not an npz"):
        sources.npz(str(tmp_path / "f.npz"))
    np.save(tmp_path / "f.npy", X)
    with pytest.raises(ArgumentError, match="contains a single array"):
        sources.npz(str(tmp_path / "f.npy"))


def test_an_unknown_task_is_refused(npz):
    with pytest.raises(
        ArgumentError,
        match=r"^task=classes: accepted: auto, classification, regression, multilabel$",
    ):
        npz({"task": "classes"}, x=X, y=Y)


def test_the_widest_gap_between_classes_is_told():
    """Classes 0, 1, 3 and 255: 2 may be missing by chance, but 4 to 254 are not."""
    y = np.tile([0, 1, 3, 255], (30, 2))
    with pytest.warns(UserWarning, match=r"^y: has no class from 4 to 254, but class 255"):
        Federation.from_arrays(np.ones((30, 8), np.float32), y, client=np.arange(30) % 2)
