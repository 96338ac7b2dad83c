"""Federations from named data sets and from arrays."""

import jax.numpy as jnp
import numpy as np
import pytest

from pfljax import data
from pfljax.contract.errors import ArgumentError
from pfljax.data import Federation, Splits, partitions

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
Y = np.arange(40) % 2
OWNER = np.array(["c", "a", "b", "a"])[np.arange(40) % 4]
TESTS = np.arange(40) % 5 == 0


def real(split, k=None):
    """The examples of a split, for client k or all clients, without padding and sorted by value."""
    there = np.arange(split.x.shape[1]) < split.size[:, None]
    return np.unique(split.x[there] if k is None else split.x[k][there[k]], axis=0)


def test_ones_own_arrays_with_clients_stay_with_them():
    federation = Federation.from_arrays(
        jnp.asarray(X), jnp.asarray(Y), client=OWNER, test_fraction=0.4, standardize=False
    )
    assert (
        federation.name == "arrays, natural"
        and federation.num_clients == 3
        and federation.num_classes == 2
    )
    np.testing.assert_array_equal(federation.train.size, [12, 6, 6])
    np.testing.assert_array_equal(federation.test.size, [8, 4, 4])
    for k, name in enumerate("abc"):  # neither standardized nor scaled
        found = np.concatenate([real(federation.train, k), real(federation.test, k)])
        np.testing.assert_array_equal(
            np.unique(found, axis=0), np.unique(X[np.char.equal(OWNER, name)], axis=0)
        )


def test_ones_own_arrays_are_divided_by_a_partition():
    pixels = np.arange(40 * 4, dtype=np.uint8).reshape(40, 2, 2)
    with pytest.warns(UserWarning, match="^x: looks like pixels"):
        federation = Federation.from_arrays(
            pixels, np.arange(40) % 4, num_clients=4, seed=1, standardize=False
        )
    assert federation.name == "arrays, label_groups" and federation.num_clients == 4
    assert federation.train.x.dtype == np.uint8 and federation.train.x.shape[2:] == (2, 2)
    # as it is, not divided by 255
    assert max(federation.train.x[...].max(), federation.test.x[...].max()) == 159
    iid = Federation.from_arrays(
        X, Y, OWNER, partition=partitions.IID(), num_clients=5, name="mine"
    )
    assert iid.name == "mine, iid" and iid.num_clients == 5
    regression = Federation.from_arrays(X, X[:, 0], num_clients=4)
    assert (regression.task, regression.num_classes, regression.name) == (
        "regression",
        1,
        "arrays, iid",
    )


def test_ones_own_test_examples_are_the_test_examples():
    federation = Federation.from_arrays(X, Y, OWNER, is_test=TESTS, standardize=False)
    np.testing.assert_array_equal(real(federation.test), np.unique(X[TESTS], axis=0))
    np.testing.assert_array_equal(real(federation.train), np.unique(X[~TESTS], axis=0))
    anew = Federation.from_arrays(X, Y, OWNER, is_test=TESTS, official_test=False)
    np.testing.assert_array_equal(anew.test.size, [4, 2, 2])  # a fifth of each client's
    assert (federation.official_test, anew.official_test) == (True, False)
    assert repr(federation).endswith("8 test (the data set's own)>")
    assert repr(anew).endswith("8 test (drawn; the data set's own are not used)>")


def test_a_file_s_own_test_examples_are_used_unless_a_share_is_asked_for(tmp_path):
    np.savez(tmp_path / "own.npz", x=X, y=Y, client=OWNER, is_test=TESTS)

    def read(**options):
        return data.npz(str(tmp_path / "own.npz"), standardize=False, **options)

    np.testing.assert_array_equal(real(read().test), np.unique(X[TESTS], axis=0))
    for options, sizes in (
        ({"test_fraction": 0.5}, [10, 5, 5]),
        ({"official_test": False}, [4, 2, 2]),
    ):
        assert (
            read(**options).test.size.tolist() == sizes and read(**options).official_test is False
        )
    np.savez(tmp_path / "own.npz", x=X, y=Y, client=OWNER)
    assert read().test.size.tolist() == [4, 2, 2] and read().official_test is None


