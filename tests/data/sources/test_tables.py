"""CSV and Parquet files, written by pandas and pyarrow: what is read of their columns, and what is refused."""

import sys

import numpy as np
import pytest

from pfljax import data
from pfljax.contract.errors import ArgumentError
from pfljax.data import sources
from pfljax.data.preparation import prepared

pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")
N = 24
FRAME = pandas.DataFrame(
    {
        "age": np.arange(N) * 3,
        "height": np.linspace(1, 2, N),
        "kind": np.array(["dog", "cat", "emu"])[np.arange(N) % 3],
        "income": np.arange(N) / 2,
        "who": np.array(["zoe", "ann"])[np.arange(N) % 2],
        "part": np.where(np.arange(N) % 5 == 3, "test", "train"),
        "late": np.arange(N) % 5 == 3,
        "wet": np.arange(N) % 3 == 0,
    }
)
NUMBERS = ["age", "height"]


@pytest.fixture(params=["csv", "parquet"])
def write(request, tmp_path):
    """Writes a frame: (frame) -> path."""

    def written(frame, name="animals"):
        path = str(tmp_path / f"{name}.{request.param}")
        getattr(frame, f"to_{request.param}")(path, index=False)
        return path

    return written


def read(path, **options):
    return sources.table(path, **{"features": NUMBERS, "standardize": False} | options)


def test_columns_become_examples_labels_clients_and_tests(write):
    path = write(FRAME)
    for marks in ("part", "late"):
        source = read(path, label="kind", client="who", test=marks)
        np.testing.assert_allclose(source.x, FRAME[NUMBERS], rtol=1e-6)
        assert source.class_names == ("cat", "dog", "emu") and source.x.dtype == np.float32
        np.testing.assert_array_equal(source.y, np.array([1, 0, 2])[np.arange(N) % 3])
        # sorted: ann is client 0
        np.testing.assert_array_equal(source.client, 1 - np.arange(N) % 2)
        np.testing.assert_array_equal(source.is_test, np.arange(N) % 5 == 3)
        assert source.client_names.tolist() == ["ann", "zoe"] and source.name == "animals"


def test_all_columns_of_numbers_that_have_no_other_part_are_features(write):
    with pytest.warns(
        UserWarning, match="features: kind, part in animals.* holds no numbers and is left out"
    ):
        source = sources.table(write(FRAME), label="income", client="who", standardize=False)
    expected = FRAME[["age", "height", "late", "wet"]].to_numpy(float)
    np.testing.assert_allclose(source.x, expected, rtol=1e-6)
    assert source.task == "regression"
    np.testing.assert_allclose(source.y, FRAME["income"])


def test_several_labels_are_several_outputs(write):
    path = write(FRAME)
    source = read(path, label="income, age", features="height")
    assert source.task == "regression"
    np.testing.assert_allclose(source.y, FRAME[["income", "age"]])
    source = read(path, label=["late", "wet"])
    assert (source.task, source.num_classes) == ("multilabel", 2)
    np.testing.assert_array_equal(source.y, FRAME[["late", "wet"]])
    assert read(path, label="wet").num_classes == 2


def test_text_is_read_as_characters_with_padding(write):
    frame = pandas.DataFrame({"said": ["ba", "c a", "b"], "label": [0, 1, 0]})
    source = sources.table(write(frame), text="said")
    # Sorted: " " is 1, a is 2, b is 3, c is 4.
    np.testing.assert_array_equal(source.x, [[3, 2, 0], [4, 1, 2], [3, 0, 0]])
    assert source.x.dtype == np.uint8 and source.tokens


def test_whole_numbers_are_scaled_as_other_numbers_are(write):
    x = prepared(sources.table(write(FRAME), label="kind", features="age")).x
    age = FRAME["age"].to_numpy(float)
    np.testing.assert_allclose(x[:, 0], (age - age.mean()) / age.std(), rtol=1e-5)


