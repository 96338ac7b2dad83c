"""Data sets of Hugging Face's `datasets`, saved to disk."""

from __future__ import annotations

import dataclasses
import functools
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError, few, warn
from pfljax.contract.reading import opened
from pfljax.data.sources.arrays import TaskName
from pfljax.data.sources.files import SPLITS, damaged, names_in, source_from_file
from pfljax.data.sources.folders import Size, check_size, read_images
from pfljax.data.sources.source import Fraction, Source
from pfljax.data.sources.tables import (
    ARRAY_NAMES,
    Categorical,
    Columns,
    FeatureColumns,
    Fill,
    Label,
    check_column,
    table_arrays,
)
from pfljax.settings.fields import Seed, checked, hyperparameter

LABEL = "label"  # the default column of labels
SAVED = "a folder that save_to_disk of Hugging Face's datasets wrote"


@checked()
def huggingface(
    file: Annotated[str | pathlib.Path, hyperparameter(accepted=SAVED, help=SAVED)],
    *,
    label: Label = LABEL,
    client: str = "",
    image: str = "",
    features: FeatureColumns = "",
    categorical: Categorical = "",
    text: str = "",
    time: str = "",
    fill: Fill = "none",
    size: Size = (),
    seed: Seed = 0,
    fraction: Fraction = 1.0,
    standardize: bool = True,
    task: TaskName = "auto",
) -> Source:
    """Reads a data set that `save_to_disk` wrote. Its split test, if it has one, holds the official test examples.

    The other arguments are those of `npz`.

    Args:
        file: The folder.
        label: Column with the labels, or several; see `table`. If there is no column "label", the only one with names
            of classes.
        client: Column that names each example's client; empty: none does.
        image: Column of images or arrays; empty: the first one, if there is one and no other columns are named.
        features: Columns of numbers to learn from instead; see `table`.
        categorical: Columns of categories to learn from, too; see `table`.
        text: Column of text to learn from instead; see `table`.
        time: Column that says when each example was taken; see `table`.
        fill: What replaces missing numbers; see `table`.
        size: Rows and columns to which images are resized; empty: all images must have one size.

    Raises:
        ArgumentError: if the folder cannot be read, or a column is missing or not accepted.

    Examples:
        >>> import datasets  # doctest: +SKIP
        >>> from pfljax.data import sources
        >>> rows = datasets.load_dataset("ylecun/mnist")  # doctest: +SKIP
        >>> rows.save_to_disk("mnist")  # doctest: +SKIP
        >>> sources.huggingface("mnist").x.shape  # doctest: +SKIP
        (70000, 28, 28, 1)
    """
    check_size(size)
    file = str(file)
    datasets = optional.load("datasets", "file", file)
    with damaged(file, f"is not {SAVED} ({{error}})"):
        loaded = datasets.load_from_disk(file)
    splits = chosen_splits(loaded, file)
    columns = Columns(
        label=label_column(label, splits, file),
        client=client,
        features=features,
        categorical=categorical,
        text=text,
        fill=fill,
        time=time,
    )
    return source_from_splits(
        splits,
        file,
        columns,
        image=image,
        size=tuple(size),
        seed=seed,
        fraction=fraction,
        standardize=standardize,
        task=task,
    )


def source_from_splits(
    splits: Mapping[str, Any],
    file: str,
    columns: Columns,
    *,
    image: str,
    size: tuple[int, ...],
    seed: int,
    fraction: float,
    standardize: bool,
    task: str,
) -> Source:
    """Makes a `Source` of data sets of Hugging Face; see `huggingface` for the arguments.

    Args:
        splits: The only data set, or those of training examples and of official test examples, in this order.
        file: Where they are from, for messages.
        columns: What their columns are.
        image: Column of images or arrays; empty: the first one.
        size: Size of the images.
        seed: Seed for the subsample.
        fraction: Share of the examples to keep.
        standardize: Whether models standardize x.
        task: What is predicted.
    """
    first = next(iter(splits.values()))
    text = columns.text
    if not (image or columns.features or columns.categorical or text):
        images = [name for name, feature in first.features.items() if _is_image(feature)]
        image = images[0] if images else ""
    pyarrow = optional.load("pyarrow", "file", file)
    with damaged(file, "is damaged, or has splits that differ ({error})"):
        table = pyarrow.concat_tables([split.data.table for split in splits.values()])
        table.validate(full=True)
        x = None
        if image:
            pixels = [_pixels(split, image, file, size) for split in splits.values()]
            x = np.concatenate(pixels)
    read = table_arrays(table, file, columns, x)
    arrays = read.arrays
    if len(splits) > 1:
        sizes = [len(split) for split in splits.values()]
        arrays["is_test"] = np.repeat([False, True], sizes)

    # Classes in the order of the data set, if the label has names
    names = names_in(columns.label)
    class_names = getattr(first.features[names[0]], "names", None) if len(names) == 1 else None
    source = source_from_file(
        arrays,
        file,
        seed=seed,
        fraction=fraction,
        array_names=ARRAY_NAMES,
        task=task,
        images=not text,
        standardize=standardize and not text,
        num_classes=len(class_names) if class_names else None,
        fill=columns.fill == "mean",
        features=read.features,
    )
    class_names = tuple(class_names or source.class_names)
    return dataclasses.replace(source, tokens=bool(text), class_names=class_names)


