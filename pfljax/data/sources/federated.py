"""Federated data sets of TensorFlow Federated (HDF5 or SQLite) and of FedJAX (SQLite)."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.reading import opened
from pfljax.data.sources import hdf5, sqlite
from pfljax.data.sources.arrays import TaskName
from pfljax.data.sources.files import PARTS, Shape, damaged, of_file, shaped
from pfljax.data.sources.plays import Stride, halves, next_characters
from pfljax.data.sources.source import Fraction, Source
from pfljax.settings.fields import Seed, checked, hyperparameter

TFF = "a file with a federated data set of TensorFlow Federated or FedJAX"
READERS = {b"\x89HDF": hdf5.clients, b"SQLi": sqlite.clients}  # by a file's first bytes
PIXELS = ("pixels", "image")
OTHERS = ("x",)
LABELS = ("label", "y")
COARSE = "coarse_label"
SPOKEN = "snippets"
# of EMNIST and CIFAR-100, which SQLite files store as lists
SHAPES = {28 * 28: (28, 28, 1), 32 * 32 * 3: (32, 32, 3)}
# whether they are for testing; the client; its arrays
Clients = list[tuple[bool, str, Mapping[str, np.ndarray]]]
ACCEPTED = f"{', '.join(PIXELS)} or x, and label or y; or {SPOKEN}"


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
        file: Path of the file. If it ends in _train or _test, the file of the other part is read from beside it.
        shape: Shape of an example that the file stores as a list of numbers; empty: the file's, or that of EMNIST or
            CIFAR-100 for as many pixels as these have. Gray images (rows, columns) get an axis for their channel.
        stride: Number of characters between the starts of consecutive windows of text.

    Raises:
        ArgumentError: if a file or shape is not accepted.
    """
    found: Clients = []
    for part, path in _files(pathlib.Path(file)).items():
        with opened(str(path)) as stream:
            read = READERS.get(stream.read(4))
        if read is None:
            raise ArgumentError("file", f"is neither HDF5 nor SQLite; accepted: {TFF}", str(path))
        for own, client, arrays in read(str(path)):
            found.append(((own or part) == PARTS[1], client, arrays))
    file = str(file)
    first = found[0][2] if found else {}
    x = next((name for name in (*PIXELS, *OTHERS, SPOKEN) if name in first), None)
    y = next((name for name in LABELS if name in first), None)
    if x is None or (y is None and x != SPOKEN):
        raise ArgumentError(
            "file", f"has {', '.join(first) or 'nothing'} of clients; accepted: {ACCEPTED}", file
        )
    if x == SPOKEN:
        return next_characters(_roles(found), file, stride=stride, seed=seed, fraction=fraction)
    options: Any = {"task": task, "standardize": standardize}
    return of_file(
        _arrays(found, file, x, str(y), shape), file, seed=seed, fraction=fraction, **options
    )


def _arrays(
    found: Clients, file: str, x: str, y: str, shape: Sequence[int]
) -> dict[str, np.ndarray]:
    """The arrays of `make_source` from the clients' arrays x and y."""
    wanted = {"x": x, "y": y, **({"coarse": COARSE} if COARSE in found[0][2] else {})}
    # One that only the first client has, or of another shape.
    with damaged(file, "has clients with different arrays ({error})", (KeyError, ValueError)):
        arrays = {
            name: np.concatenate([values[key] for _, _, values in found])
            for name, key in wanted.items()
        }
        sizes = [len(values[x]) for _, _, values in found]
    if (
        x in PIXELS
        and arrays["x"].dtype.kind in "iu"
        and 0 <= arrays["x"].min() <= arrays["x"].max() <= 255
    ):
        arrays["x"] = arrays["x"].astype(np.uint8)
    flat = SHAPES.get(arrays["x"].shape[-1], ()) if x in PIXELS and arrays["x"].ndim == 2 else ()
    tests = np.repeat([row[0] for row in found], sizes)
    names = np.repeat([row[1] for row in found], sizes)
    arrays |= {"x": shaped(arrays["x"], shape or flat), "client": names}
    if x in PIXELS and not shape and arrays["x"].ndim == 3:
        arrays["x"] = arrays["x"][..., None]  # gray images
    return arrays | ({"is_test": tests} if tests.any() else {})


def has_test_part(path: pathlib.Path) -> bool:
    """Whether there is an official test part, in the file or beside it."""
    return len(_files(path)) > 1 or sqlite.has_test_part(str(path))


def _files(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """The files of the parts; one file may contain both."""
    stem, _, part = path.stem.rpartition("_")
    if part not in PARTS:
        return {"": path}
    both = {part: path.with_name(f"{stem}_{part}{path.suffix}") for part in PARTS}
    return {other: place for other, place in both.items() if other == PARTS[0] or place.exists()}


def _roles(found: Clients) -> dict[str, tuple[str, str]]:
    """The training and test text of each client, whose lines are divided if there is no test part."""
    lines: dict[str, dict[bool, list[str]]] = {}
    for test, client, arrays in found:
        texts = [
            text.decode("utf-8", "replace") if isinstance(text, bytes) else text
            for text in arrays[SPOKEN]
        ]
        lines.setdefault(client, {False: [], True: []})[test] += [
            line for text in texts for line in text.split("\n")
        ]
    if any(test for test, _, _ in found):
        return {
            client: ("\n".join(own[False]), "\n".join(own[True])) for client, own in lines.items()
        }
    return {client: halves(own[False]) for client, own in lines.items()}
