"""Folders of PFLlib and HtFLlib, written as their code writes them: numpy.savez_compressed(file, data=dict)."""

import json
import os
import re

import numpy as np
import pytest

from pfljax import data
from pfljax.contract.errors import ArgumentError
from pfljax.data import sources

SIZES = [(5, 2), (1, 1), (7, 3)]  # training and test examples of unequal clients


def client_examples(rng, size, classes=10):
    """Images as PFLlib scales them, and their labels."""
    x = rng.uniform(-1, 1, (size, 3, 6, 5)).astype(np.float32)
    return {"x": x, "y": rng.integers(classes, size=size)}


def save(folder, split, client, examples):
    (folder / split).mkdir(parents=True, exist_ok=True)
    with open(folder / split / f"{client}.npz", "wb") as file:
        np.savez_compressed(file, data=examples)


def save_config(folder, num_clients, num_classes=10):
    config = {
        "num_clients": num_clients,
        "num_classes": num_classes,
        "non_iid": True,
        "balance": False,
        "partition": "dir",
        "Size of samples for labels in clients": [[[0, 5]]] * num_clients,
        "alpha": 0.1,
        "batch_size": 10,
    }
    (folder / "config.json").write_text(json.dumps(config))


def write(folder, sizes=SIZES):
    """Writes a folder, and returns the examples of each client by split."""
    rng = np.random.default_rng(0)
    examples = []
    for client, (num_train, num_test) in enumerate(sizes):
        splits = {"train": client_examples(rng, num_train), "test": client_examples(rng, num_test)}
        for split, values in splits.items():
            save(folder, split, client, values)
        examples.append(splits)
    save_config(folder, len(sizes))
    return examples


@pytest.mark.parametrize("sizes", [SIZES, [(4, 2)], [(2, 1)] * 11])
def test_clients_have_the_same_examples_and_the_same_test_examples(tmp_path, sizes):
    written = write(tmp_path / "Cifar10", sizes)
    source = sources.pfllib(tmp_path / "Cifar10", standardize=False)
    assert source.num_classes == 10 and source.name == "Cifar10"
    for client, splits in enumerate(written):
        for split, values in splits.items():
            rows = (source.client == client) & (source.is_test == (split == "test"))
            np.testing.assert_array_equal(source.x[rows], np.moveaxis(values["x"], 1, -1))
            np.testing.assert_array_equal(source.y[rows], values["y"])


def test_a_folder_becomes_a_federation_with_its_own_test_examples(tmp_path):
    written = write(tmp_path / "Cifar10")
    assert sources.detect_format(tmp_path / "Cifar10") == "pfllib"
    clients = data.read(tmp_path / "Cifar10", standardize=False)
    assert clients.official_test is True
    assert clients.train.size.tolist() == [5, 1, 7] and clients.test.size.tolist() == [2, 1, 3]
    for client, splits in enumerate(written):
        for split, values in splits.items():
            x, y = clients.examples(client, split)
            np.testing.assert_allclose(np.sum(x), np.sum(values["x"]), rtol=1e-5)
            assert sorted(y.tolist()) == sorted(values["y"].tolist())


def test_labels_that_no_client_has_are_classes(tmp_path):
    write(tmp_path)
    save_config(tmp_path, len(SIZES), num_classes=12)
    assert sources.pfllib(tmp_path).num_classes == 12