def fits(path: pathlib.Path) -> bool:
    """Whether `save_to_disk` wrote a folder."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def has_test_split(path: pathlib.Path) -> bool:
    """Whether a folder has the splits train and test."""
    return all((path / split / "dataset_info.json").is_file() for split in SPLITS)


def chosen_splits(loaded: Any, file: str, test_split: str = SPLITS[1]) -> dict[str, Any]:
    """The splits to read of what `datasets` loaded: those for training and testing, or the only one.

    Args:
        loaded: A `Dataset`, or a `DatasetDict` of splits.
        file: Where it is from, for messages.
        test_split: Name of the split for testing.

    Raises:
        ArgumentError: if there are several splits, and none of them is called train; or if there is no split
            `test_split`, although it is not the default.
    """
    if test_split != SPLITS[1] and test_split not in (loaded if isinstance(loaded, dict) else {}):
        splits = few(loaded) if isinstance(loaded, dict) else "no splits"
        raise ArgumentError("test_split", f"{file} has {splits}", test_split)
    if not isinstance(loaded, dict):
        return {"": loaded}
    train = SPLITS[0]
    if train not in loaded:
        if len(loaded) == 1:
            return dict(loaded)
        accepted = f"accepted: {train} and {test_split}, or one split"
        raise ArgumentError("file", f"has splits {few(loaded)}; {accepted}", file)
    read = [name for name in (train, test_split) if name in loaded]
    others = [name for name in loaded if name not in read]
    if others:
        text = f"has splits that are not read: {few(others)}; read: {' and '.join(read)}"
        warn("file", text)
    return {name: loaded[name] for name in read}


def label_column(label: Any, splits: Mapping[str, Any], file: str) -> Any:
    """The column of labels: the given one or, if the default is missing, the only one whose classes have names."""
    columns = next(iter(splits.values())).features
    if label != LABEL or LABEL in columns:
        return label
    named = [name for name, feature in columns.items() if getattr(feature, "names", None)]
    if len(named) == 1:
        return named[0]
    text = f"{file} has no such column; accepted: {few(columns)}"
    hint = f"; {' and '.join(named)} have names of classes" if named else ""
    raise ArgumentError("label", f"{text}{hint}", label)


def _is_image(feature: Any) -> bool:
    """Whether a feature of `datasets` holds images or arrays."""
    name = type(feature).__name__
    return name == "Image" or name.startswith("Array")


def _pixels(split: Any, name: str, file: str, size: Sequence[int]) -> np.ndarray:
    """The images or arrays (n, ...) in a column of a data set."""
    check_column("image", name, list(split.features), file)
    if type(split.features[name]).__name__ != "Image":
        if size:
            text = "accepted with a column of images"
            raise ArgumentError("size", text, ",".join(map(str, size)))
        return np.asarray(split.with_format("numpy")[name][:])
    files = {}
    for row, cell in enumerate(split.data.table.column(name).to_pylist()):
        content = (cell or {}).get("bytes")
        path = (cell or {}).get("path")
        if content:
            files[f"{file}, row {row}"] = functools.partial(io.BytesIO, content)
        elif path:
            files[path] = functools.partial(opened, path)
        else:
            text = f"has no image in column {name}, row {row} (counted from 0)"
            raise ArgumentError("file", text, file)
    return read_images(optional.load("PIL.Image", "file", file), files, tuple(size))