def test_labels_may_be_strings():
    federation = Federation.from_arrays(X, np.array(["dog", "cat"])[Y], OWNER)
    same = Federation.from_arrays(X, 1 - Y, OWNER)
    assert federation.class_names == ("cat", "dog") and same.class_names == ()
    assert (federation.task, federation.num_classes) == ("classification", 2)
    np.testing.assert_array_equal(federation.train.y, same.train.y)
    assert data.describe(federation)["class_names"] == [
        "cat",
        "dog",
    ] and "class_names" not in data.describe(same)


@pytest.mark.parametrize("ids", [["c", "a", "b", "a"], [b"c", b"a", b"b", b"a"], [30, 10, 20, 10]])
def test_clients_keep_what_the_data_call_them(ids):
    owner = np.array(ids)[np.arange(40) % 4]
    federation = Federation.from_arrays(X, Y, owner)
    names = np.unique(owner.astype(str) if owner.dtype.kind == "S" else owner)
    assert federation.client_names.tolist() == names.tolist()
    drawn = Federation.from_arrays(X, Y, owner, num_clients=2, seed=3)
    of_name = {
        name.tobytes(): size for name, size in zip(names, federation.train.size, strict=True)
    }
    assert len(drawn.client_names) == 2
    assert [of_name[name.tobytes()] for name in drawn.client_names] == drawn.train.size.tolist()
    seen, unseen = data.split_unseen(federation, 0.3, seed=0)
    assert sorted([*seen.client_names, *unseen.client_names]) == names.tolist()
    assert [of_name[name.tobytes()] for name in unseen.client_names] == unseen.train.size.tolist()


@pytest.mark.parametrize("kind", [None, "object", "string", "category"])
@pytest.mark.parametrize("ids", [["c", "a", "b", "a"], [30, 10, 20, 10]])
def test_columns_of_pandas_are_arrays(ids, kind):
    import pandas

    owner = np.array(ids)[np.arange(40) % 4]
    column = pandas.Series(owner) if kind is None else pandas.Series(owner).astype(kind)
    plain = np.asarray(owner, str) if kind == "string" else owner
    frame = pandas.DataFrame(X, columns=list("abc"))
    found, expected = (Federation.from_arrays(frame, Y, each) for each in (column, plain))
    assert data.digest(found) == data.digest(expected)
    assert found.client_names.tolist() == expected.client_names.tolist()
    label = pandas.Series(np.array(["dog", "cat"])[Y]).astype(kind or "object")
    assert Federation.from_arrays(frame, label, column).class_names == ("cat", "dog")


def test_clients_that_are_numbers_from_0_have_no_other_names():
    assert Federation.from_arrays(X, Y, np.arange(40) % 4).client_names is None
    assert Federation.from_arrays(X, Y, num_clients=4).client_names is None


