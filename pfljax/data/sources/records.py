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
from pfljax.data.sources.examples import parse_example
from pfljax.data.sources.files import SPLITS, damaged, names_in, source_from_file
from pfljax.data.sources.source import Fraction, Source
from pfljax.data.sources.tables import Label, check_column, join_targets
from pfljax.settings.fields import Seed, checked, hyperparameter

RECORDS = "a folder that TFDS prepared with file_format=array_record"
SHARD = re.compile(r"(.+)-([^-]+)\.array_record-(\d+)-of-(\d+)")
BLOCK = 1024  # records that are read at a time


class Field(NamedTuple):
    """How TFDS writes a feature.

    Attributes:
        encoding: "none": a list of numbers; "bytes" or "zlib": their bytes; "image": a PNG or JPEG file; "text": UTF-8.
        shape: Shape of an example; -1 where it differs.
        dtype: Type of its numbers.
        num_classes: Number of classes of a label; None: unknown.
    """

    encoding: str
    shape: tuple[int, ...] = ()
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
    """Reads a data set that TFDS prepared, which may be larger than memory. Its split test holds the official tests.

    The other arguments are those of `npz`. What stays in the file is as in `npy`: an example is read and decoded when
    its client takes part.

    Args:
        file: The folder, with features.json, and the splits train and test in files NAME-SPLIT.array_record-I-of-N.
        label: Feature with the labels, or several; see `table`.
        client: Feature that names each example's client; empty: none does.
        image: Feature of images or arrays; empty: image, or else the first one.

    Raises:
        ArgumentError: if the folder cannot be read, or a feature is missing or not accepted.

    Examples:
        >>> from pfljax.data import sources
        >>> sources.arrayrecord("tensorflow_datasets/mnist/3.0.1").x.shape  # doctest: +SKIP
        (70000, 28, 28, 1)
    """
    folder = pathlib.Path(file)
    file = str(file)
    labels = names_in(label)
    fields = _fields(folder)
    named = [("label", name) for name in labels]
    named += [("client", client)] if client else []
    named += [("image", image)] if image else []
    for argument, name in named:
        check_column(argument, name, list(fields), file)

    # The first feature with a shape holds the inputs, unless one is named.
    arrays_in_file = [
        name for name, field in fields.items() if field.shape and name not in (*labels, client)
    ]
    if not labels or not (image or arrays_in_file):
        text = f"needs a label and another array; found {', '.join(fields)}"
        raise ArgumentError("file", text, file)
    if not image:
        image = "image" if "image" in arrays_in_file else arrays_in_file[0]
    if min(fields[image].shape, default=-1) < 1:
        text = "accepted: a feature whose examples are arrays of one shape"
        raise ArgumentError("image", text, image)

    # Labels and clients are read now, inputs when their client takes part.
    name, num_test, source = _opened(folder)
    examples = Examples(source, fields, file)
    read_now = [*labels, client] if client else labels
    values = examples.read(range(len(source)), read_now)
    columns = [np.array(column) for column in zip(*values, strict=True)]
    arrays: dict[str, Any] = {
        "x": Records(examples, image),
        "y": join_targets(columns[: len(labels)], label),
    }
    if client:
        arrays["client"] = columns[-1]
    if num_test:
        arrays["is_test"] = np.arange(len(source)) >= len(source) - num_test
    read = source_from_file(
        arrays,
        file,
        seed=seed,
        fraction=fraction,
        array_names={"x": image, "y": ", ".join(labels), "client": client},
        task=task,
        standardize=standardize,
        num_classes=fields[labels[0]].num_classes,
    )
    class_names = _class_names(folder, labels[0]) or read.class_names
    return dataclasses.replace(read, name=name, class_names=class_names)


def fits(path: pathlib.Path) -> bool:
    """Whether a folder has ArrayRecord files of TFDS."""
    return path.is_dir() and any(SHARD.fullmatch(file.name) for file in path.iterdir())


def has_test_split(path: pathlib.Path) -> bool:
    """Whether a folder has a split test."""
    return any(path.glob(f"*-{SPLITS[1]}.array_record-*"))