@pytest.mark.parametrize(("name", "expected"), [("num_labels", 12), (None, 10)])
def test_configs_of_older_versions_are_read(tmp_path, name, expected):
    """PFLlib called the number of classes num_labels, or did not write it; the files have classes 0 to 9."""
    write(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["num_classes"]
    if name is not None:
        config[name] = 12
    path.write_text(json.dumps(config))
    source = sources.pfllib(tmp_path)
    assert source.num_classes == expected and source.client.max() + 1 == len(SIZES)


def test_lists_and_arrays_of_objects_are_read_as_arrays(tmp_path):
    rng = np.random.default_rng(0)
    values = client_examples(rng, 4)
    objects = np.empty(4, object)
    objects[:] = list(values["x"])
    save(tmp_path, "train", 0, {"x": list(values["x"]), "y": values["y"].tolist()})
    save(tmp_path, "test", 0, {"x": objects, "y": values["y"].astype(float)})
    save_config(tmp_path, 1)
    source = sources.pfllib(tmp_path, standardize=False)
    for rows in (source.is_test, ~source.is_test):
        np.testing.assert_array_equal(source.x[rows], np.moveaxis(values["x"], 1, -1))
        np.testing.assert_array_equal(source.y[rows], values["y"])
    assert source.task == "classification"


def test_tokens_with_their_number_become_tokens(tmp_path):
    """PFLlib's news: an array (n, 2) of objects, whose rows are a list of 200 tokens and 200."""
    tokens = np.random.default_rng(0).integers(32_000, size=(6, 9))
    pairs = np.array([(row.tolist(), len(row)) for row in tokens], dtype=object)
    for split, rows in {"train": slice(0, 4), "test": slice(4, 6)}.items():
        save(tmp_path / "AGNews", split, 0, {"x": pairs[rows], "y": np.arange(6)[rows] % 4})
    save_config(tmp_path / "AGNews", 1, num_classes=4)
    source = sources.pfllib(tmp_path / "AGNews")
    np.testing.assert_array_equal(source.x, tokens)
    assert source.x.dtype == np.int32 and source.standardize == (False,)


def test_shakespeare_has_no_config_and_predicts_the_last_character(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(80, size=(6, 9))
    y = rng.integers(80, size=6)
    for split, rows in {"train": slice(0, 4), "test": slice(4, 6)}.items():
        save(tmp_path / "Shakespeare", split, 0, {"x": x[rows], "y": y[rows]})
    with pytest.warns(UserWarning, match=r"^file: Shakespeare has no config\.json; the numbers"):
        source = sources.pfllib(tmp_path / "Shakespeare")
    np.testing.assert_array_equal(source.x, x)
    np.testing.assert_array_equal(source.y[:, -1], y)
    assert len(np.unique(source.y[:, :-1])) == 1


def test_femnists_files_are_beside_each_other(tmp_path):
    """generate_FEMNIST.py writes train0.npz, since its path of train has no slash at the end."""
    written = write(tmp_path)
    for split in ("train", "test"):
        for client in range(len(SIZES)):
            os.rename(tmp_path / split / f"{client}.npz", tmp_path / f"{split}{client}.npz")
        (tmp_path / split).rmdir()
    source = sources.pfllib(tmp_path, standardize=False)
    np.testing.assert_array_equal(source.y[source.client == 0][:5], written[0]["train"]["y"])
    assert sources.detect_format(tmp_path) == "pfllib"


def test_files_of_an_earlier_division_are_left_out(tmp_path):
    """PFLlib does not delete the files of 20 clients before it writes those of 2."""
    write(tmp_path)
    save_config(tmp_path, 2)
    with pytest.warns(UserWarning, match=r"train/2\.npz is left out, since config\.json says .* 2"):
        assert sources.pfllib(tmp_path).client.max() == 1


class Marks:
    """Pickled as a call that writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_runs_something_is_refused_and_runs_nothing(tmp_path):
    write(tmp_path / "bad")
    mark = tmp_path / "ran"
    save(tmp_path / "bad", "test", 1, {"x": np.zeros((1, 2)), "y": Marks(mark)})
    with pytest.raises(
        ArgumentError,
        match=r"^file=\S*test/1\.npz: is refused, since it has \w+\.mkdir, and not only numbers, ",
    ):
        sources.pfllib(tmp_path / "bad")
    assert not mark.exists()


def changed(change):
    def make(folder):
        write(folder)
        change(folder)

    return make


def without(name):
    return changed(lambda folder: (folder / name).unlink())


def with_examples(examples, split="train", client=1):
    return changed(lambda folder: save(folder, split, client, examples))


def with_config(text):
    return changed(lambda folder: (folder / "config.json").write_text(text))


ONE = np.zeros((1, 3, 6, 5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (without("test/2.npz"), r"test/2\.npz: is missing; accepted: the files of all 3 clients"),
        (without("train/1.npz"), r"train/1\.npz: is missing; accepted: the files of all 3 clients"),
        (without("train/0.npz"), r"train/0\.npz: is missing"),
        (with_config("{"), r"config\.json: is not a config\.json of PFLlib, with num_clients"),
        (with_config("[]"), r"config\.json: is not a config\.json of PFLlib"),
        (with_config('{"num_classes": 3}'), r"config\.json: is not a config\.json of PFLlib"),
        (
            with_config('{"num_clients": 4, "num_classes": 10}'),
            r"train/3\.npz: is missing; accepted: the files of all 4 clients",
        ),
        (
            with_config('{"num_clients": 3, "num_classes": 2}'),
            r"config\.json: says that there are 2 classes, but a label is \d",
        ),
        (
            with_config('{"num_clients": 0, "num_classes": 2}'),
            r"config\.json: says that there are 0 clients; accepted: 1 or more",
        ),
        (with_examples({"x": ONE}), r"train/1\.npz: has x; accepted: a dict with x and y"),
        (with_examples({}), r"train/1\.npz: has nothing; accepted: a dict with x and y"),
        (with_examples([1, 2]), r"train/1\.npz: is not an npz of a pickled dict of arrays"),
        (with_examples({"x": ONE, "y": [1, 2]}), r"train/1\.npz: has x float64 \(1, 3, 6, 5\) and"),
        (with_examples({"x": ONE, "y": ["a"]}), r"train/1\.npz: has x float64 .* and y <U1 \(1,\)"),
        (with_examples({"x": ONE, "y": 1}), r"train/1\.npz: has x .* and y int64 \(\)"),
        (with_examples({"x": None, "y": [1]}), r"train/1\.npz: has an x or y that is no array"),
        (
            with_examples({"x": [[1.0], [1.0, 2.0]], "y": [1, 2]}),
            r"train/1\.npz: has an x or y that is no array of numbers",
        ),
        (
            with_examples({"x": np.zeros((1, 3)), "y": [1]}),
            r": has examples of several shapes, such as \(3,\) and \(3, 6, 5\)",
        ),
        (
            changed(lambda folder: (folder / "test" / "0.npz").write_bytes(b"PK")),
            r"test/0\.npz: is not an npz of a pickled dict of arrays",
        ),
        (
            changed(lambda folder: np.savez(folder / "test" / "0.npz", x=ONE, y=[1])),
            r"test/0\.npz: lacks data; accepted: an npz with data, found x, y",
        ),
        (
            changed(lambda folder: np.savez(folder / "test" / "0.npz", data=ONE)),
            r"test/0\.npz: is not an npz of a pickled dict of arrays",
        ),
    ],
)
def test_other_folders_are_refused_in_a_line(make, message, tmp_path):
    make(tmp_path / "bad")
    with pytest.raises(ArgumentError, match=rf"^file=\S*{message}") as error:
        sources.pfllib(tmp_path / "bad")
    assert "\n" not in str(error.value)


def test_a_folder_without_clients_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "notes.npz").touch()
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(
            ArgumentError,
            match=rf"^file={re.escape(str(folder))}: has no train/0\.npz; accepted: a",
        ):
            sources.pfllib(folder)


def test_a_gap_is_missed_without_a_config(tmp_path):
    write(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "train" / "1.npz").unlink()
    with (
        pytest.warns(UserWarning, match="has no config"),
        pytest.raises(ArgumentError, match=r"train/1\.npz: is missing"),
    ):
        sources.pfllib(tmp_path)
