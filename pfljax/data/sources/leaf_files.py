"""Data sets in LEAF's layout (Caldas et al., 2018): JSON files with the examples of each user."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.reading import read_text
from pfljax.data.sources.arrays import IGNORED, TaskName
from pfljax.data.sources.characters import tokens
from pfljax.data.sources.files import SPLITS, Shape, damaged, shaped, source_from_file
from pfljax.data.sources.source import Fraction, Source
from pfljax.settings.fields import Seed, checked, hyperparameter

LEAF = "a LEAF folder with JSON files in train and test"
ACCEPTED = "numbers of one length, or texts of one length with the next character as y"


class User(NamedTuple):
    """A user's examples in one file.

    Attributes:
        is_test: Whether they are for testing.
        name: The user.
        x: (n, *features) numbers, or (n,) texts.
        y: (n,) targets, or the characters that follow.
    """

    is_test: bool
    name: str
    x: np.ndarray
    y: np.ndarray


@checked()
def leaf(
    file: Annotated[str | pathlib.Path, hyperparameter(accepted=LEAF, help=LEAF)],
    *,
    shape: Shape = (),
    seed: Seed = 0,
    fraction: Fraction = 1.0,
    standardize: bool = True,
    task: TaskName = "auto",
) -> Source:
    """Reads a data set that LEAF has prepared, such as FEMNIST or Shakespeare; its users are the clients.

    Where examples are texts, the model reads a character at each position and predicts the character after the last.

    The other arguments are those of `npz`.

    Args:
        file: Folder with train, and test for the official test examples; both contain JSON files.
        shape: Shape of an example that the files store as a list of numbers, such as 28,28,1; empty: the list's.

    Raises:
        ArgumentError: if a file or shape is not accepted.

    Examples:
        >>> import json, pathlib
        >>> from pfljax.data import sources
        >>> user = {"x": [[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]], "y": [0, 1]}
        >>> content = {"users": ["f01", "f02"], "user_data": {"f01": user, "f02": user}}
        >>> pathlib.Path("femnist/train").mkdir(parents=True)
        >>> _ = pathlib.Path("femnist/train/part.json").write_text(json.dumps(content))
        >>> source = sources.leaf("femnist", shape=(2, 2, 1))
        >>> source.x.shape, source.client_names.tolist()
        ((4, 2, 2, 1), ['f01', 'f02'])
    """
    file = str(file)
    users: list[User] = []
    for split in SPLITS:
        for path in paths(pathlib.Path(file), split):
            users += _users(str(path), is_test=split == SPLITS[1])
    if all(user.is_test for user in users):
        text = f"has no examples in {SPLITS[0]}/*.json; accepted: {LEAF}"
        raise ArgumentError("file", text, file)
    dtypes = {user.x.dtype.kind for user in users}
    shapes = {user.x.shape[1:] for user in users}
    if len(dtypes) > 1 or len(shapes) > 1:
        text = f"has examples of several kinds or lengths; accepted: {ACCEPTED}"
        raise ArgumentError("file", text, file)

    sizes = [len(user.y) for user in users]
    x = np.concatenate([user.x for user in users])
    y = np.concatenate([user.y for user in users])
    arrays = {"client": np.repeat([user.name for user in users], sizes)}
    if any(user.is_test for user in users):
        arrays["is_test"] = np.repeat([user.is_test for user in users], sizes)
    if dtypes == {"U"}:
        arrays |= _sequences(x, y, file)
        source = source_from_file(
            arrays, file, seed=seed, fraction=fraction, task=task, images=False
        )
        return dataclasses.replace(source, tokens=True)
    arrays |= {"x": shaped(x, shape), "y": y}
    return source_from_file(
        arrays, file, seed=seed, fraction=fraction, task=task, standardize=standardize
    )


def paths(folder: pathlib.Path, split: str) -> list[pathlib.Path]:
    """The JSON files of a split of a folder, in sorted order; none that is hidden."""
    return sorted(folder.glob(f"{split}/[!.]*.json"))


def has_test_split(folder: pathlib.Path) -> bool:
    """Whether a folder has files of test examples."""
    return bool(paths(folder, SPLITS[1]))


def _users(file: str, is_test: bool) -> Iterator[User]:
    """The users in a JSON file."""
    text = "is not a JSON file with users and user_data, and x and y of each user ({kind}: {error})"
    with damaged(file, text, (ValueError, RecursionError, KeyError, TypeError)):
        content = json.loads(read_text(file))
        lists = []
        for name in content["users"]:
            data = content["user_data"][name]
            if data["x"] or data["y"]:
                lists.append((str(name), data["x"], data["y"]))
    for name, inputs, targets in lists:
        yield User(is_test, name, *_user_arrays(name, inputs, targets, file))


def _user_arrays(name: str, inputs: Any, targets: Any, file: str) -> tuple[np.ndarray, np.ndarray]:
    """A user's x and y as arrays; raises `ArgumentError` if they are neither numbers nor texts with characters."""
    try:
        x = np.array(inputs)
        y = np.array(targets)
    except (ValueError, OverflowError):
        # Lists of several lengths
        x = np.array(None)
        y = x
    if x.dtype.kind in "biuf":
        x = x.astype(np.float32)
    is_numbers = x.ndim > 0 and x.dtype.kind == "f"
    is_texts = x.ndim == 1 and x.dtype.kind == "U" and y.dtype == "<U1"
    if not is_numbers and not is_texts:
        text = f"x of {name} is neither {ACCEPTED.replace(' or ', ' nor ')}"
        raise ArgumentError("file", text, file)
    if y.shape[:1] != x.shape[:1]:
        text = f"has {len(x)} x but {y.size} y of {name}; accepted: as many"
        raise ArgumentError("file", text, file)
    return x, y


def _sequences(x: np.ndarray, y: np.ndarray, file: str) -> dict[str, Any]:
    """Tokens x (n, T) and y (n, T) of texts (n,) and their next characters (n,).

    y is ignored but at the last position.
    """
    if len({*map(len, x.tolist())}) > 1:
        raise ArgumentError("file", f"has texts of several lengths; accepted: {ACCEPTED}", file)
    # No text is padded, so that tokens count from 0.
    numbers = tokens(np.char.add(x, y).tolist(), file) - 1
    targets = np.full((len(x), numbers.shape[1] - 1), IGNORED, np.int16)
    targets[:, -1] = numbers[:, -1]
    return {"x": numbers[:, :-1], "y": targets}
