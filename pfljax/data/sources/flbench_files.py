"""Data sets that FL-bench (Tan et al.) has divided among clients: partition.pkl has the examples of each."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from pfljax.contract.errors import ArgumentError, warn
from pfljax.contract.reading import opened, read_npy, read_pickle, read_text
from pfljax.data.sources.arrays import TaskName
from pfljax.data.sources.files import Shape, damaged, shaped, source_from_file
from pfljax.data.sources.source import Fraction, Source
from pfljax.settings.fields import Seed, checked, hyperparameter

FLBENCH = "a folder of FL-bench with partition.pkl"
PARTITION = "partition.pkl"
SPLITS = ("train", "val", "test")
PAIRS = (("data.npy", "targets.npy"), ("raw/xdata.npy", "raw/ydata.npy"))  # of x and y
ARGS = "args.json"  # the arguments of generate_data.py
CIFAR = {  # folder -> its files, and the names of the labels and of the superclasses in them
    "cifar-10-batches-py": (
        [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"],
        "labels",
        "labels",
    ),
    "cifar-100-python": (["train", "test"], "fine_labels", "coarse_labels"),
}
HAS = (
    "data.npy and targets.npy, raw/xdata.npy and raw/ydata.npy, or torchvision's files of MNIST, FashionMNIST, "
    "CIFAR-10 or CIFAR-100"
)


@checked()
def flbench(
    file: Annotated[str | pathlib.Path, hyperparameter(accepted=FLBENCH, help=FLBENCH)],
    *,
    shape: Shape = (),
    seed: Seed = 0,
    fraction: Fraction = 1.0,
    standardize: bool = True,
    task: TaskName = "auto",
) -> Source:
    """Reads what FL-bench's generate_data.py wrote: the same clients, each with the same training and test examples.

    Examples for validation become training examples; `validation_fraction` gives each client some of its own. The
    examples are in data.npy and targets.npy, in raw/xdata.npy and raw/ydata.npy, or in torchvision's files of MNIST,
    FashionMNIST, CIFAR-10 or CIFAR-100, whose training examples FL-bench counts before the test examples. If args.json
    says super_class, the labels of CIFAR-100 are its superclasses. Pickles are read as those of `pfllib`.

    The other arguments are those of `npz`.

    Args:
        file: Folder with partition.pkl, such as data/cifar10.
        shape: Shape of an example that the files store as a list of numbers, such as 28,28,1; empty: the list's.

    Raises:
        ArgumentError: if a file is missing or not accepted, or if clients are divided by user.

    Examples:
        >>> import pathlib, pickle
        >>> import numpy as np
        >>> from pfljax.data import sources
        >>> pathlib.Path("synthetic").mkdir()
        >>> np.save("synthetic/data.npy", np.ones((6, 4)))
        >>> np.save("synthetic/targets.npy", np.array([0, 1, 0, 1, 0, 1]))
        >>> clients = [{"train": [0, 2], "val": [], "test": [1]}, {"train": [3, 4], "val": [], "test": [5]}]
        >>> partition = {"separation": {"total": 2}, "data_indices": clients}
        >>> _ = pathlib.Path("synthetic/partition.pkl").write_bytes(pickle.dumps(partition))
        >>> source = sources.flbench("synthetic")
        >>> source.client.tolist(), source.is_test.tolist()
        ([0, 0, 0, 1, 1, 1], [False, False, True, False, False, True])
    """
    folder = pathlib.Path(file)
    rows, client, split = _assigned(folder / PARTITION)
    x, y = _examples(folder)
    if len(x) != len(y):
        raise ArgumentError("file", f"has {len(x)} x but {len(y)} y; accepted: as many", str(file))
    outside = rows[(rows < 0) | (rows >= len(y))]
    if len(outside):
        text = f"has example {outside[0]}, but {folder.name} has {len(y)} examples, counted from 0"
        raise ArgumentError("file", text, str(folder / PARTITION))
    if (split == SPLITS.index("val")).any():
        text = f"the examples for validation in {folder.name} are read as training examples"
        hint = "validation_fraction gives each client validation examples of its own"
        warn("file", f"{text}; {hint}")
    # Gray images (rows, columns) get an axis for their channel.
    x = x[..., None] if x.ndim == 3 else shaped(x, shape)
    arrays = {
        "x": x[rows],
        "y": y[rows],
        "client": client,
        "is_test": split == SPLITS.index("test"),
    }
    num_classes = int(y.max()) + 1 if y.dtype.kind in "iu" else None
    return source_from_file(
        arrays,
        str(file),
        seed=seed,
        fraction=fraction,
        num_classes=num_classes,
        standardize=standardize,
        task=task,
    )


def fits(path: pathlib.Path) -> bool:
    """Whether a folder has a partition."""
    return (path / PARTITION).is_file()


def _assigned(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The examples (n,) in a partition, the client of each and the split of each, a place in `SPLITS`."""
    partition = read_pickle(str(path))
    text = "is no partition of FL-bench, with data_indices of train, val and test ({kind}: {error})"
    with damaged(str(path), text):
        parts = []
        for client, indices in enumerate(partition["data_indices"]):
            for split, name in enumerate(SPLITS):
                rows = np.asarray(_rows_of(indices, name)).astype(np.int64)
                parts.append((rows, np.full(len(rows), client), np.full(len(rows), split)))
        rows, client, split = map(np.concatenate, zip(*parts, strict=True))
    test_clients = set(client[split == SPLITS.index("test")].tolist())
    train_clients = set(client[split != SPLITS.index("test")].tolist())
    if not train_clients & test_clients:
        text = "has no client with training and test examples"
        raise ArgumentError(
            "file", f"{text}; accepted: the split sample of generate_data.py", str(path)
        )
    return rows, client, split


