"""The formats of files that hold users' own data, and which of them a path has."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from pfljax.contract.errors import ArgumentError
from pfljax.contract.paths import expanded
from pfljax.contract.reading import names_of
from pfljax.data.former import renamed_arguments
from pfljax.data.sources import (
    federated,
    flbench_files,
    folders,
    leaf_files,
    pfllib_files,
    records,
    saved,
)
from pfljax.data.sources.files import NPY, npy, npz
from pfljax.data.sources.flbench_files import FLBENCH, flbench
from pfljax.data.sources.leaf_files import LEAF, leaf
from pfljax.data.sources.pfllib_files import PFLLIB, pfllib
from pfljax.data.sources.plays import text
from pfljax.data.sources.source import Source
from pfljax.data.sources.tables import table
from pfljax.settings.fields import fields_of


def _never(path: pathlib.Path) -> bool:
    return False


class Format(NamedTuple):
    """A format of a file or folder.

    Attributes:
        read: Reads it: a function of the path and of options.
        appearance: What its paths look like, in words.
        fits: Whether a path looks like it.
        has_tests: Whether the file at a path has official test examples, apart from those that a column marks.
    """

    read: Callable[..., Source]
    appearance: str
    fits: Callable[[pathlib.Path], bool]
    has_tests: Callable[[pathlib.Path], bool] = _never


def _ends_with(*suffixes: str) -> Callable[[pathlib.Path], bool]:
    def fits(path: pathlib.Path) -> bool:
        return path.suffix.lower() in suffixes

    return fits


def _is_csv(path: pathlib.Path) -> bool:
    is_compressed = path.suffix.lower() in (".gz", ".bz2", ".xz")
    name = path.with_suffix("") if is_compressed else path
    return name.suffix.lower() in (".csv", ".tsv")


def _is_leaf(path: pathlib.Path) -> bool:
    return bool(leaf_files.paths(path, "train"))


def _is_npy(path: pathlib.Path) -> bool:
    return (path / "x.npy").is_file()


def _marks_npz_tests(path: pathlib.Path) -> bool:
    return "is_test" in names_of(str(path))


def _marks_npy_tests(path: pathlib.Path) -> bool:
    return (path / "is_test.npy").is_file()


def _always(path: pathlib.Path) -> bool:
    return True


# A path has the first format that it looks like.
FORMATS = {
    "npz": Format(npz, "a .npz file", _ends_with(".npz"), _marks_npz_tests),
    "text": Format(text, "a .txt file", _ends_with(".txt"), _always),
    "csv": Format(table, "a .csv or .tsv file, which may be compressed", _is_csv),
    "parquet": Format(table, "a .parquet file", _ends_with(".parquet", ".pq")),
    "arrayrecord": Format(
        records.arrayrecord, records.RECORDS, records.fits, records.has_test_split
    ),
    "huggingface": Format(saved.huggingface, saved.SAVED, saved.fits, saved.has_test_split),
    "leaf": Format(leaf, LEAF, _is_leaf, leaf_files.has_test_split),
    "hdf5": Format(
        federated.tff, "a .h5 file", _ends_with(".h5", ".hdf5"), federated.has_test_split
    ),
    "sqlite": Format(
        federated.tff, "a .sqlite file", _ends_with(".sqlite", ".db"), federated.has_test_split
    ),
    "pfllib": Format(pfllib, PFLLIB, pfllib_files.fits, pfllib_files.has_test_split),
    "flbench": Format(flbench, FLBENCH, flbench_files.fits, _always),
    "npy": Format(npy, NPY, _is_npy, _marks_npy_tests),
    "images": Format(folders.images, folders.IMAGES, pathlib.Path.is_dir, folders.has_test_split),
}


def detect_format(file: str | pathlib.Path) -> str:
    """The format of a file or folder, by its path.

    Raises:
        ArgumentError: if the format is not supported.

    Examples:
        >>> from pfljax.data import sources
        >>> sources.detect_format("sensors.csv.gz")
        'csv'
    """
    if not isinstance(file, str | os.PathLike):
        raise ArgumentError("file", "accepted: a path", type(file).__name__)
    path = pathlib.Path(expanded(file))
    # A path with a null byte raises a ValueError.
    with contextlib.suppress(OSError, ValueError):
        for name, file_format in FORMATS.items():
            if file_format.fits(path):
                return name
    appearances = dict.fromkeys(file_format.appearance for file_format in FORMATS.values())
    text = f"unsupported format; expected {', '.join(appearances)}"
    raise ArgumentError("file", text, str(file))


def has_tests(format: str, file: str | pathlib.Path, test: str = "") -> bool:
    """Whether a file has official test examples, which the column `test` may mark.

    Examples:
        >>> import numpy as np
        >>> from pfljax.data import sources
        >>> np.savez("marked.npz", x=np.ones((2, 1)), y=[0, 1], is_test=[False, True])
        >>> sources.has_tests("npz", "marked.npz")
        True
    """
    try:
        return bool(test) or FORMATS[format].has_tests(pathlib.Path(expanded(file)))
    except (OSError, ValueError):
        # The function that reads the file raises the error.
        return False


@renamed_arguments(kind="format")
def read(file: str | pathlib.Path, format: str = "file", **options: Any) -> Source:
    """Reads a file or folder of a format in `FORMATS`, with this format's options.

    Args:
        file: Path of the file or folder.
        format: A format, such as "csv"; "file": the one that the path looks like.
        **options: Arguments of the format's function.

    Raises:
        ArgumentError: if the format is not supported, for an argument that it does not have, or a file that is not
            accepted.

    Examples:
        >>> import numpy as np
        >>> from pfljax.data import sources
        >>> np.savez("small.npz", x=np.ones((4, 3)), y=[0, 1, 0, 1])
        >>> sources.read("small.npz").x.shape
        (4, 3)
    """
    if format == "file":
        format = detect_format(file)
    reader = FORMATS[format].read
    known = fields_of(reader)
    for name in options.keys() - known.keys():
        text = f"not accepted for {format}; accepted: {', '.join(known)}"
        raise ArgumentError(name, text, options[name])
    return reader(file, **options)
