"""Data sets that TFDS prepared as ArrayRecord files: Grain reads the examples that a round needs."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pathlib
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError
from pfljax.contract.reading import opened, read_text
from pfljax.data.sources.arrays import TaskName
from pfljax.data.sources.examples import features_of
from pfljax.data.sources.files import PARTS, damaged, names_in, of_file
from pfljax.data.sources.source import Fraction, Source
from pfljax.data.sources.tables import Label, check_column, targets_of
from pfljax.settings.fields import Seed, checked, hyperparameter

RECORDS = "a folder that TFDS prepared with file_format=array_record"
SHARD = re.compile(r"(.+)-([^-]+)\.array_record-(\d+)-of-(\d+)")
BLOCK = 1024  # records that are read at a time


class Field(NamedTuple):
    """How TFDS writes a feature."""

    # none: a list of numbers; bytes or zlib: their bytes; image: a PNG or JPEG file; text: UTF-8
    written: str
    shape: tuple[int, ...] = ()  # of an example; -1: it differs
    dtype: np.dtype = np.dtype(np.int64)
    num_classes: int | None = None


@checked()
def arrayrecord(
    file: Annotated[str | pathlib.Path, hyperparameter(accepted=RECORDS, help=RECORDS)],
    *,
    label: Label = "label",
    client: str = "",
    image: str = "",
    seed: Seed = 0,
    fraction: Fraction = 1.0,
    standardize: bool = True,
    task: TaskName = "auto",
) -> Source:
    """Reads a data set that TFDS prepared, which may be larger than memory. Its part test holds the official tests.

    The other arguments are those of `npz`. What stays in the file is as in `npy`: an example is read and decoded when
    its client takes part.

    Args:
        file: The folder, with features.json, and the parts train and test in files NAME-PART.array_record-I-of-N.
        label: Feature with the labels, or several; see `table`.
        client: Feature that names each example's client; empty: none does.
        image: Feature of images or arrays; empty: image, or else the first one.

    Raises:
        ArgumentError: if the folder cannot be read, or a feature is missing or not accepted.
    """
    folder = pathlib.Path(file)
    file = str(file)
    labels = names_in(label)
    fields = _fields(folder)
    given = {
        "label": labels,
        "client": [client] if client else [],
        "image": [image] if image else [],
    }
    for argument, name in ((argument, name) for argument, names in given.items() for name in names):
        check_column(argument, name, list(fields), file)
    others = [
        name for name, field in fields.items() if field.shape and name not in (*labels, client)
    ]
    if not labels or not (image or others):
        raise ArgumentError(
            "file", f"needs a label and another array; found {', '.join(fields)}", file
        )
    image = image or ("image" if "image" in others else others[0])
    if min(fields[image].shape, default=-1) < 1:
        raise ArgumentError(
            "image", "accepted: a feature whose examples are arrays of one shape", image
        )
    name, num_test, source = _opened(folder)
    examples = Examples(source, fields, file)
    values = examples.read(range(len(source)), [*labels, *given["client"]])
    columns = [np.array(column) for column in zip(*values, strict=True)]
    arrays: dict[str, Any] = {
        "x": Records(examples, image),
        "y": targets_of(columns[: len(labels)], label),
    }
    if client:
        arrays["client"] = columns[-1]
    if num_test:
        arrays["is_test"] = np.arange(len(source)) >= len(source) - num_test
    options: Any = {
        "task": task,
        "standardize": standardize,
        "num_classes": fields[labels[0]].num_classes,
    }
    called = {"x": image, "y": label, "client": client}
    found = of_file(arrays, file, seed=seed, fraction=fraction, called=called, **options)
    return dataclasses.replace(
        found, name=name, class_names=_class_names(folder, labels[0]) or found.class_names
    )


def fits(path: pathlib.Path) -> bool:
    """Whether a folder has ArrayRecord files of TFDS."""
    return path.is_dir() and any(SHARD.fullmatch(each.name) for each in path.iterdir())


def has_test_part(path: pathlib.Path) -> bool:
    """Whether a folder has a part test."""
    return any(path.glob(f"*-{PARTS[1]}.array_record-*"))


class Examples(NamedTuple):
    """The examples of a folder."""

    source: Any  # Grain's, of serialized messages
    fields: dict[str, Field]
    file: str

    def read(self, rows: Sequence[int], names: Sequence[str]) -> Iterator[list[Any]]:
        """The values of some features, for each of some examples."""
        for start in range(0, len(rows), BLOCK):
            block = rows[start : start + BLOCK]
            with damaged(
                self.file, f"has a damaged record from {block[0]} to {block[-1]} ({{error}})"
            ):
                for record in self.source.__getitems__(block):
                    features = features_of(record)
                    yield [_decoded(self.fields[name], features[name]) for name in names]


class Records:
    """A feature of all examples (n, *features) that stays in its files; an index reads the examples that it names.

    It is used like a memory map: `records[:]` is the same object, and other indices give arrays.
    """

    def __init__(self, examples: Examples, name: str):
        field = examples.fields[name]
        self.examples = examples
        self.name = name
        self.dtype = field.dtype
        self.shape = (len(examples.source), *field.shape)
        self.ndim = len(self.shape)
        self.size = math.prod(self.shape)
        self.itemsize = field.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Any:
        return (
            self
            if isinstance(rows, slice) and rows == slice(None)
            else self.take(np.arange(len(self))[rows])
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self.take(np.arange(len(self))), dtype)

    def take(self, index: Any, axis: int = 0, **options: Any) -> np.ndarray:
        """The examples (..., *features) at an index (...), which `numpy.take` calls; each is read once."""
        del axis, options
        rows, places = np.unique(np.asarray(index) % len(self), return_inverse=True)
        found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        for row, (values,) in zip(
            found, self.examples.read(rows.tolist(), [self.name]), strict=True
        ):
            row[:] = values.reshape(row.shape)
        return found[places.reshape(np.shape(index))]


def _fields(folder: pathlib.Path) -> dict[str, Field]:
    """The features that features.json describes, but for those of other types."""
    path = folder / "features.json"
    text = read_text(str(path))
    with damaged(
        str(path), "is not the features.json of a data set that TFDS prepared ({kind}: {error})"
    ):
        described = json.loads(text)["featuresDict"]["features"]
        found = {name: _field(of) for name, of in described.items()}
    return {name: field for name, field in found.items() if field}


def _field(of: dict[str, Any]) -> Field | None:
    if "classLabel" in of:
        return Field("none", num_classes=int(of["classLabel"]["numClasses"]))
    if "text" in of:
        return Field("text")
    how = of.get("image") or of.get("tensor")
    if how is None:
        return None
    shape = tuple(map(int, how["shape"].get("dimensions", ())))
    if how.get("dtype") == "string":
        return None if shape else Field("text")
    written = "image" if "image" in of else how.get("encoding", "none")
    return Field(written, shape, np.dtype(how.get("dtype", "uint8")))


def _class_names(folder: pathlib.Path, label: str) -> tuple[str, ...]:
    path = folder / f"{label}.labels.txt"
    return tuple(read_text(str(path)).splitlines()) if path.exists() else ()


def _opened(folder: pathlib.Path) -> tuple[str, int, Any]:
    """The data set's name, the number of test examples, and Grain's source of all examples, the test examples last."""
    file = str(folder)
    grain = optional.load("grain.sources", "file", file)
    with damaged(file, "cannot be read ({error})", (OSError,)):
        matches = [
            match for each in sorted(folder.iterdir()) if (match := SHARD.fullmatch(each.name))
        ]
    shards = {part: [match for match in matches if match[2] == part] for part in PARTS}
    if not shards[PARTS[0]]:
        parts = ", ".join(dict.fromkeys(match[2] for match in matches))
        raise ArgumentError(
            "file", f"has no part {PARTS[0]} ({parts or 'no parts'}); accepted: {RECORDS}", file
        )
    for part, of_part in shards.items():
        if of_part and len(of_part) != int(of_part[0][4]):
            raise ArgumentError(
                "file", f"has {len(of_part)} of the {int(of_part[0][4])} files of {part}", file
            )
    paths = {
        part: [str(folder / match[0]) for match in of_part] for part, of_part in shards.items()
    }
    for path in (*paths[PARTS[0]], *paths[PARTS[1]]):
        with opened(path):  # Grain would wait for a pipe
            pass
    with damaged(file, "has a damaged file ({error})"):
        tests = len(grain.ArrayRecordDataSource(paths[PARTS[1]])) if paths[PARTS[1]] else 0
        source = grain.ArrayRecordDataSource([*paths[PARTS[0]], *paths[PARTS[1]]])
    return shards[PARTS[0]][0][1], tests, source


def _decoded(field: Field, feature: Any) -> Any:
    """An example's value of a feature, from its part of a tf.train.Example."""
    if field.written == "none":
        values = feature.float_list.value or feature.int64_list.value
        return np.array(values).astype(field.dtype).reshape(field.shape)
    (content,) = feature.bytes_list.value
    if field.written == "text":
        return content.decode("utf-8", "replace")
    if field.written == "image":
        pillow = optional.load("PIL.Image", "file")
        with pillow.open(io.BytesIO(content)) as picture:
            if picture.size[::-1] != field.shape[:2]:  # which decodes nothing yet
                raise ValueError(f"an image of {picture.size[1]} x {picture.size[0]} pixels")
            return np.asarray(picture, field.dtype)
    if field.written == "zlib":
        content = zlib.decompressobj().decompress(
            content, math.prod(field.shape) * field.dtype.itemsize + 1
        )
    return np.frombuffer(content, field.dtype).reshape(field.shape)
