"""Data sets that PFLlib or HtFLlib (Zhang et al.) has divided among clients: a pickled dict of arrays for each."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from pfljax.contract.errors import ArgumentError, warn
from pfljax.contract.reading import read_pickled_npz, read_text
from pfljax.data.sources.arrays import IGNORED, TaskName
from pfljax.data.sources.files import SPLITS, damaged, source_from_file
from pfljax.data.sources.source import Fraction, Source
from pfljax.settings.fields import Seed, checked, hyperparameter

PFLLIB = "a folder of PFLlib or HtFLlib with train/0.npz, test/0.npz and so on"
CONFIG = "config.json"
NUMBERED = re.compile(r"(\d+)\.npz")
TEXTS = "Shakespeare"  # PFLlib reads folders with this name as texts, too


@checked()
def pfllib(
    file: Annotated[str | pathlib.Path, hyperparameter(accepted=PFLLIB, help=PFLLIB)],
    *,
    seed: Seed = 0,
    fraction: Fraction = 1.0,
    standardize: bool = True,
    task: TaskName = "auto",
) -> Source:
    """Reads what PFLlib's generate_*.py wrote: the same clients, each with the same training and test examples.

    Images, which PFLlib stores with their channels first, get them last. Their numbers, which PFLlib scales to [-1, 1],
    are used as they are with `standardize=False`. Where x are tokens with their number, as of PFLlib's news, the number
    is left out. In a folder called Shakespeare, the model predicts the character after the last.

    The files hold pickles. They are read without running anything that they name: dicts, lists, numbers, texts and
    NumPy arrays are accepted, and a file with anything else is refused.

    The other arguments are those of `npz`.

    Args:
        file: Folder with train, test and config.json.

    Raises:
        ArgumentError: if a file is missing, or has anything but x and y of a client.

    Examples:
        >>> import pathlib
        >>> import numpy as np
        >>> from pfljax.data import sources
        >>> for split in ("train", "test"):
        ...     pathlib.Path("Cifar10", split).mkdir(parents=True)
        ...     for client in range(2):
        ...         examples = {"x": np.zeros((5, 3, 32, 32), np.float32), "y": np.arange(5)}
        ...         np.savez_compressed(f"Cifar10/{split}/{client}.npz", data=examples)
        >>> _ = pathlib.Path("Cifar10/config.json").write_text('{"num_clients": 2, "num_classes": 10}')
        >>> source = sources.pfllib("Cifar10")
        >>> source.x.shape, source.num_classes, source.client.max() + 1
        ((20, 32, 32, 3), 10, np.int64(2))
    """
    folder = pathlib.Path(file)
    config = _config(folder)
    inputs = []
    targets = []
    sizes = []
    num_clients = _num_clients(folder, config)
    for client in range(num_clients):
        for split in SPLITS:
            x, y = _examples(_path(folder, split, client))
            inputs.append(x)
            targets.append(y)
            sizes.append(len(y))
    shapes = {x.shape[1:] for x in inputs if len(x)}
    if len(shapes) > 1:
        text = (
            f"has examples of several shapes, such as {' and '.join(map(str, sorted(shapes)[:2]))}"
        )
        raise ArgumentError("file", f"{text}; accepted: one shape", str(file))
    x = np.concatenate([x for x in inputs if len(x)])
    y = np.concatenate(targets)
    if x.ndim == 4:
        # (n, channels, height, width)
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    is_text = TEXTS in folder.name and x.ndim == 2 and x.dtype.kind in "iu"
    arrays = {
        "x": x,
        "y": _last_of_sequences(y, x.shape[1]) if is_text else y,
        "client": np.repeat(np.repeat(np.arange(num_clients), 2), sizes),
        "is_test": np.repeat(np.tile([False, True], num_clients), sizes),
    }
    num_classes = None
    if y.dtype.kind in "iu" and not is_text:
        num_classes = _num_classes(folder, config, y)
    source = source_from_file(
        arrays,
        str(file),
        seed=seed,
        fraction=fraction,
        num_classes=num_classes,
        standardize=standardize and not is_text,
        task=task,
    )
    return dataclasses.replace(source, tokens=is_text)


def fits(path: pathlib.Path) -> bool:
    """Whether a folder has the training examples of a first client."""
    return _path(path, SPLITS[0], 0).is_file()


def has_test_split(path: pathlib.Path) -> bool:
    """Whether a folder has the test examples of a first client."""
    return _path(path, SPLITS[1], 0).is_file()


def _path(folder: pathlib.Path, split: str, client: int) -> pathlib.Path:
    """The file of a client: train/0.npz, or train0.npz as generate_FEMNIST.py writes it."""
    joined = folder / f"{split}{client}.npz"
    return joined if joined.is_file() else folder / split / f"{client}.npz"


def _config(folder: pathlib.Path) -> Mapping[str, Any]:
    """What config.json says; empty if there is none, as PFLlib's Shakespeare has none."""
    path = folder / CONFIG
    if not path.exists():
        if fits(folder):
            text = f"{folder.name} has no {CONFIG}"
            warn("file", f"{text}; the numbers of clients and classes are those of its files")
        return {}
    text = f"is not a {CONFIG} of PFLlib, with num_clients and num_classes ({{kind}}: {{error}})"
    with damaged(str(path), text):
        content = json.loads(read_text(str(path)))
        config = {"num_clients": int(content["num_clients"])}
        # PFLlib called the number of classes num_labels once, or did not write it.
        num_classes = content.get("num_classes", content.get("num_labels"))
        if num_classes is not None:
            config["num_classes"] = int(num_classes)
    if config["num_clients"] < 1:
        text = f"says that there are {config['num_clients']} clients; accepted: 1 or more"
        raise ArgumentError("file", text, str(path))
    return config


