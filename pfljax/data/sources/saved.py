"""Data sets of Hugging Face's `datasets`, saved to disk."""

from __future__ import annotations

import dataclasses
import functools
import io
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError, few, warn
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

SAVED = "a folder that save_to_disk of Hugging Face's datasets wrote"


@checked()
def huggingface(
    file: Annotated[str | pathlib.Path, hyperparameter(accepted=SAVED, help=SAVED)],
    *,
    label: Label = "label",
    client: str = "",
    image: str = "",
    features: FeatureColumns = "",
    categorical: Categorical = "",
    text: str = "",
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
        label: Column with the labels, or several; see `table`.
        client: Column that names each example's client; empty: none does.
        image: Column of images or arrays; empty: the first one, if there is one and no other columns are named.
        features: Columns of numbers to learn from instead; see `table`.
        categorical: Columns of categories to learn from, too; see `table`.
        text: Column of text to learn from instead; see `table`.
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
    splits = _splits(file)
    first = next(iter(splits.values()))
    if not (image or features or categorical or text):
        images = [name for name, feature in first.features.items() if _is_image(feature)]
        image = images[0] if images else ""
    pyarrow = optional.load("pyarrow", "file", file)
    with damaged(file, "is damaged, or has splits that differ ({error})"):
        table = pyarrow.concat_tables([split.data.table for split in splits.values()])
        table.validate(full=True)
        x = None
        if image:
            pixels = [_pixels(split, image, file, tuple(size)) for split in splits.values()]
            x = np.concatenate(pixels)
    columns = Columns(
        label=label, client=client, features=features, categorical=categorical, text=text, fill=fill
    )
    read = table_arrays(table, file, columns, x)
    arrays = read.arrays
    if len(splits) > 1:
        is_test = [name == SPLITS[1] for name in splits]
        arrays["is_test"] = np.repeat(is_test, [len(split) for split in splits.values()])

    # Classes in the order of the data set, if the label has names
    names = names_in(label)
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
        fill=fill == "mean",
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


def _splits(file: str) -> dict[str, Any]:
    """The data sets in a folder: train and test, or the only one."""
    datasets = optional.load("datasets", "file", file)
    with damaged(file, f"is not {SAVED} ({{error}})"):
        loaded = datasets.load_from_disk(file)
    if isinstance(loaded, datasets.Dataset):
        return {"": loaded}
    if SPLITS[0] not in loaded:
        if len(loaded) == 1:
            return dict(loaded)
        accepted = f"accepted: {' and '.join(SPLITS)}, or one split"
        raise ArgumentError("file", f"has splits {few(loaded)}; {accepted}", file)
    others = [name for name in loaded if name not in SPLITS]
    if others:
        text = f"has splits that are not read: {few(others)}; only {' and '.join(SPLITS)} are"
        warn("file", text)
    return {name: loaded[name] for name in SPLITS if name in loaded}


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
        if not content:
            text = f"has no image in column {name}, row {row} (counted from 0)"
            raise ArgumentError("file", text, file)
        files[f"{file}, row {row}"] = functools.partial(io.BytesIO, content)
    return read_images(optional.load("PIL.Image", "file", file), files, tuple(size))