def test_pixels_and_categories_of_parquet(tmp_path):
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame(rng.integers(256, size=(N, 4)).astype(np.uint8), columns=list("abcd"))
    frame["label"] = FRAME["kind"].astype("category")
    frame.to_parquet(tmp_path / "pixels.parquet")
    source = sources.table(tmp_path / "pixels.parquet", standardize=False)
    # numbers, though they fit in bytes
    np.testing.assert_array_equal(source.x, frame[list("abcd")])
    assert source.class_names == ("cat", "dog", "emu")


def test_a_file_becomes_a_federation_the_same_each_time(write):
    path = write(FRAME)
    options = {"label": "kind", "client": "who", "features": NUMBERS}
    first, again = (data.read(path, test="part", **options) for _ in range(2))
    assert data.digest(first) == data.digest(again) and first.official_test is True
    # rows 3, 13, 23; 8, 18
    assert first.test.size.tolist() == [3, 2] and first.train.size.tolist() == [9, 10]
    drawn = data.read(path, test="part", test_fraction=0.5, **options)
    assert drawn.official_test is False and drawn.test.size.tolist() == [6, 6]
    changed = FRAME.assign(height=FRAME["height"] + (np.arange(N) == 5))
    assert data.digest(data.read(write(changed, "other"), test="part", **options)) != data.digest(
        first
    )
    dealt = data.read(
        path,
        3,
        data.partitions.IID(),
        label="kind",
        features=NUMBERS,
        format=path.rpartition(".")[2],
    )
    assert dealt.num_clients == 3 and dealt.name == "animals, iid"
    assert sources.table(path, label="kind", features=NUMBERS, fraction=0.5).x.shape == (12, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "knd"}, r"label=knd: animals\.\w+ has no such column; did you mean kind"),
        (
            {"label": "kind", "client": "zzz"},
            r"client=zzz: animals\.\w+ has no such column; accepted: age",
        ),
        (
            {"label": "kind,who"},
            "label=kind,who: accepted: one column, or several columns of numbers or booleans",
        ),
        (
            {"label": "kind", "test": "age"},
            "test=age: accepted: a column of booleans, or of train and test",
        ),
        (
            {"label": "kind", "client": "height", "features": "age"},
            "file=.*: client is float64; accepted: integers",
        ),
        (
            {"label": "kind", "features": "who"},
            r"features: who in animals\.\w+; accepted: columns of numbers; .* texts in text$",
        ),
        ({"label": "kind", "text": "age", "features": ""}, "text=age: accepted: a column of text"),
        ({"label": "kind", "text": "who"}, "features=.*: not accepted with a text column"),
        ({"label": ""}, "label=: accepted: one column"),
    ],
)
def test_wrong_columns_are_named(write, options, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        read(write(FRAME), **options)


def test_damaged_files_are_refused_in_a_line(tmp_path):
    FRAME.to_parquet(tmp_path / "torn.parquet")
    whole = (tmp_path / "torn.parquet").read_bytes()
    contents = {
        "torn.parquet": (whole[:-20], "is not a CSV or Parquet file"),
        "ragged.csv": (
            b"a,label\n1,0\n2\n",
            "is not a CSV or Parquet file .*Expected 2 columns, got 1",
        ),
        "empty.csv": (b"", "is not a CSV or Parquet file"),
        "header.csv": (b"a,label\n", "has no rows"),
        "twice.csv": (b"a,a,label\n1,2,0\n", "has two columns of a name"),
        "hole.csv": (b"a,label\n1,0\n,1\n", r"has no value in column a, row 1 \(counted from 0\)"),
        "far.csv": (
            b"a,label\n1,0\nnan,1\n",
            "features is NaN or infinite|has no value in column a",
        ),
    }
    for name, (content, said) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ArgumentError, match=f"^file=.*{name}: {said}") as caught:
            sources.table(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(ArgumentError, match=r"file=.*here\.csv: cannot be read .No such file"):
        sources.table(tmp_path / "here.csv")


def test_without_pyarrow_its_extra_is_named(monkeypatch, write):
    path = write(FRAME)
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    with pytest.raises(
        ArgumentError, match=r"file=.*: needs pyarrow: pip install 'pfljax\[tables\]'"
    ):
        read(path, label="kind")