def _num_clients(folder: pathlib.Path, config: Mapping[str, Any]) -> int:
    """K, of config.json or else of the files, which are numbered from 0. Raises `ArgumentError` for a missing file."""
    numbers = set()
    for path in [*folder.glob(f"{SPLITS[0]}/*.npz"), *folder.glob(f"{SPLITS[0]}*.npz")]:
        match = NUMBERED.fullmatch(path.name.removeprefix(SPLITS[0]))
        if match is not None:
            numbers.add(int(match[1]))
    if not numbers:
        raise ArgumentError("file", f"has no {SPLITS[0]}/0.npz; accepted: {PFLLIB}", str(folder))
    num_clients = config.get("num_clients", max(numbers) + 1)
    for split in SPLITS:
        for client in range(num_clients):
            path = _path(folder, split, client)
            if not path.is_file():
                text = f"is missing; accepted: the files of all {num_clients} clients"
                raise ArgumentError("file", text, str(path))
    further = sorted(number for number in numbers if number >= num_clients)
    if further:
        others = f" (and {len(further) - 1} more)" if len(further) > 1 else ""
        text = f"{folder.name}/{SPLITS[0]}/{further[0]}.npz{others} is left out"
        warn("file", f"{text}, since {CONFIG} says that there are {num_clients} clients")
    return num_clients


def _num_classes(folder: pathlib.Path, config: Mapping[str, Any], y: np.ndarray) -> int | None:
    """C of config.json; None: there is none."""
    num_classes = config.get("num_classes")
    largest = int(y.max(initial=0))
    if num_classes is not None and largest >= num_classes:
        text = f"says that there are {num_classes} classes, but a label is {largest}"
        raise ArgumentError("file", text, str(folder / CONFIG))
    return num_classes


def _examples(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """The examples x (n, *features) and y (n,) of a client in a file."""
    file = str(path)
    data = read_pickled_npz(file, "data")
    if not isinstance(data, dict) or not {"x", "y"} <= data.keys():
        names = ", ".join(map(str, data)) if isinstance(data, dict) else type(data).__name__
        raise ArgumentError(
            "file", f"has {names or 'nothing'}; accepted: a dict with x and y", file
        )
    text = "has an x or y that is no array of numbers ({error})"
    with damaged(file, text, (ValueError, TypeError)):
        x = _array(_without_lengths(data["x"]))
        y = _array(data["y"])
    if x.shape[:1] != y.shape or x.dtype.kind not in "biuf" or y.dtype.kind not in "biuf":
        text = f"has x {x.dtype} {x.shape} and y {y.dtype} {y.shape}"
        raise ArgumentError("file", f"{text}; accepted: numbers (n, ...) and numbers (n,)", file)
    is_whole = y.dtype.kind == "f" and np.array_equal(y, np.floor(y))
    # PFLlib makes whole numbers of all labels.
    return x, y.astype(np.int64) if is_whole or y.dtype.kind == "b" else y


def _without_lengths(x: Any) -> Any:
    """Examples without their lengths, where each is a pair of a list of tokens and their number."""
    is_pairs = len(x) > 0 and all(
        isinstance(pair, list | tuple | np.ndarray)
        and len(pair) == 2
        and isinstance(pair[0], list | np.ndarray)
        and np.ndim(pair[1]) == 0
        for pair in x
    )
    return [pair[0] for pair in x] if is_pairs else x


def _array(values: Any) -> np.ndarray:
    """An array; a list of arrays, or an array of such objects, becomes one of numbers."""
    if isinstance(values, np.ndarray) and values.dtype.hasobject:
        values = values.tolist()
    return np.asarray(values)


def _last_of_sequences(y: np.ndarray, length: int) -> np.ndarray:
    """(n, length) the characters y (n,) after the last ones; the other positions are ignored."""
    targets = np.full((len(y), length), IGNORED, np.int16)
    targets[:, -1] = y
    return targets