def test_a_file_and_arrays_have_the_same_scale(tmp_path):
    """Gray pixels have the shape that they are given; tokens stay as they are."""
    pixels = np.random.default_rng(0).integers(256, size=(40, 3, 3)).astype(np.uint8)
    np.savez(tmp_path / "own.npz", x=pixels, y=Y, client=OWNER)
    file = data.npz(str(tmp_path / "own.npz"))
    arrays = Federation.from_arrays(pixels, Y, OWNER)
    np.testing.assert_allclose(file.train.x[...], arrays.train.x[...], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(file.scaling(pixels), arrays.scaling(pixels), rtol=1e-4, atol=1e-5)
    tokens = pixels.reshape(40, 9).astype(np.int32) % 100
    np.savez(tmp_path / "own.npz", x=tokens, y=Y, client=OWNER)
    for federation in (
        data.npz(str(tmp_path / "own.npz")),
        Federation.from_arrays(tokens, Y, OWNER),
    ):
        assert federation.scaling is None and np.isin(federation.train.x[...], np.arange(256)).all()


def test_classes_that_y_lacks_can_be_announced():
    for none in (np.zeros(40, int), np.zeros(40)):
        federation = Federation.from_arrays(X, none, OWNER, num_classes=7)
        assert (federation.task, federation.num_classes) == ("classification", 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": Y[:39]}, r"y: has shape \(39,\), but x has \(40, 3\)"),
        ({"client": OWNER[:5]}, r"client: has shape \(5,\)"),
        ({"client": X[:, 0]}, "client: is float32; accepted: integers or strings"),
        (
            {"x": X[:, 0]},
            r"x: has shape \(40,\); accepted: \(n, \*features\), such as x\[:, None\]",
        ),
        ({"x": np.where(X > 1, np.nan, X)}, "x: is NaN or infinite"),
        (
            {"y": np.arange(40), "num_classes": 8},
            "num_classes=8: y reaches 39; accepted: 40 or more",
        ),
        ({"is_test": np.ones(40, bool)}, "is_test: is true for every example"),
        (
            {"is_test": TESTS, "test_fraction": 0.5},
            "test_fraction: is_test says which examples are for testing; name",
        ),
        (
            {"y": np.array(["a", 1], object)[Y]},
            "y: is 1 in row 1; accepted: only integers, or only strings",
        ),
        (
            {"client": np.array(["a", np.nan], object)[Y]},
            "client: is nan in row 1; accepted: only integers, or only",
        ),
        ({"official_test": True}, "official_test: arrays has no official test examples"),
        ({"train_exmples": 3}, "train_exmples=3: unknown argument; did you mean train_examples"),
        ({"zzz": 3}, "zzz=3: unknown argument; accepted: x, y, .*targets"),
        ({"test_fraction": 2}, "test_fraction=2: accepted: above 0, below 1"),
        ({"num_clients": 4}, "num_clients=4: arrays has 3 clients"),
    ],
)
def test_mistakes_in_ones_own_arrays_are_named(change, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        Federation.from_arrays(**({"x": X, "y": Y, "client": OWNER} | change))


def test_options_replace_fields_of_the_splits():
    federation = data.digits(
        4, splits=Splits(train_examples=5, test_fraction=0.5), train_examples=7
    )
    np.testing.assert_array_equal(federation.train.size, 7)
    assert abs(federation.test.size.sum() - 1797 / 2) < 4


def test_examples_with_clients_stay_with_them_unless_told_otherwise(tmp_path):
    file = str(tmp_path / "own.npz")
    np.savez(file, x=X, y=Y, client=np.arange(40) % 5)
    assert data.npz(file).num_clients == 5 and data.npz(file).name == "own, natural"
    assert data.npz(file, 3).num_clients == 3
    assert data.digits().name == "digits, label_groups" and data.digits().num_clients == 16
    sine = data.sine(4, partitions.IID())
    assert (
        sine.name == "sine, iid" and sine.num_clients == 4 and data.sine(8).name == "sine, natural"
    )


def test_what_is_drawn_or_written_for_testing_is_for_testing(tmp_path):
    file = tmp_path / "play.txt"
    file.write_text("\n\n".join(f"{role}:\nab\nba\nab\nba\ncd" for role in ("Ann", "Bob")))
    play = data.text(str(file))
    assert play.name == "play, natural" and play.num_clients == 2
    test = np.array(play.test.y)
    train = np.array(play.train.y)
    assert set(test[test < 255].ravel()) & {3, 4} and not set(train.ravel()) & {3, 4}
    np.testing.assert_array_equal(data.synthetic(3, test_examples=20).test.size, 20)


def test_tfds_becomes_a_federation(tmp_path):
    import tensorflow_datasets as tfds

    with tfds.testing.mock_data(num_examples=20):
        federation = data.tfds("mnist", 4, partitions.IID(), data_dir=str(tmp_path))
    assert federation.name == "mnist, iid" and federation.train.x.shape[2:] == (28, 28, 1)