class Examples(NamedTuple):
    """The examples of a folder.

    Attributes:
        source: Grain's source of serialized messages.
        fields: The features by name.
        file: Path of the folder, for messages.
    """

    source: Any
    fields: dict[str, Field]
    file: str

    def read(self, rows: Sequence[int], names: Sequence[str]) -> Iterator[list[Any]]:
        """The values of some features, for each of some examples."""
        for start in range(0, len(rows), BLOCK):
            block = rows[start : start + BLOCK]
            text = f"has a damaged record from {block[0]} to {block[-1]} ({{error}})"
            with damaged(self.file, text):
                for record in self.source.__getitems__(block):
                    features = parse_example(record)
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
        if isinstance(rows, slice) and rows == slice(None):
            return self
        return self.take(np.arange(len(self))[rows])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self.take(np.arange(len(self))), dtype)

    def take(self, index: Any, axis: int = 0, **options: Any) -> np.ndarray:
        """The examples (..., *features) at an index (...), which `numpy.take` calls; each is read once."""
        del axis, options
        rows, positions = np.unique(np.asarray(index) % len(self), return_inverse=True)
        examples = np.empty((len(rows), *self.shape[1:]), self.dtype)
        values = self.examples.read(rows.tolist(), [self.name])
        for example, (value,) in zip(examples, values, strict=True):
            example[:] = value.reshape(example.shape)
        return examples[positions.reshape(np.shape(index))]


def _fields(folder: pathlib.Path) -> dict[str, Field]:
    """The features that features.json describes, but for those of other types."""
    path = folder / "features.json"
    text = read_text(str(path))
    message = "is not the features.json of a data set that TFDS prepared ({kind}: {error})"
    fields = {}
    with damaged(str(path), message):
        for name, description in json.loads(text)["featuresDict"]["features"].items():
            field = _field(description)
            if field:
                fields[name] = field
    return fields


def _field(description: dict[str, Any]) -> Field | None:
    """A feature, from its entry in features.json; None: its type is not read."""
    if "classLabel" in description:
        return Field("none", num_classes=int(description["classLabel"]["numClasses"]))
    if "text" in description:
        return Field("text")
    array = description.get("image") or description.get("tensor")
    if array is None:
        return None
    shape = tuple(map(int, array["shape"].get("dimensions", ())))
    if array.get("dtype") == "string":
        return None if shape else Field("text")
    encoding = "image" if "image" in description else array.get("encoding", "none")
    return Field(encoding, shape, np.dtype(array.get("dtype", "uint8")))


def _class_names(folder: pathlib.Path, label: str) -> tuple[str, ...]:
    path = folder / f"{label}.labels.txt"
    return tuple(read_text(str(path)).splitlines()) if path.exists() else ()


def _opened(folder: pathlib.Path) -> tuple[str, int, Any]:
    """The data set's name, the number of test examples, and Grain's source of all examples, the test examples last."""
    file = str(folder)
    grain = optional.load("grain.sources", "file", file)
    with damaged(file, "cannot be read ({error})", (OSError,)):
        names = sorted(path.name for path in folder.iterdir())
    matches = [match for match in map(SHARD.fullmatch, names) if match]
    train = [match for match in matches if match[2] == SPLITS[0]]
    test = [match for match in matches if match[2] == SPLITS[1]]
    if not train:
        splits = ", ".join(dict.fromkeys(match[2] for match in matches))
        text = f"has no split {SPLITS[0]} ({splits or 'no splits'})"
        raise ArgumentError("file", f"{text}; accepted: {RECORDS}", file)
    for split, shards in zip(SPLITS, (train, test), strict=True):
        expected = int(shards[0][4]) if shards else 0
        if len(shards) != expected:
            text = f"has {len(shards)} of the {expected} files of {split}"
            raise ArgumentError("file", text, file)

    train_paths = [str(folder / match[0]) for match in train]
    test_paths = [str(folder / match[0]) for match in test]
    # Grain would wait for a pipe.
    for path in (*train_paths, *test_paths):
        with opened(path):
            pass
    with damaged(file, "has a damaged file ({error})"):
        num_test = len(grain.ArrayRecordDataSource(test_paths)) if test_paths else 0
        source = grain.ArrayRecordDataSource([*train_paths, *test_paths])
    return train[0][1], num_test, source


def _decoded(field: Field, feature: Any) -> Any:
    """An example's value of a feature, from its entry in a tf.train.Example."""
    if field.encoding == "none":
        values = feature.float_list.value or feature.int64_list.value
        return np.array(values).astype(field.dtype).reshape(field.shape)
    (content,) = feature.bytes_list.value
    if field.encoding == "text":
        return content.decode("utf-8", "replace")
    if field.encoding == "image":
        pillow = optional.load("PIL.Image", "file")
        with pillow.open(io.BytesIO(content)) as picture:
            # Opening decodes no pixels yet.
            if picture.size[::-1] != field.shape[:2]:
                raise ValueError(f"an image of {picture.size[1]} x {picture.size[0]} pixels")
            return np.asarray(picture, field.dtype)
    if field.encoding == "zlib":
        expected = math.prod(field.shape) * field.dtype.itemsize
        content = zlib.decompressobj().decompress(content, expected + 1)
    return np.frombuffer(content, field.dtype).reshape(field.shape)
