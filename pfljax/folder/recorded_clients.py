"""What a run's folder records of its clients: everything but their examples.

With it, a run is loaded without its data, and clients that are handed over are compared with the run's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from pfljax import data
from pfljax.contract.errors import LONGEST, few
from pfljax.contract.pooled import Pooled, is_pooled
from pfljax.contract.types import PyTree, Split
from pfljax.data import Federation
from pfljax.data.sources.source import Scaling
from pfljax.folder import files
from pfljax.settings import recorded

NAME = "data.npz"
PARTS = ("train", "validation", "test")
# Fields of a `Federation` that are recorded as they are: (K,) arrays, or None.
ARRAYS = ("group", "target", "client_names")
# And as JSON.
VALUES = (
    "task",
    "num_classes",
    "name",
    "index_digest",
    "class_names",
    "official_test",
    "tokens",
    "feature_names",
    "validation_returned",
)
# Numbers of several precisions may be the same.
FLOATS = re.compile(r"\bb?float\d+")
NAMES = {"classes": "class_names", "columns": "feature_names", "clients": "client_names"}
MOST_NAMES = 5  # in a message


class RecordedClients(NamedTuple):
    """The clients of a run, as its folder records them.

    Attributes:
        federation: The clients with placeholders for x and y.
        codes: Codes of each client's examples.
    """

    federation: Federation
    codes: data.statistics.ClientCodes


class _Leaf(NamedTuple):
    """An array in x or y: the shape and type of an example, and whether clients share a pool of examples."""

    shape: Sequence[int]
    dtype: str
    is_pooled: bool

    @classmethod
    def of(cls, examples: Any) -> _Leaf:
        return cls(list(examples.shape[2:]), str(examples.dtype), is_pooled(examples))

    def placeholder(self, num_clients: int, n_max: int) -> Any:
        """Zeros (K, n_max, *shape) that take little memory."""
        shape = tuple(self.shape)
        dtype = np.dtype(self.dtype)
        if self.is_pooled:
            index = np.zeros((num_clients, n_max), np.int32)
            return Pooled(np.zeros((1, *shape), dtype), index)
        return np.broadcast_to(np.zeros((), dtype), (num_clients, n_max, *shape))


def write(out: Path, clients: Federation) -> None:
    """Records the clients in a run's folder, unless it has them already.

    Nothing is written if x is a tree of containers that no later process could make again.
    """
    before = read(out)
    if before is not None and before.federation.recorded_digest == data.digest(clients):
        return
    try:
        about = _about(clients)
    except recorded.CannotRecord:
        return
    arrays: dict[str, Any] = {"about": json.dumps(files.plain(about))}
    for part in PARTS:
        arrays[f"size_{part}"] = np.asarray(getattr(clients, part).size)
    for name in ARRAYS:
        values = getattr(clients, name)
        if values is not None:
            values = np.asarray(values)
            # An npz file has no objects, but text.
            arrays[name] = values.astype(str) if values.dtype == object else values
    if clients.scaling is not None:
        for name, values in clients.scaling._asdict().items():
            leaves = jax.tree.leaves(values, is_leaf=_is_none)
            for number, leaf in enumerate(leaves):
                if leaf is not None:
                    arrays[f"{name}_{number}"] = np.asarray(leaf)
    codes = data.client_codes(clients)
    arrays["x_codes"] = codes.x
    arrays["y_codes"] = codes.y
    files.write_npz(out / NAME, arrays)


def read(out: Path) -> RecordedClients | None:
    """Reads the clients that a run's folder records; None if it records none, or the file is damaged."""
    try:
        arrays = files.read_npz(out / NAME)
        codes = data.statistics.ClientCodes(arrays["x_codes"], arrays["y_codes"])
        return RecordedClients(_federation(arrays), codes)
    except Exception:  # a truncated file can make NumPy raise anything
        return None


