"""Federated data sets of TensorFlow Federated (HDF5 or SQLite) and of FedJAX (SQLite)."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.reading import opened
from pfljax.data.sources import hdf5, sqlite
from pfljax.data.sources.arrays import TaskName
from pfljax.data.sources.files import SPLITS, Shape, damaged, shaped, source_from_file
from pfljax.data.sources.plays import Stride, halves, next_characters
from pfljax.data.sources.source import Fraction, Source
from pfljax.settings.fields import Seed, checked, hyperparameter

TFF = "a file with a federated data set of TensorFlow Federated or FedJAX"
READERS = {b"\x89HDF": hdf5.clients, b"SQLi": sqlite.clients}  # by a file's first bytes
PIXELS = ("pixels", "image")
OTHERS = ("x",)
LABELS = ("label", "y")
COARSE = "coarse_label"
SNIPPETS = "snippets"  # the array of a client's texts
# Shapes of EMNIST and CIFAR-100, which SQLite files store as lists
SHAPES = {28 * 28: (28, 28, 1), 32 * 32 * 3: (32, 32, 3)}
ACCEPTED = f"{', '.join(PIXELS)} or x, and label or y; or {SNIPPETS}"


class Client(NamedTuple):
    """A client's examples in one file.

    Attributes:
        is_test: Whether they are for testing.
        name: The client.
        arrays: Its arrays by their names in the file.
    """

    is_test: bool
    name: str
    arrays: Mapping[str, np.ndarray]


@checked()
def tff(
    file: Annotated[str | pathlib.Path, hyperparameter(accepted=TFF, help=TFF)],
    *,
    shape: Shape = (),
    stride: Stride = 1,
    seed: Seed = 0,
    fraction: Fraction = 1.0,
    standardize: bool = True,
    task: TaskName = "auto",
) -> Source:
    """Reads a data set such as EMNIST, CIFAR-100 or Shakespeare, with its clients. The first bytes say the format.

    Where a client has snippets of text, the model predicts the next character, as in `text`.

    The other arguments are those of `npz`.

    Args:
        file: Path of the file. If it ends in _train or _test, the file of the other split in its folder is read, too.
        shape: Shape of an example that the file stores as a list of numbers; empty: the file's, or that of EMNIST or
            CIFAR-100 for as many pixels as these have. Gray images (rows, columns) get an axis for their channel.
        stride: Number of characters between the starts of consecutive windows of text.

    Raises:
        ArgumentError: if a file or shape is not accepted.

    Examples:
        >>> import h5py
        >>> import numpy as np
        >>> from pfljax.data import sources
        >>> with h5py.File("emnist_train.h5", "w") as file:
        ...     for client in ("f0001", "f0002"):
        ...         file[f"examples/{client}/pixels"] = np.ones((3, 28, 28), np.float32)
        ...         file[f"examples/{client}/label"] = np.arange(3)
        >>> source = sources.tff("emnist_train.h5")
        >>> source.x.shape, source.client_names.tolist()
        ((6, 28, 28, 1), ['f0001', 'f0002'])
    """
    clients: list[Client] = []
    for split, path in _files(pathlib.Path(file)).items():
        with opened(str(path)) as stream:
            reader = READERS.get(stream.read(4))
        if reader is None:
            raise ArgumentError("file", f"is neither HDF5 nor SQLite; accepted: {TFF}", str(path))
        for split_in_file, name, arrays in reader(str(path)):
            is_test = (split_in_file or split) == SPLITS[1]
            clients.append(Client(is_test, name, arrays))
    file = str(file)
    first = clients[0].arrays if clients else {}
    x = next((name for name in (*PIXELS, *OTHERS, SNIPPETS) if name in first), None)
    y = next((name for name in LABELS if name in first), None)
    if x == SNIPPETS:
        roles = _roles(clients)
        return next_characters(roles, file, stride=stride, seed=seed, fraction=fraction)
    if x is None or y is None:
        text = f"has {', '.join(first) or 'nothing'} of clients; accepted: {ACCEPTED}"
        raise ArgumentError("file", text, file)
    arrays = _arrays(clients, file, x, y, shape)
    return source_from_file(
        arrays, file, seed=seed, fraction=fraction, task=task, standardize=standardize
    )


def _arrays(
    clients: Sequence[Client], file: str, x_name: str, y_name: str, shape: Sequence[int]
) -> dict[str, np.ndarray]:
    """The arrays of `make_source` from the clients' arrays x and y."""
    names = {"x": x_name, "y": y_name}
    if COARSE in clients[0].arrays:
        names["coarse"] = COARSE
    arrays = {}
    # Some clients may lack an array, or have one of another shape.
    with damaged(file, "has clients with different arrays ({error})", (KeyError, ValueError)):
        for name, name_in_file in names.items():
            arrays[name] = np.concatenate([client.arrays[name_in_file] for client in clients])
        sizes = [len(client.arrays[x_name]) for client in clients]
    arrays["x"] = _inputs(arrays["x"], x_name, shape)
    arrays["client"] = np.repeat([client.name for client in clients], sizes)
    is_test = np.repeat([client.is_test for client in clients], sizes)
    if is_test.any():
        arrays["is_test"] = is_test
    return arrays


def _inputs(x: np.ndarray, name: str, shape: Sequence[int]) -> np.ndarray:
    """Examples (n, *features) in their shape; whole numbers from 0 to 255 that are called pixels become uint8."""
    if name not in PIXELS:
        return shaped(x, shape)
    if x.dtype.kind in "iu" and 0 <= x.min() <= x.max() <= 255:
        x = x.astype(np.uint8)
    if shape:
        return shaped(x, shape)
    if x.ndim == 2:
        return shaped(x, SHAPES.get(x.shape[-1], ()))
    # Gray images get an axis for their channel.
    return x[..., None] if x.ndim == 3 else x


def has_test_split(path: pathlib.Path) -> bool:
    """Whether there are official test examples, in the file or in the other one of its folder."""
    return len(_files(path)) > 1 or sqlite.has_test_split(str(path))


def _files(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """The files of the splits; one file may contain both."""
    stem, _, split = path.stem.rpartition("_")
    if split not in SPLITS:
        return {"": path}
    files = {}
    for name in SPLITS:
        file = path.with_name(f"{stem}_{name}{path.suffix}")
        if name == SPLITS[0] or file.exists():
            files[name] = file
    return files


def _roles(clients: Sequence[Client]) -> dict[str, tuple[str, str]]:
    """The training and test text of each client, whose lines are divided if there are no test examples."""
    train_lines: dict[str, list[str]] = {}
    test_lines: dict[str, list[str]] = {}
    for client in clients:
        # A client may be in both files.
        train_lines.setdefault(client.name, [])
        test_lines.setdefault(client.name, [])
        lines = test_lines if client.is_test else train_lines
        for text in client.arrays[SNIPPETS]:
            if isinstance(text, bytes):
                text = text.decode("utf-8", "replace")
            lines[client.name] += text.split("\n")
    if not any(client.is_test for client in clients):
        return {name: halves(lines) for name, lines in train_lines.items()}
    return {
        name: ("\n".join(lines), "\n".join(test_lines[name])) for name, lines in train_lines.items()
    }
