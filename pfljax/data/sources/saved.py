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
from pfljax.data.sources.files import PARTS, damaged, names_in, of_file
from pfljax.data.sources.folders import Size, check_size, read_images
from pfljax.data.sources.source import Fraction, Source
from pfljax.data.sources.tables import (
    CALLED,
    Categorical,
    Columns,
    FeatureColumns,
    Fill,
    Label,
    arrays_of,
    check_column,
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
    """Reads a data set that `save_to_disk` wrote. Its part test, if it has one, holds the official test examples.

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
    """
    check_size(size)
    file = str(file)
    parts = _parts(file)
    whole = next(iter(parts.values()))
    if not image and not features and not categorical and not text:
        image = next((name for name, kind in whole.features.items() if _is_image(kind)), "")
    with damaged(file, "is damaged, or has parts that differ ({error})"):
        table = optional.load("pyarrow", "file", file).concat_tables(
            [part.data.table for part in parts.values()]
        )
        table.validate(full=True)
        x = (
            np.concatenate([_pixels(part, image, file, tuple(size)) for part in parts.values()])
            if image
            else None
        )
    columns = Columns(
        label=label, client=client, features=features, categorical=categorical, text=text, fill=fill
    )
    found = arrays_of(table, file, columns, x)
    arrays = found.arrays
    if len(parts) > 1:
        arrays["is_test"] = np.repeat(
            [part == PARTS[1] for part in parts], list(map(len, parts.values()))
        )
    names = names_in(label)
    classes = getattr(whole.features[names[0]], "names", None) if len(names) == 1 else None
    options: Any = {"task": task, "images": not text, "standardize": standardize and not text}
    options["num_classes"] = len(classes) if classes else None
    options |= {"fill": fill == "mean", "features": found.features}
    source = of_file(arrays, file, seed=seed, fraction=fraction, called=CALLED, **options)
    return dataclasses.replace(
        source, tokens=bool(text), class_names=tuple(classes or source.class_names)
    )


def fits(path: pathlib.Path) -> bool:
    """Whether `save_to_disk` wrote a folder."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def has_test_part(path: pathlib.Path) -> bool:
    """Whether a folder has the parts train and test."""
    return all((path / part / "dataset_info.json").is_file() for part in PARTS)


def _parts(file: str) -> dict[str, Any]:
    """The data sets in a folder: train and test, or the only one."""
    datasets = optional.load("datasets", "file", file)
    with damaged(file, f"is not {SAVED} ({{error}})"):
        found = datasets.load_from_disk(file)
    if isinstance(found, datasets.Dataset):
        return {"": found}
    if len(found) > 1 and PARTS[0] not in found:
        raise ArgumentError(
            "file", f"has parts {few(found)}; accepted: {' and '.join(PARTS)}, or one part", file
        )
    if PARTS[0] not in found:
        return dict(found)
    others = [part for part in found if part not in PARTS]
    if others:
        warn("file", f"has parts that are not read: {few(others)}; only {' and '.join(PARTS)} are")
    return {part: found[part] for part in PARTS if part in found}


def _is_image(kind: Any) -> bool:
    return type(kind).__name__ == "Image" or type(kind).__name__.startswith("Array")


def _pixels(part: Any, name: str, file: str, size: Sequence[int]) -> np.ndarray:
    """The images or arrays (n, ...) in a column of a data set."""
    check_column("image", name, list(part.features), file)
    if type(part.features[name]).__name__ == "Image":
        cells = [cell or {} for cell in part.data.table.column(name).to_pylist()]
        missing = next((row for row, cell in enumerate(cells) if not cell.get("bytes")), None)
        if missing is not None:
            raise ArgumentError(
                "file", f"has no image in column {name}, row {missing} (counted from 0)", file
            )
        files = {
            f"{file}, row {row}": functools.partial(io.BytesIO, cell["bytes"])
            for row, cell in enumerate(cells)
        }
        return read_images(optional.load("PIL.Image", "file", file), files, tuple(size))
    if size:
        raise ArgumentError("size", "accepted with a column of images", ",".join(map(str, size)))
    return np.asarray(part.with_format("numpy")[name][:])