def difference(before: RecordedClients, clients: Federation, scaled: bool = True) -> str:
    """Says how clients differ from recorded ones; "" if they do not.

    With several processes, examples are compared by their fingerprint alone, since each process has only some.

    Args:
        before: The recorded clients.
        clients: Other ones.
        scaled: Whether to compare how x is scaled, too.
    """
    federation = before.federation
    if federation.num_clients != clients.num_clients:
        return f"the run had {federation.num_clients} clients, and these are {clients.num_clients}"
    described_before = _described(federation)
    described = _described(clients)
    for name in {**described_before, **described}:
        was = described_before.get(name, "missing")
        now = described.get(name, "missing")
        if FLOATS.sub("float", was) != FLOATS.sub("float", now):
            return f"{name} was {was} and is {now}"
    text = _difference_of_names(federation, clients)
    if text:
        return text

    # Sizes.
    for part in PARTS:
        sizes_before = np.asarray(getattr(federation, part).size)
        sizes = np.asarray(getattr(clients, part).size)
        different = np.flatnonzero(sizes_before != sizes)
        if different.size:
            first = different[0]
            name = name_of(clients, first)
            return (
                f"client {name} had {sizes_before[first]} {part} examples, and has {sizes[first]}"
            )

    # Examples.
    digest = data.digest(clients)
    is_same = federation.recorded_digest == digest
    changed_types = [name for name in described if described_before[name] != described[name]]
    if is_same and changed_types:
        return ""
    if changed_types:
        name = changed_types[0]
        return f"{name} was {described_before[name]} and is {described[name]}"
    # Equal digests are those of standardized x: x in another unit has the same.
    if clients.local_clients is None:
        codes = data.client_codes(clients)
        for what in ("x", "y"):
            different = np.flatnonzero(getattr(before.codes, what) != getattr(codes, what))
            if different.size:
                first = name_of(clients, different[0])
                others = different.size - 1
                more = f" and {others} more" if others else ""
                return f"{what} of client {first}{more} differs"
        if is_same or not scaled:
            return ""
        if str(federation.scaling) != str(clients.scaling):
            return "x is standardized in another way"
    if is_same:
        return ""
    return f"examples differ (digest {federation.recorded_digest}, now {digest})"


def name_of(clients: Federation, number: int) -> str:
    """A client's name, or its number if it has none."""
    names = clients.client_names
    return str(number if names is None else names[number])


def _about(clients: Federation) -> dict[str, Any]:
    """What is recorded as JSON. Raises `CannotRecord`."""
    about: dict[str, Any] = {name: getattr(clients, name) for name in VALUES}
    about["digest"] = data.digest(clients)
    leaves, structure = jax.tree.flatten(clients.train.x, is_leaf=is_pooled)
    numbers = jax.tree.unflatten(structure, range(len(leaves)))
    about["x"] = [_Leaf.of(leaf)._asdict() for leaf in leaves]
    about["structure"] = _containers(numbers)
    about["y"] = _Leaf.of(clients.train.y)._asdict()
    about["n_max"] = {part: getattr(clients, part).y.shape[1] for part in PARTS}
    return about


def _federation(arrays: dict[str, np.ndarray]) -> Federation:
    """The clients with placeholders for x and y."""
    about = json.loads(str(arrays["about"]))
    numbers = _tree(about["structure"])
    x_leaves = [_Leaf(**leaf) for leaf in about["x"]]
    y_leaf = _Leaf(**about["y"])
    splits: dict[str, Split] = {}
    for part in PARTS:
        size = arrays[f"size_{part}"]
        n_max = about["n_max"][part]
        leaves = [leaf.placeholder(len(size), n_max) for leaf in x_leaves]
        x = jax.tree.map(leaves.__getitem__, numbers)
        splits[part] = Split(x, y_leaf.placeholder(len(size), n_max), size)

    values: dict[str, Any] = {name: about[name] for name in VALUES}
    values |= {name: arrays.get(name) for name in ARRAYS}
    values["class_names"] = tuple(values["class_names"])
    values["feature_names"] = tuple(values["feature_names"])
    return Federation(
        **splits,
        **values,
        scaling=_scaling(arrays, numbers),
        recorded_digest=about["digest"],
    )


