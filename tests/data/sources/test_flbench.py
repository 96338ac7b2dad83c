"""Folders of FL-bench: partition.pkl, and the examples as generate_data.py or torchvision wrote them."""

import os
import pickle
import struct

import numpy as np
import pytest

from pfljax import data
from pfljax.contract.errors import ArgumentError
from pfljax.data import sources

RNG = np.random.default_rng(0)
NUM = 23
ORDER = RNG.permutation(NUM)
# Unequal clients, which do not have all examples
CLIENTS = [
    {"train": ORDER[:9], "val": ORDER[9:11], "test": ORDER[11:14]},
    {"train": ORDER[14:15].tolist(), "val": [], "test": ORDER[15:16].astype(np.int32)},
    {"train": ORDER[16:19], "val": np.array([], np.int64), "test": ORDER[19:22]},
]
LABELS = np.arange(NUM) % 4


def write_partition(folder, clients=CLIENTS):
    folder.mkdir(parents=True, exist_ok=True)
    everyone = list(range(len(clients)))
    separation = {"train": everyone, "val": everyone, "test": everyone, "total": len(clients)}
    content = {"separation": separation, "data_indices": clients}
    (folder / "partition.pkl").write_bytes(pickle.dumps(content))


def write_arrays(folder, x, y=LABELS):
    np.save(folder / "data", x)
    np.save(folder / "targets", y)


def check(folder, x, clients=CLIENTS, **options):
    with pytest.warns(UserWarning, match="examples for validation in .* as training examples"):
        source = sources.flbench(folder, standardize=False, **options)
    start = 0
    for client, splits in enumerate(clients):
        ids = np.concatenate([np.asarray(splits[name], int) for name in ("train", "val", "test")])
        rows = slice(start, start + len(ids))
        np.testing.assert_allclose(source.x[rows], x[ids], rtol=1e-6)
        np.testing.assert_array_equal(source.y[rows], LABELS[ids])
        assert set(source.client[rows]) == {client}
        assert source.is_test[rows].sum() == len(splits["test"])
        start += len(ids)
    assert start == len(source.y)


def test_synthetic_data_are_read_with_their_clients(tmp_path):
    x = RNG.normal(size=(NUM, 6))
    write_partition(tmp_path)
    write_arrays(tmp_path, x)
    check(tmp_path, x)


def test_a_folder_becomes_a_federation(tmp_path):
    write_partition(tmp_path, CLIENTS[1:])
    write_arrays(tmp_path, RNG.normal(size=(NUM, 6)))
    assert sources.detect_format(tmp_path) == "flbench"
    clients = data.read(tmp_path)
    assert clients.official_test is True
    assert clients.train.size.tolist() == [1, 3] and clients.test.size.tolist() == [1, 3]


def test_femnist_gets_its_shape(tmp_path):
    x = RNG.random(size=(NUM, 12))
    write_partition(tmp_path)
    write_arrays(tmp_path, x)
    check(tmp_path, x.reshape(NUM, 3, 4, 1), shape=(3, 4, 1))


def test_medmnist_is_in_raw(tmp_path):
    x = RNG.integers(256, size=(NUM, 5, 5), dtype=np.uint8)
    write_partition(tmp_path)
    (tmp_path / "raw").mkdir()
    np.save(tmp_path / "raw" / "xdata", x)
    np.save(tmp_path / "raw" / "ydata", LABELS[:, None])
    check(tmp_path, x[..., None] / 255)


def test_mnist_is_in_torchvisions_files(tmp_path):
    x = RNG.integers(256, size=(NUM, 5, 4), dtype=np.uint8)
    write_partition(tmp_path)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, rows in {"train": slice(0, 15), "t10k": slice(15, NUM)}.items():
        images = x[rows]
        header = struct.pack(">HBB3I", 0, 8, 3, *images.shape)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels = LABELS[rows].astype(np.uint8)
        header = struct.pack(">HBBI", 0, 8, 1, len(labels))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
    check(tmp_path, x[..., None] / 255)


