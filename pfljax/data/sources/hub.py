"""Data sets of Hugging Face's `datasets` by name: of the Hub, of its cache, or of a folder or file."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError, few, shown
from pfljax.contract.paths import expanded
from pfljax.data.sources import saved
from pfljax.data.sources.arrays import TaskName
from pfljax.data.sources.folders import Size, check_size
from pfljax.data.sources.source import Fraction, Source
from pfljax.data.sources.tables import Categorical, Columns, FeatureColumns, Fill, Label
from pfljax.settings.fields import Seed, checked, hyperparameter

PREFIX = "hf:"
# Suffix of a file -> what `datasets` calls its format
FILES = {".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".jsonl": "json"}
LOGGERS = ("datasets", "huggingface_hub")
NAME = "the name of a data set on the Hub, or the path of a folder or file"


@checked()
def hub(
    name: Annotated[str, hyperparameter(accepted=NAME)],
    *,
    config: str = "",
    test_split: str = "test",
    label: Label = saved.LABEL,
    client: str = "",
    image: str = "",
    features: FeatureColumns = "",
    categorical: Categorical = "",
    text: str = "",
    time: str = "",
    fill: Fill = "none",
    size: Size = (),
    data_dir: str | pathlib.Path | None = None,
    seed: Seed = 0,
    fraction: Fraction = 1.0,
    standardize: bool = True,
    task: TaskName = "auto",
) -> Source:
    """Reads a data set by name with `datasets`, which downloads it once.

    The other arguments are those of `npz`.

    Args:
        name: Name on the Hub, such as "uoft-cs/cifar10"; or the path of a folder that `save_to_disk` wrote, of a folder
            that `datasets` reads, such as one of images or of Parquet files, or of a Parquet, Arrow or JSON file.
        config: Configuration of the data set, if it has several.
        test_split: Split with the official test examples, such as "validation"; others than it and train are not read.
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
        data_dir: Folder of the cache of `datasets`; None: its default.

    Raises:
        ArgumentError: if the data set is neither in the cache nor can be downloaded, or a column is missing or not
            accepted.

    Examples:
        >>> from pfljax.data import sources
        >>> sources.hub("ylecun/mnist").x.shape  # doctest: +SKIP
        (70000, 28, 28, 1)
    """
    check_size(size)
    if not name.strip():
        raise ArgumentError("name", f"accepted: {NAME}", name)
    place = f"{PREFIX}{name}"
    try:
        loaded = _loaded(name, config, None if data_dir is None else str(data_dir))
        splits = saved.chosen_splits(loaded, place, test_split)
        columns = Columns(
            label=saved.label_column(label, splits, place),
            client=client,
            features=features,
            categorical=categorical,
            text=text,
            fill=fill,
            time=time,
        )
        source = saved.source_from_splits(
            splits,
            place,
            columns,
            image=image,
            size=tuple(size),
            seed=seed,
            fraction=fraction,
            standardize=standardize,
            task=task,
        )
    except ArgumentError as error:
        if error.argument != "file":
            raise
        raise ArgumentError("dataset", error.text, error.value) from error
    return dataclasses.replace(source, name=pathlib.PurePath(name).stem)


def _loaded(name: str, config: str, cache: str | None) -> Any:
    """What `datasets` loads by a name: a `Dataset` or `DatasetDict`."""
    datasets = optional.load("datasets", "dataset", f"{PREFIX}{name}")
    path = pathlib.Path(expanded(name, "dataset"))
    options: dict[str, Any] = {"cache_dir": cache, "name": config or None}
    try:
        with _quiet():
            if saved.fits(path):
                return datasets.load_from_disk(str(path))
            if path.is_file() and path.suffix.lower() in FILES:
                file_format = FILES[path.suffix.lower()]
                return datasets.load_dataset(file_format, data_files=str(path), **options)
            place = str(path) if path.exists() else name
            return datasets.load_dataset(place, **options)
    except Exception as error:  # damaged files and the network make `datasets` raise anything
        raise _not_loaded(error, name, path, datasets, cache) from error


def _not_loaded(
    error: Exception, name: str, path: pathlib.Path, datasets: Any, cache: str | None
) -> ArgumentError:
    """The error for a data set that `datasets` does not load: what was looked for, and where."""
    place = f"{PREFIX}{name}"
    reason = shown(str(error).partition("\n")[0]) or type(error).__name__
    if path.exists():
        text = f"cannot be read by datasets ({reason})"
        accepted = f"accepted: {saved.SAVED}, a folder that datasets reads, or a file {few(FILES)}"
        return ArgumentError("dataset", f"{text}; {accepted}", place)
    if isinstance(error, ValueError) and not isinstance(error, FileNotFoundError):
        # An unknown configuration, or a data set that is a script
        return ArgumentError("dataset", f"cannot be read by datasets ({reason})", place)
    folder = cache or datasets.config.HF_DATASETS_CACHE
    looked = f"neither a path nor in the cache {folder}, and not loaded from {datasets.config.HF_ENDPOINT}"
    advice = "name a folder that save_to_disk wrote, or load it once where there is a network"
    return ArgumentError("dataset", f"is {looked} ({reason}); {advice}", place)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences what libraries log of repeated downloads and damaged files; the error says what failed."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