def _rows_of(indices: Any, split: str) -> Any:
    """A client's examples in a split. Partitions that FL-bench wrote before it had validation lack "val"."""
    return indices.get(split, []) if split == "val" else indices[split]


def _has_superclasses(folder: pathlib.Path) -> bool:
    """Whether FL-bench divided the superclasses of CIFAR-100."""
    path = folder / ARGS
    if not path.is_file():
        return False
    with damaged(str(path), f"is not an {ARGS} of FL-bench ({{kind}}: {{error}})"):
        return bool(json.loads(read_text(str(path))).get("super_class", False))


def _examples(folder: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """All examples x (n, *features) and y (n,), in FL-bench's order."""
    for x_name, y_name in PAIRS:
        if (folder / x_name).is_file():
            x = read_npy(str(folder / x_name))
            y = read_npy(str(folder / y_name))
            # raw/ydata.npy may be (n, 1).
            return x, y.reshape(-1)
    for name, (files, classes, superclasses) in CIFAR.items():
        if (folder / name).is_dir():
            labels = superclasses if _has_superclasses(folder) else classes
            return _concatenated([folder / name / file for file in files], labels)
    for name in ("MNIST", "FashionMNIST"):
        raw = folder / name / "raw"
        if raw.is_dir():
            prefixes = ("train", "t10k")
            x = [_idx(raw / f"{prefix}-images-idx3-ubyte") for prefix in prefixes]
            y = [_idx(raw / f"{prefix}-labels-idx1-ubyte") for prefix in prefixes]
            return np.concatenate(x), np.concatenate(y).astype(np.int64)
    raise ArgumentError("file", f"has no examples; accepted: {HAS}", str(folder))


def _concatenated(paths: Sequence[pathlib.Path], labels: str) -> tuple[np.ndarray, np.ndarray]:
    """The examples in CIFAR's pickled batches: uint8 x (n, 32, 32, 3) and y (n,)."""
    inputs = []
    targets = []
    for path in paths:
        batch = read_pickle(str(path), encoding="latin1")
        with damaged(str(path), "is no batch of CIFAR ({kind}: {error})"):
            inputs.append(batch["data"].reshape(-1, 3, 32, 32))
            targets.append(np.asarray(batch[labels], np.int64))
    return np.concatenate(inputs).transpose(0, 2, 3, 1), np.concatenate(targets)


def _idx(path: pathlib.Path) -> np.ndarray:
    """The uint8 array in a file of MNIST's format."""
    file = str(path)
    with opened(file) as stream:
        content = stream.read()
    with damaged(file, "is no file of MNIST's format ({kind}: {error})"):
        num_axes = content[3]
        start = 4 + 4 * num_axes
        shape = np.frombuffer(content[4:start], ">u4").astype(int)
        return np.frombuffer(content[start:], np.uint8).reshape(shape)