def test_cifar_is_in_pickled_batches(tmp_path):
    x = RNG.integers(256, size=(NUM, 3, 32, 32), dtype=np.uint8)
    write_partition(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    for name, rows in zip(names, np.array_split(np.arange(NUM), 6), strict=True):
        batch = {"data": x[rows].reshape(len(rows), -1), "labels": LABELS[rows].tolist()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=3))
    check(tmp_path, x.transpose(0, 2, 3, 1) / 255)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ('{"super_class": true}', "coarse_labels"),
        ('{"super_class": false}', "fine_labels"),
        (None, "fine_labels"),
    ],
)
def test_superclasses_of_cifar100_are_the_labels_if_they_were_divided(tmp_path, content, name):
    write_partition(tmp_path, CLIENTS[1:])
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    labels = {"fine_labels": np.arange(NUM), "coarse_labels": np.arange(NUM) // 5}
    for split, rows in {"train": np.arange(20), "test": np.arange(20, NUM)}.items():
        batch = {key: values[rows].tolist() for key, values in labels.items()}
        batch["data"] = np.zeros((len(rows), 3072), np.uint8)
        (folder / split).write_bytes(pickle.dumps(batch))
    if content is not None:
        (tmp_path / "args.json").write_text(content)
    source = sources.flbench(tmp_path)
    ids = np.concatenate([np.asarray(splits[key], int) for splits in CLIENTS[1:] for key in splits])
    np.testing.assert_array_equal(source.y, labels[name][ids])


def test_partitions_without_validation_are_read(tmp_path):
    """FL-bench's partitions of FEMNIST and CelebA had none."""
    clients = []
    for splits in CLIENTS[1:]:
        clients.append({"train": splits["train"], "test": splits["test"]})
    write_partition(tmp_path, clients)
    write_arrays(tmp_path, RNG.normal(size=(NUM, 6)))
    source = sources.flbench(tmp_path)
    ids = np.concatenate([np.asarray(splits[key], int) for splits in clients for key in splits])
    np.testing.assert_array_equal(source.y, LABELS[ids])
    assert source.is_test.tolist() == [False, True, False, False, False, True, True, True]


class Marks:
    """Pickled as a call that writes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_partition_that_runs_something_is_refused_and_runs_nothing(tmp_path):
    mark = tmp_path / "ran"
    write_partition(tmp_path, [{"train": [0], "val": [], "test": Marks(mark)}])
    write_arrays(tmp_path, np.ones((NUM, 2)))
    with pytest.raises(
        ArgumentError, match=r"^file=\S*partition\.pkl: is refused, since it has \w+"
    ):
        sources.flbench(tmp_path)
    assert not mark.exists()


BY_USER = [{"train": [0, 1], "val": [], "test": []}, {"train": [], "val": [], "test": [2, 3]}]


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (BY_USER, r"partition\.pkl: has no client with training and test examples; accepted: the"),
        ([{"train": [0], "val": []}], r"partition\.pkl: is no partition of FL-bench, with data_"),
        (
            [{"train": [0, -1], "val": [], "test": [1]}],
            r"partition\.pkl: has example -1, but bad has 23 examples",
        ),
        ([], r"partition\.pkl: is no partition of FL-bench"),
        (None, r"partition\.pkl: is no partition of FL-bench"),
        (
            [{"train": ["a"], "val": [], "test": [1]}],
            r"partition\.pkl: is no partition of FL-bench",
        ),
        (
            [{"train": [0, NUM], "val": [], "test": [1]}],
            r"partition\.pkl: has example 23, but bad has 23 examples",
        ),
    ],
)
def test_other_partitions_are_refused_in_a_line(clients, message, tmp_path):
    folder = tmp_path / "bad"
    write_partition(folder, clients or [])
    if clients is None:
        (folder / "partition.pkl").write_bytes(pickle.dumps([1, 2]))
    write_arrays(folder, np.ones((NUM, 2)))
    with pytest.raises(ArgumentError, match=rf"^file=\S*{message}"):
        sources.flbench(folder)


def test_missing_and_damaged_files_are_refused_in_a_line(tmp_path):
    with pytest.raises(ArgumentError, match=r"partition\.pkl: cannot be read \(No such file"):
        sources.flbench(tmp_path)
    write_partition(tmp_path, CLIENTS[1:])
    with pytest.raises(ArgumentError, match=r": has no examples; accepted: data\.npy and targets"):
        sources.flbench(tmp_path)
    np.save(tmp_path / "data", np.ones((NUM, 2)))
    with pytest.raises(ArgumentError, match=r"targets\.npy: cannot be read"):
        sources.flbench(tmp_path)
    write_arrays(tmp_path, np.ones((2, 2)))
    with pytest.raises(ArgumentError, match=r": has 2 x but 23 y; accepted: as many"):
        sources.flbench(tmp_path)
    (tmp_path / "partition.pkl").write_bytes(b"\x80\x04")
    with pytest.raises(ArgumentError, match=r"partition\.pkl: is not a pickle, or is damaged"):
        sources.flbench(tmp_path)
