"""Data sets prepared with TensorFlow Datasets (TFDS)."""

from __future__ import annotations

import contextlib
import difflib
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError
from pfljax.data.sources.arrays import TaskName, make_source
from pfljax.data.sources.source import Fraction, Source, generator, subsample
from pfljax.settings.fields import Seed, checked

# features that may name an example's client
CLIENT_FIELDS = ("client", "writer", "client_id", "user")


@checked()
def tfds(
    name: str,
    *,
    data_dir: str | pathlib.Path | None = None,
    seed: Seed = 0,
    fraction: Fraction = 1.0,
    standardize: bool = True,
    task: TaskName = "auto",
) -> Source:
    """Reads a prepared TFDS data set with the random-access reader, which does not need TensorFlow.

    The other arguments are those of `npz`.

    Args:
        name: Name in TFDS, such as "mnist" or "cifar100".
        data_dir: Folder of the prepared TFDS data sets; None: the default of TFDS.

    Raises:
        ArgumentError: if dataset, fraction or task is not accepted.
    """

    def error_of(text):
        return ArgumentError("dataset", text, f"tfds:{name}")

    parts = _open(name, None if data_dir is None else str(data_dir), error_of)
    n = sum(map(len, parts))
    num_train = len(parts[0])
    rows = np.arange(n)[subsample(generator(seed, "load"), n, fraction)]
    is_test = rows >= num_train
    if is_test.all():
        raise ArgumentError("fraction", f"leaves no training examples of tfds:{name}", fraction)
    examples = [
        parts[test][int(row) - test * num_train]
        for row, test in zip(rows, is_test.astype(int), strict=True)
    ]
    scalars = [key for key, value in examples[0].items() if np.ndim(value) == 0]
    features = [key for key in examples[0] if key != "label" and key not in scalars]
    if "label" not in examples[0] or not features:
        raise error_of(f"needs a label and another array; found {', '.join(examples[0])}")
    feature = "image" if "image" in features else features[0]
    shapes = {np.shape(example[feature]) for example in examples}
    if len(shapes) > 1:
        raise error_of(
            f"{feature} has {len(shapes)} different shapes; accepted: examples of one shape"
        )
    wanted = {"x": feature, "y": "label", "coarse": "coarse_label"}
    owner = next((key for key in CLIENT_FIELDS if key in scalars), None)
    if owner:
        wanted["client"] = owner
    arrays = {
        key: np.array([e[field] for e in examples])
        for key, field in wanted.items()
        if field in examples[0]
    }
    if len(parts) > 1:
        arrays["is_test"] = is_test
    # a subsample may lack some
    num_classes = getattr(parts[0].dataset_info.features["label"], "num_classes", None)
    try:
        return make_source(
            arrays, num_classes=num_classes, task=task, standardize=standardize, name=name
        )
    except ArgumentError as error:
        if error.argument not in wanted:
            raise
        raise error_of(f"{wanted[error.argument]} {error.text}") from error


def _open(name: str, data_dir: str | None, error_of: Callable[[str], ArgumentError]) -> list[Any]:
    """Returns random-access readers of the training split and, if it exists, the official test split."""
    tfds = optional.load("tensorflow_datasets", "dataset", f"tfds:{name}")  # slow to import

    def read(split: str):
        # The default, `download=True`, would start a download that needs TensorFlow.
        return tfds.data_source(name, split=split, data_dir=data_dir, download=False)

    try:
        with optional.quiet():  # it would warn about what the errors below say
            parts = [read("train")]
            with contextlib.suppress(ValueError):  # "Unknown split": no official test split
                parts.append(read("test"))
            return parts
    except tfds.core.DatasetNotFoundError as error:
        near = difflib.get_close_matches(name, tfds.list_builders(with_community_datasets=False))
        raise error_of(
            f"TFDS has no such data set; nearest: {', '.join(near) or 'none'}"
        ) from error
    except ValueError as error:  # unknown configuration, or no split "train"
        raise error_of(str(error).splitlines()[0]) from error
    # not prepared, or files without random access
    except (KeyError, OSError, NotImplementedError) as error:
        folder = f", data_dir={data_dir!r}" if data_dir else ""
        extra = "prepare" if _has_images(tfds, name) else "tfds"
        raise error_of(
            f"not prepared in data_dir={data_dir or '(the default of TFDS)'}; prepare it "
            f"with pip install 'pfljax[{extra}]' && python -c \"import tensorflow_datasets as tfds; "
            f"tfds.builder({name!r}, file_format='array_record'{folder}).download_and_prepare()\""
        ) from error


def _has_images(tfds: Any, name: str) -> bool:
    """Whether a data set has images, which TFDS encodes with TensorFlow; it prepares others without."""
    try:
        features = tfds.builder(name, file_format="array_record").info.features.values()
    except Exception:  # some builders need TensorFlow to be made
        return True
    return any(isinstance(feature, tfds.features.Image) for feature in features)
