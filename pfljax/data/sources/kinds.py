"""The kinds of files that hold users' own data, and which of them a path is."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from pfljax.contract.errors import ArgumentError
from pfljax.contract.paths import expanded
from pfljax.contract.reading import names_of
from pfljax.data.sources import federated, folders, leaf_files, records, saved
from pfljax.data.sources.files import NPY, npy, npz
from pfljax.data.sources.leaf_files import LEAF, leaf
from pfljax.data.sources.plays import text
from pfljax.data.sources.source import Source
from pfljax.data.sources.tables import table
from pfljax.settings.fields import fields_of


class Kind(NamedTuple):
    """A kind of file or folder."""

    read: Callable[..., Source]
    looks: str  # what a path of this kind looks like, in words
    fits: Callable[[pathlib.Path], bool]  # whether a path looks like it
    # Whether the file at a path has official test examples, apart from those that a column marks
    tested: Callable[[pathlib.Path], bool] = lambda path: False


def _ends(*suffixes: str) -> Callable[[pathlib.Path], bool]:
    return lambda path: path.suffix.lower() in suffixes


def _is_csv(path: pathlib.Path) -> bool:
    name = path.with_suffix("") if path.suffix.lower() in (".gz", ".bz2", ".xz") else path
    return name.suffix.lower() in (".csv", ".tsv")


KINDS = {  # the first that a path looks like is what it is
    "npz": Kind(npz, "a .npz file", _ends(".npz"), lambda path: "is_test" in names_of(str(path))),
    "text": Kind(text, "a .txt file", _ends(".txt"), lambda path: True),
    "csv": Kind(table, "a .csv or .tsv file, which may be compressed", _is_csv),
    "parquet": Kind(table, "a .parquet file", _ends(".parquet", ".pq")),
    "arrayrecord": Kind(records.arrayrecord, records.RECORDS, records.fits, records.has_test_part),
    "huggingface": Kind(saved.huggingface, saved.SAVED, saved.fits, saved.has_test_part),
    "leaf": Kind(
        leaf, LEAF, lambda path: bool(leaf_files.paths(path, "train")), leaf_files.has_test_part
    ),
    "hdf5": Kind(federated.tff, "a .h5 file", _ends(".h5", ".hdf5"), federated.has_test_part),
    "sqlite": Kind(
        federated.tff, "a .sqlite file", _ends(".sqlite", ".db"), federated.has_test_part
    ),
    "npy": Kind(
        npy,
        NPY,
        lambda path: (path / "x.npy").is_file(),
        lambda path: (path / "is_test.npy").is_file(),
    ),
    "images": Kind(folders.images, folders.IMAGES, pathlib.Path.is_dir, folders.has_test_part),
}


def kind_of(file: str | pathlib.Path) -> str:
    """The kind of a file or folder, by its path. Raises `ArgumentError` if it is of no kind."""
    if not isinstance(file, str | os.PathLike):
        raise ArgumentError("file", "accepted: a path", type(file).__name__)
    path = pathlib.Path(expanded(file))
    found = None
    with contextlib.suppress(OSError, ValueError):  # ValueError: the path contains a null byte
        found = next((name for name, kind in KINDS.items() if kind.fits(path)), None)
    if found is None:
        looks = ", ".join(dict.fromkeys(kind.looks for kind in KINDS.values()))
        raise ArgumentError("file", f"is of no known kind; accepted: {looks}", str(file))
    return found


def has_tests(kind: str, file: str | pathlib.Path, test: str = "") -> bool:
    """Whether a file has official test examples, which the column `test` may mark."""
    try:
        return bool(test) or KINDS[kind].tested(pathlib.Path(expanded(file)))
    except (OSError, ValueError):  # what reads the file raises the error
        return False


def read(file: str | pathlib.Path, kind: str = "file", **options: Any) -> Source:
    """Reads a file or folder of a kind in `KINDS`, with this kind's options; "file": what the path looks like.

    Raises `ArgumentError` if the path is of no kind, or for an argument that its kind does not have.
    """
    kind = kind_of(file) if kind == "file" else kind
    make = KINDS[kind].read
    known = fields_of(make)
    for name in options.keys() - known.keys():
        raise ArgumentError(
            name, f"not accepted for {kind}; accepted: {', '.join(known)}", options[name]
        )
    return make(file, **options)