def _scaling(arrays: dict[str, np.ndarray], numbers: PyTree) -> Scaling | None:
    """The recorded statistics, in trees like x; None if x is not standardized."""
    if not any(name.startswith("mean_") for name in arrays):
        return None
    mean = jax.tree.map(lambda number: arrays.get(f"mean_{number}"), numbers)
    std = jax.tree.map(lambda number: arrays.get(f"std_{number}"), numbers)
    return Scaling(mean, std)


def _containers(tree: PyTree) -> Any:
    """A tree of integers as JSON. Raises `CannotRecord` for containers other than dicts, tuples and lists."""
    if isinstance(tree, int):
        return tree
    if isinstance(tree, dict) and all(isinstance(name, str) for name in tree):
        return {"dict": {name: _containers(value) for name, value in tree.items()}}
    if isinstance(tree, list):
        return {"list": [_containers(value) for value in tree]}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        cls = recorded.recorded(type(tree))
        return {"class": cls, "values": [_containers(value) for value in tree]}
    if isinstance(tree, tuple):
        return {"tuple": [_containers(value) for value in tree]}
    raise recorded.CannotRecord(tree)


def _tree(record: Any) -> PyTree:
    """Undoes `_containers`."""
    if isinstance(record, int):
        return record
    if "dict" in record:
        return {name: _tree(value) for name, value in record["dict"].items()}
    if "list" in record:
        return [_tree(value) for value in record["list"]]
    if "tuple" in record:
        return tuple(_tree(value) for value in record["tuple"])
    cls = recorded.restored(record["class"], "clients")
    return cls(*map(_tree, record["values"]))


def _described(clients: Federation) -> dict[str, str]:
    """The task, the number of classes, and shapes and types of an example's x and y, as text by name."""
    texts = {"the task": clients.task, "the number of classes": str(clients.num_classes)}
    leaves, _ = jax.tree.flatten_with_path(clients.train.x, is_leaf=is_pooled)
    for path, leaf in leaves:
        name = f"an example's x{jax.tree_util.keystr(path)}"
        texts[name] = f"{leaf.dtype} {leaf.shape[2:]}"
    y = clients.train.y
    texts["an example's y"] = f"{y.dtype} {y.shape[2:]}"
    return texts


def _difference_of_names(before: Federation, clients: Federation) -> str:
    """Says which names of classes, columns or clients differ; "" if none do."""
    for what, field in NAMES.items():
        names_before = _names(before, field)
        names = _names(clients, field)
        # A table has names of columns, and an array of the same numbers has none.
        if field == "feature_names" and not (names and names_before):
            continue
        if names_before == names:
            continue
        if not names:
            return f"the {what} were named {few(names_before, MOST_NAMES)}, and have no names now"
        if not names_before:
            return f"the {what} had no names, and are named {few(names, MOST_NAMES)} now"
        changes = few(_renamed(names_before, names), MOST_NAMES, LONGEST)
        return f"names of {what} differ: {changes}"
    return ""


def _renamed(names_before: list[str], names: list[str]) -> list[str]:
    """The names that differ, as "old -> new": those of one side alone, or positions if only the order differs."""
    is_name = set(names)
    was_name = set(names_before)
    old = [name for name in names_before if name not in is_name]
    new = [name for name in names if name not in was_name]
    if not old and not new:
        old = names_before
        new = names
    pairs = zip_longest(old, new, fillvalue="none")
    return [f"{was} -> {now}" for was, now in pairs if was != now]


def _names(clients: Federation, what: str) -> list[str]:
    values = getattr(clients, what)
    return [] if values is None else [str(name) for name in values]


def _is_none(leaf: Any) -> bool:
    return leaf is None
