"""Data sets of Hugging Face by name: folders and files that `datasets` itself writes, and what is not reached."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from pfljax import data
from pfljax.contract.errors import ArgumentError
from pfljax.data import sources

datasets = pytest.importorskip("datasets")
Image = pytest.importorskip("PIL.Image")
RNG = np.random.default_rng(0)
NUM = 13
COLORS = RNG.integers(256, size=(NUM, 5, 4, 3)).astype(np.uint8)
LABEL = np.arange(NUM) % 3
NAMES = ["zebra", "ant", "cow"]
WHO = np.array(["eve", "ada"])[np.arange(NUM) % 2]
TEXTS = ["good", "bad", "so so"]


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()


def made(rows=slice(None), label="label"):
    """A data set with images and texts."""
    columns = {
        "img": [Image.fromarray(pixels) for pixels in COLORS[rows]],
        label: LABEL[rows].tolist(),
        "who": WHO[rows].tolist(),
        "said": [TEXTS[place] for place in LABEL[rows]],
    }
    whole = datasets.Dataset.from_dict(columns)
    whole = whole.cast_column("img", datasets.Image())
    return whole.cast_column(label, datasets.ClassLabel(names=NAMES))


SPLITS = {"train": slice(0, 8), "test": slice(8, NUM)}


@pytest.fixture
def folder(tmp_path):
    parts = {name: made(rows) for name, rows in SPLITS.items()}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "animals")
    return tmp_path / "animals"


def check(source):
    np.testing.assert_allclose(source.x, COLORS / 255, rtol=1e-6)
    np.testing.assert_array_equal(source.y, LABEL)
    assert source.class_names == tuple(NAMES)
    np.testing.assert_array_equal(source.is_test, np.arange(NUM) >= 8)


def test_a_saved_folder_is_read(folder):
    source = sources.hub(str(folder), client="who", standardize=False)
    check(source)
    np.testing.assert_array_equal(source.client_names[source.client], WHO)
    assert source.name == "animals"


def test_a_folder_of_parquet_files_is_read_with_its_splits(tmp_path):
    for name, rows in SPLITS.items():
        (tmp_path / "data").mkdir(exist_ok=True)
        made(rows).to_parquet(tmp_path / "data" / f"{name}-00000-of-00001.parquet")
    source = sources.hub(str(tmp_path), data_dir=tmp_path / "cache", standardize=False)
    check(source)
    assert any((tmp_path / "cache").rglob("*.arrow"))


def test_a_folder_of_images_is_read_with_its_splits(tmp_path):
    for split, rows in SPLITS.items():
        for number in range(NUM)[rows]:
            place = tmp_path / "photos" / split / NAMES[LABEL[number]]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(COLORS[number]).save(place / f"{number:02}.png")
    source = sources.hub(
        str(tmp_path / "photos"), data_dir=tmp_path / "cache", size=(5, 4), standardize=False
    )
    # Folders are read in the order of their names.
    assert source.class_names == tuple(sorted(NAMES))
    expected = {
        (split == "test", NAMES[LABEL[number]], COLORS[number].tobytes())
        for split, rows in SPLITS.items()
        for number in range(NUM)[rows]
    }
    pixels = np.rint(source.x * 255).astype(np.uint8)
    read = {
        (bool(is_test), source.class_names[label], x.tobytes())
        for is_test, label, x in zip(source.is_test, source.y, pixels, strict=True)
    }
    assert read == expected


@pytest.mark.parametrize("suffix", ["parquet", "json"])
def test_a_file_is_read(tmp_path, suffix):
    rows = datasets.Dataset.from_dict({"label": LABEL.tolist(), "said": [TEXTS[k] for k in LABEL]})
    file = str(tmp_path / f"words.{suffix}")
    getattr(rows, f"to_{suffix}")(file)
    source = sources.hub(file, text="said", data_dir=tmp_path / "cache")
    assert source.tokens and source.is_test is None and source.name == "words"
    np.testing.assert_array_equal(source.y, LABEL)
    letters = sorted(set("".join(TEXTS)))
    for x, label in zip(source.x, LABEL, strict=True):
        assert "".join(letters[token - 1] for token in x if token) == TEXTS[label]


def test_the_only_column_with_names_of_classes_is_the_label(tmp_path):
    made(label="animal").save_to_disk(tmp_path / "one")
    for read in (sources.hub, sources.huggingface):
        np.testing.assert_array_equal(read(str(tmp_path / "one")).y, LABEL)
    two = made(label="fine_label")
    coarse = datasets.ClassLabel(names=["big", "small"])
    two = two.add_column("coarse_label", (LABEL == 1).astype(int).tolist())
    two.cast_column("coarse_label", coarse).save_to_disk(tmp_path / "two")
    with pytest.raises(
        ArgumentError,
        match=r"^label=label: hf:\S*two has no such column; accepted: img, fine_label, who, said, "
        r"coarse_label; fine_label and coarse_label have names of classes",
    ):
        sources.hub(str(tmp_path / "two"))
    assert sources.hub(str(tmp_path / "two"), label="coarse_label").num_classes == 2


def test_a_column_says_when_examples_were_taken(tmp_path):
    days = np.datetime64("2024-02-25", "us") + np.timedelta64(1, "D") * RNG.permutation(NUM)
    made().add_column("day", days.tolist()).save_to_disk(tmp_path / "days")
    for read in (sources.hub, sources.huggingface):
        source = read(str(tmp_path / "days"), time="day")
        np.testing.assert_array_equal(source.time, np.argsort(np.argsort(days)))


def test_another_split_may_be_the_test_split(tmp_path):
    parts = {
        "train": made(slice(0, 8)),
        "validation": made(slice(8, 11)),
        "test": made(slice(11, 13)),
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "three")
    with pytest.warns(
        UserWarning, match="splits that are not read: test; read: train and validation"
    ):
        source = sources.hub(str(tmp_path / "three"), test_split="validation")
    assert source.is_test.tolist() == [False] * 8 + [True] * 3
    with pytest.raises(
        ArgumentError, match=r"^test_split=dev: .*three has train, validation, test"
    ):
        sources.hub(str(tmp_path / "three"), test_split="dev")
    made(slice(0, 8)).save_to_disk(tmp_path / "one")
    with pytest.raises(ArgumentError, match=r"^test_split=dev: .*one has no splits"):
        sources.hub(str(tmp_path / "one"), test_split="dev")


def test_a_federation_is_made_by_name(folder):
    options = {"num_clients": 2, "partition": data.partitions.IID(), "seed": 3}
    clients = data.huggingface(str(folder), **options)
    assert clients.name == "animals, iid" and clients.official_test is False
    assert clients.train.size.sum() + clients.test.size.sum() == NUM
    official = data.huggingface(str(folder), client="who", official_test=True)
    assert official.test.size.sum() == 5 and official.client_names.tolist() == ["ada", "eve"]
    again = data.datasets.made_again(clients.origin)
    assert data.digest(again) == data.digest(clients)


@pytest.mark.slow
def test_the_command_line_has_it(folder, tmp_path):
    flags = [
        "--method=local",
        "--rounds=1",
        "--partition=iid",
        "--num_clients=2",
        "--data_image=img",
    ]
    command = [sys.executable, "-m", "pfljax", "train", f"--dataset=hf:{folder}", *flags]
    out = tmp_path / "run"
    result = subprocess.run([*command, f"--out={out}"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads((out / "summary.json").read_text())["num_clients"] == 2


@pytest.mark.slow
def test_what_is_not_reached_is_named_in_a_line(tmp_path):
    """In a process of its own, since the library reads the variable when it is imported."""
    command = [sys.executable, "-m", "pfljax", "train", "--dataset=hf:nobody/nothing"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [*command, "--method=local", f"--data_dir={tmp_path}", f"--out={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert line.startswith(
        f"error: --dataset=hf:nobody/nothing: is neither a path nor in the cache {tmp_path}, and not "
        "loaded from https://huggingface.co ("
    )
    assert "Traceback" not in result.stderr and not (tmp_path / "run").exists()


def test_what_cannot_be_read_is_refused_in_a_line(folder, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    (arrow, *_) = (folder / "train").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:300])
    for place in ("empty", "torn.parquet", "animals"):
        with pytest.raises(
            ArgumentError, match=rf"^dataset=hf:\S*{place}: cannot be read by datasets \("
        ) as error:
            sources.hub(str(tmp_path / place), data_dir=tmp_path / "cache")
        assert "\n" not in str(error.value)
    for name, message in {"": "name=: accepted", 3: "name=3: accepted"}.items():
        with pytest.raises(ArgumentError, match=f"^{message}"):
            sources.hub(name)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ArgumentError, match=r"^dataset=hf:any: needs datasets: pip install 'pfljax\[hf\]'"
    ):
        sources.hub("any")
