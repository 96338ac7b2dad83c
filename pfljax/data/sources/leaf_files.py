"""Data sets in LEAF's layout (Caldas et al., 2018): JSON files with the examples of each user."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.reading import read_text
from pfljax.data.sources.arrays import IGNORED, TaskName
from pfljax.data.sources.characters import tokens
from pfljax.data.sources.files import PARTS, Shape, damaged, of_file, shaped
from pfljax.data.sources.source import Fraction, Source
from pfljax.settings.fields import Seed, checked, hyperparameter

LEAF = "a LEAF folder with JSON files in train and test"
ACCEPTED = "numbers of one length, or texts of one length with the next character as y"


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

    Where examples are texts, the model reads a character at each place and predicts the one after the last.

    The other arguments are those of `npz`.

    Args:
        file: Folder with train, and test for the official test examples; both contain JSON files.
        shape: Shape of an example that the files store as a list of numbers, such as 28,28,1; empty: the list's.

    Raises:
        ArgumentError: if a file or shape is not accepted.
    """
    file = str(file)
    found = []
    for part in PARTS:
        for path in paths(pathlib.Path(file), part):
            found += [(user, x, y, part == PARTS[1]) for user, x, y in _users(str(path))]
    if not found or all(row[3] for row in found):
        raise ArgumentError("file", f"has no examples in {PARTS[0]}/*.json; accepted: {LEAF}", file)
    users, xs, ys, tests = zip(*found, strict=True)
    kinds = {x.dtype.kind for x in xs}
    shapes = {x.shape[1:] for x in xs}
    if len(kinds) > 1 or len(shapes) > 1:
        raise ArgumentError(
            "file", f"has examples of several kinds or lengths; accepted: {ACCEPTED}", file
        )
    sizes = list(map(len, ys))
    arrays = {"x": np.concatenate(xs), "y": np.concatenate(ys), "client": np.repeat(users, sizes)}
    if any(tests):
        arrays["is_test"] = np.repeat(tests, sizes)
    options: Any = {"seed": seed, "fraction": fraction, "task": task}
    if kinds == {"U"}:
        arrays |= _sequences(arrays["x"], arrays["y"], file)
        return dataclasses.replace(of_file(arrays, file, **options, images=False), tokens=True)
    arrays["x"] = shaped(arrays["x"], shape)
    return of_file(arrays, file, **options, standardize=standardize)


def paths(folder: pathlib.Path, part: str) -> list[pathlib.Path]:
    """The JSON files of a part of a folder, in sorted order; none that is hidden."""
    return sorted(folder.glob(f"{part}/[!.]*.json"))


def has_test_part(folder: pathlib.Path) -> bool:
    """Whether a folder has files of test examples."""
    return bool(paths(folder, PARTS[1]))


def _users(file: str) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The users in a JSON file with their examples x (n, *features) or texts (n,), and y (n,)."""
    text = "is not a JSON file with users and user_data, and x and y of each user ({kind}: {error})"
    with damaged(file, text, (ValueError, RecursionError, KeyError, TypeError)):
        content = json.loads(read_text(file))
        users = [(user, content["user_data"][user]) for user in content["users"]]
        users = [
            (str(user), data["x"], data["y"]) for user, data in users if data["y"] or data["x"]
        ]
    for user, given, targets in users:
        try:
            x = np.array(given)
            y = np.array(targets)
        except (ValueError, OverflowError):  # lists of several lengths
            x = y = np.array(None)
        if x.dtype.kind in "biuf":
            x = x.astype(np.float32)
        if (
            len(x.shape) == 0
            or x.dtype.kind not in "fU"
            or (x.dtype.kind == "U" and (x.ndim > 1 or y.dtype != "<U1"))
        ):
            text = f"x of {user} is neither {ACCEPTED.replace(' or ', ' nor ')}"
            raise ArgumentError("file", text, file)
        if y.shape[:1] != x.shape[:1]:
            raise ArgumentError(
                "file", f"has {len(x)} x but {y.size} y of {user}; accepted: as many", file
            )
        yield user, x, y


def _sequences(x: np.ndarray, y: np.ndarray, file: str) -> dict[str, Any]:
    """Tokens x (n, T) and y (n, T) of texts (n,) and their next characters (n,): y is ignored but at the last place."""
    if len({*map(len, x.tolist())}) > 1:
        raise ArgumentError("file", f"has texts of several lengths; accepted: {ACCEPTED}", file)
    numbers = tokens(np.char.add(x, y).tolist(), file) - 1  # no text is padded
    targets = np.full((len(x), numbers.shape[1] - 1), IGNORED, np.int16)
    targets[:, -1] = numbers[:, -1]
    return {"x": numbers[:, :-1], "y": targets}
