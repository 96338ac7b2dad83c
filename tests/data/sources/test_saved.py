"""Data sets that Hugging Face's `datasets` saved to disk."""

import sys

import numpy as np
import pytest

from pfljax import data
from pfljax.contract.errors import ArgumentError
from pfljax.data import sources

datasets = pytest.importorskip("datasets")
Image = pytest.importorskip("PIL.Image")
RNG = np.random.default_rng(0)
COLORS = RNG.integers(256, size=(12, 5, 4, 3)).astype(np.uint8)
LABEL = np.arange(12) % 3
WHO = np.array(["eve", "ada"])[np.arange(12) % 2]
NAMES = ["zebra", "ant", "cow"]  # in the order of the data set, which is not sorted


@pytest.fixture(autouse=True)
def quiet():
    """Saving and loading draw no progress bars."""
    datasets.disable_progress_bars()


def made(rows=slice(None), **columns):
    """A data set with images, and further columns."""
    given = {
        "image": [Image.fromarray(pixels) for pixels in COLORS[rows]],
        "label": LABEL[rows].tolist(),
        "who": WHO[rows].tolist(),
        **columns,
    }
    known = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=NAMES),
        "who": datasets.Value("string"),
    }
    whole = datasets.Dataset.from_dict(given)
    return whole.cast(datasets.Features({**whole.features, **known}))


@pytest.fixture
def animals(tmp_path):
    """The folder of a data set with a test part."""
    parts = {"train": made(slice(0, 8)), "test": made(slice(8, 12))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "animals")
    return tmp_path / "animals"


def test_images_labels_clients_and_the_test_part(animals):
    source = sources.huggingface(animals, client="who", standardize=False)
    np.testing.assert_allclose(source.x, COLORS / 255, rtol=1e-6)
    np.testing.assert_array_equal(source.y, LABEL)
    assert source.class_names == tuple(NAMES) and source.num_classes == 3
    np.testing.assert_array_equal(source.client_names[source.client], WHO)
    np.testing.assert_array_equal(source.is_test, np.arange(12) >= 8)
    assert sources.huggingface(animals, size=(2, 2)).x.shape == (12, 2, 2, 3)


def test_a_folder_becomes_a_federation_the_same_each_time(animals):
    assert sources.detect_format(animals) == "huggingface" and sources.has_tests(
        "huggingface", animals
    )
    first, again = (data.read(animals, client="who") for _ in range(2))
    assert data.digest(first) == data.digest(again) and first.official_test is True
    assert (first.train.size.tolist(), first.test.size.tolist()) == ([4, 4], [2, 2])
    one = data.read(animals / "train", client="who")
    assert one.official_test is None and one.train.size.sum() + one.test.size.sum() == 8


def test_a_part_has_its_own_rows(tmp_path):
    """A filtered data set is an index into a larger one, until it is saved."""
    made().filter(lambda row: row["label"] == 1).save_to_disk(tmp_path / "ants")
    source = sources.huggingface(tmp_path / "ants", standardize=False)
    np.testing.assert_allclose(source.x, COLORS[LABEL == 1] / 255, rtol=1e-6)
    assert set(source.y) == {1} and source.num_classes == 3


def test_other_columns_are_read_as_those_of_a_table(tmp_path):
    more = {
        "age": np.arange(12) / 2,
        "grid": RNG.random((12, 2, 3)).tolist(),
        "said": ["ab", "b"] * 6,
    }
    whole = made(**more)
    whole = whole.cast_column("grid", datasets.Array2D((2, 3), "float32"))
    whole.save_to_disk(tmp_path / "own")

    def read(**options):
        return sources.huggingface(tmp_path / "own", standardize=False, **options)

    np.testing.assert_allclose(read(features="age").x[:, 0], more["age"])
    np.testing.assert_allclose(read(image="grid").x, more["grid"], rtol=1e-6)
    np.testing.assert_array_equal(read(text="said").x, [[1, 2], [2, 0]] * 6)
    assert read(label="age", image="image").task == "regression"


def test_other_folders_are_refused_in_a_line(animals, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    made().save_to_disk(broken)
    (arrow,) = broken.glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:300])
    datasets.DatasetDict({"a": made(), "b": made()}).save_to_disk(tmp_path / "parts")
    holes = datasets.Dataset.from_dict({"image": [None, None], "label": [0, 1]}).cast_column(
        "image", datasets.Image()
    )
    holes.save_to_disk(tmp_path / "holes")
    cases = [
        (broken, {}, r"file=.*broken: is not a folder that save_to_disk"),
        (tmp_path / "nowhere", {}, r"file=.*nowhere: is not a folder that save_to_disk"),
        (
            tmp_path / "parts",
            {},
            r"file=.*parts: has splits a, b; accepted: train and test, or one split",
        ),
        (tmp_path / "holes", {}, r"file=.*holes: has no image in column image, row 0"),
        (animals, {"label": "lab"}, "label=lab: animals has no such column; did you mean label"),
        (
            animals,
            {"image": "pic"},
            "image=pic: animals has no such column; accepted: image, label, who",
        ),
        (animals, {"size": (3,)}, r"size=3: accepted: rows and columns"),
    ]
    for path, options, said in cases:
        with pytest.raises(ArgumentError, match=f"^{said}") as caught:
            sources.huggingface(path, **options)
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ArgumentError, match=r"^file=.*: needs datasets: pip install 'pfljax\[hf\]'"
    ):
        sources.huggingface(animals)


FRAME = {"a": np.arange(12.0), "label": np.arange(12) % 2, "who": np.arange(12) % 3}


def saved(made, folder):
    made.save_to_disk(folder / "set")
    return folder / "set"


def test_the_index_of_a_frame_is_no_feature(tmp_path):
    frame = pytest.importorskip("pandas").DataFrame(FRAME).sample(frac=1, random_state=0)
    path = saved(datasets.Dataset.from_pandas(frame), tmp_path)
    with pytest.warns(UserWarning, match="__index_level_0__.* is an index"):
        source = sources.huggingface(path, client="who", standardize=False)
    np.testing.assert_array_equal(source.x[:, 0], frame["a"])


def test_classes_keep_the_order_that_a_data_set_gives_them(tmp_path):
    kinds = {"a": datasets.Value("float64"), "label": datasets.ClassLabel(names=["zebra", "ape"])}
    columns = {name: FRAME[name] for name in kinds}
    source = sources.huggingface(
        saved(datasets.Dataset.from_dict(columns, datasets.Features(kinds)), tmp_path)
    )
    assert source.class_names == ("zebra", "ape") and source.y.tolist() == FRAME["label"].tolist()


def test_labels_that_are_unknown_or_missing_are_refused(tmp_path):
    whole = datasets.Dataset.from_dict(FRAME)
    unknown = datasets.DatasetDict(
        train=whole, test=datasets.Dataset.from_dict(FRAME | {"label": [-1] * 12})
    )
    with pytest.raises(ArgumentError, match="label is -1 in row 12"):
        sources.huggingface(saved(unknown, tmp_path), client="who")
    holes = datasets.Dataset.from_dict({"a": [1.0, 2.0, 3.0], "label": ["x", None, "y"]})
    with pytest.raises(ArgumentError, match="has no value in column label, row 1"):
        sources.huggingface(saved(holes, tmp_path / "holes"))


def test_parts_that_are_not_read_are_told(tmp_path):
    whole = datasets.Dataset.from_dict(FRAME)
    path = saved(datasets.DatasetDict(train=whole, validation=whole), tmp_path)
    with pytest.warns(UserWarning, match="has splits that are not read: validation"):
        assert len(sources.huggingface(path, client="who").y) == 12
