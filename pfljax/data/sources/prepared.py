"""Data sets prepared with TensorFlow Datasets (TFDS)."""

from __future__ import annotations

import contextlib
import difflib
import pathlib
from typing import Any

import numpy as np

from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError
from pfljax.data.sources.arrays import TaskName, make_source
from pfljax.data.sources.source import Fraction, Source, generator, subsample
from pfljax.settings.fields import Seed, checked

# Features that may name an example's client
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

    Examples:
        >>> from pfljax.data import sources
        >>> sources.tfds("mnist").x.shape  # doctest: +SKIP
        (70000, 28, 28, 1)
    """
    splits = _open(name, None if data_dir is None else str(data_dir))
    num_train = len(splits[0])
    num_examples = sum(map(len, splits))
    rows = np.arange(num_examples)[subsample(generator(seed, "load"), num_examples, fraction)]
    is_test = rows >= num_train
    if is_test.all():
        raise ArgumentError("fraction", f"leaves no training examples of tfds:{name}", fraction)
    examples = []
    for row in rows.tolist():
        is_official = row >= num_train
        examples.append(splits[1][row - num_train] if is_official else splits[0][row])

    # x is the feature "image", or the first array.
    scalars = [field for field, value in examples[0].items() if np.ndim(value) == 0]
    features = [field for field in examples[0] if field != "label" and field not in scalars]
    if "label" not in examples[0] or not features:
        text = f"needs a label and another array; found {', '.join(examples[0])}"
        raise _error(name, text)
    feature = "image" if "image" in features else features[0]
    shapes = {np.shape(example[feature]) for example in examples}
    if len(shapes) > 1:
        text = f"{feature} has {len(shapes)} different shapes; accepted: examples of one shape"
        raise _error(name, text)

    fields = {"x": feature, "y": "label", "coarse": "coarse_label"}
    client_fields = [field for field in CLIENT_FIELDS if field in scalars]
    if client_fields:
        fields["client"] = client_fields[0]
    arrays = {}
    for argument, field in fields.items():
        if field in examples[0]:
            arrays[argument] = np.array([example[field] for example in examples])
    if len(splits) > 1:
        arrays["is_test"] = is_test
    # A subsample may lack some classes.
    num_classes = getattr(splits[0].dataset_info.features["label"], "num_classes", None)
    try:
        return make_source(
            arrays, num_classes=num_classes, task=task, standardize=standardize, name=name
        )
    except ArgumentError as error:
        if error.argument not in fields:
            raise
        raise _error(name, f"{fields[error.argument]} {error.text}") from error


def _error(name: str, text: str) -> ArgumentError:
    return ArgumentError("dataset", text, f"tfds:{name}")


def _open(name: str, data_dir: str | None) -> list[Any]:
    """Returns random-access readers of the training split and, if it exists, the official test split."""
    tfds = optional.load("tensorflow_datasets", "dataset", f"tfds:{name}")

    def read(split: str) -> Any:
        # The default, `download=True`, would start a download that needs TensorFlow.
        return tfds.data_source(name, split=split, data_dir=data_dir, download=False)

    try:
        # TFDS would warn about what the errors below say.
        with optional.quiet():
            splits = [read("train")]
            # "Unknown split": there is no official test split.
            with contextlib.suppress(ValueError):
                splits.append(read("test"))
            return splits
    except tfds.core.DatasetNotFoundError as error:
        names = tfds.list_builders(with_community_datasets=False)
        similar = difflib.get_close_matches(name, names)
        text = f"TFDS has no such data set; nearest: {', '.join(similar) or 'none'}"
        raise _error(name, text) from error
    except ValueError as error:
        # An unknown configuration, or no split "train"
        raise _error(name, str(error).splitlines()[0]) from error
    except (KeyError, OSError, NotImplementedError) as error:
        # Not prepared, or files without random access
        raise _error(name, _how_to_prepare(tfds, name, data_dir)) from error


def _how_to_prepare(tfds: Any, name: str, data_dir: str | None) -> str:
    """The text of the error for a data set that is not prepared, with the command that prepares it."""
    extra = "prepare" if _has_images(tfds, name) else "tfds"
    folder = f", data_dir={data_dir!r}" if data_dir else ""
    builder = f"tfds.builder({name!r}, file_format='array_record'{folder})"
    script = f"import tensorflow_datasets as tfds; {builder}.download_and_prepare()"
    command = f"pip install 'pfljax[{extra}]' && python -c \"{script}\""
    place = data_dir or f"{tfds.core.constants.DATA_DIR} (the default)"
    return f"not prepared in data_dir={place}; prepare it with {command}"


def _has_images(tfds: Any, name: str) -> bool:
    """Whether a data set has images, which TFDS encodes with TensorFlow; it prepares others without."""
    try:
        features = tfds.builder(name, file_format="array_record").info.features.values()
    except Exception:
        # Some builders need TensorFlow to be made.
        return True
    return any(isinstance(feature, tfds.features.Image) for feature in features)
