"""PyTorch's data sets and loaders as arrays; this module does not import PyTorch."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pfljax.contract.errors import ArgumentError, shown
from pfljax.contract.types import PyTree
from pfljax.data.sources.conversion import to_numpy

ACCEPTED = "accepted: pairs (x, y) of tensors or numbers"
DATASET = ("torch.utils.data.dataset", "Dataset")
ITERABLE = ("torch.utils.data.dataset", "IterableDataset")
LOADER = ("torch.utils.data.dataloader", "DataLoader")
HUGGING_FACE = (("datasets.arrow_dataset", "Dataset"), ("datasets.dataset_dict", "DatasetDict"))


class TorchData(NamedTuple):
    """Examples of PyTorch's data sets.

    Attributes:
        x: (n, *features), or a tree of such arrays.
        y: (n, ...) targets.
        client: (n,) the client of each example, if there is a data set for each; otherwise None.
        is_test: (n,) which examples are for testing, if each client has a data set of them; otherwise None.
    """

    x: PyTree
    y: np.ndarray
    client: np.ndarray | None = None
    is_test: np.ndarray | None = None


def _is_of(value: Any, *classes: tuple[str, str]) -> bool:
    """Whether a value is of a class, given modules and names of classes."""
    names = {(base.__module__, base.__name__) for base in inspect.getmro(type(value))}
    return not names.isdisjoint(classes)


def is_data_set(value: Any) -> bool:
    """Whether a value is a Dataset or DataLoader of PyTorch."""
    return _is_of(value, DATASET, LOADER)


def _is_pair(value: Any) -> bool:
    """Whether a value is a pair of data sets, for training and for testing."""
    return isinstance(value, tuple) and len(value) == 2 and all(map(is_data_set, value))


def is_torch_data(value: Any) -> bool:
    """Whether a value is a Dataset or DataLoader, or a list or dict of these or of pairs of them, one per client.

    Raises:
        ArgumentError: for a list or dict of data sets and other values, and for a data set of Hugging Face.
    """
    if is_data_set(value):
        return True
    entries: list[Any] = [value]
    if isinstance(value, Mapping):
        entries = list(value.values())
    elif isinstance(value, list | tuple):
        entries = list(value)
    if any(_is_of(entry, *HUGGING_FACE) for entry in (value, *entries)):
        text = "is a data set of Hugging Face; accepted: its folder, as save_to_disk writes it"
        raise ArgumentError("x", f"{text}, with pfl.data.huggingface(FOLDER, client=COLUMN)")
    sets = [is_data_set(entry) for entry in entries]
    pairs = [_is_pair(entry) for entry in entries]
    if not any(sets) and not any(pairs):
        return False
    if not all(sets) and not all(pairs):
        text = "has a data set for some clients; accepted: one for each, or a pair (train, test) for each"
        raise ArgumentError("x", text)
    return True


def read_torch(data: Any) -> TorchData:
    """Reads all examples of a Dataset or DataLoader, or of one or of a pair of them for each client in a list or dict.

    Raises:
        ArgumentError: if there are none, or they are no pairs of arrays with equal shapes and types.
    """
    if is_data_set(data):
        x, y = _read(data, "x")
        return TorchData(x, y)
    names = list(data) if isinstance(data, Mapping) else list(range(len(data)))
    has_tests = _is_pair(data[names[0]])
    parts = []
    clients = []
    tests = []
    for name in names:
        sets = data[name] if has_tests else (data[name],)
        for split, data_set in enumerate(sets):
            argument = f"x[{name!r}][{split}]" if has_tests else f"x[{name!r}]"
            x, y = _read(data_set, argument)
            if not len(y):
                raise ArgumentError(argument, "is a data set without examples")
            _check_alike(parts[0] if parts else (x, y), (x, y), argument)
            parts.append((x, y))
            clients.append(name)
            tests.append(split == 1)
    x = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(x for x, _ in parts))
    y = np.concatenate([y for _, y in parts])
    sizes = [len(y) for _, y in parts]
    is_test = np.repeat(tests, sizes) if has_tests else None
    return TorchData(x, y, np.repeat(np.asarray(clients), sizes), is_test)


def _check_alike(
    first: tuple[PyTree, np.ndarray], other: tuple[PyTree, np.ndarray], name: str
) -> None:
    """Raises `ArgumentError` if examples (x, y) of a data set differ from those of the first one in shape or type."""
    for number, (argument, what) in enumerate((("x", "examples"), ("y", "targets"))):
        ours = _described(first[number], argument)
        others = _described(other[number], argument)
        if ours != others:
            text = f"has {what} {others}, but the first data set has {ours}"
            raise ArgumentError(name, f"{text}; accepted: one shape and type for all clients")


def _described(values: PyTree, argument: str) -> str:
    """The shapes of examples and the sorts of their numbers, in words. Pixels are a sort of their own in x."""
    sorts = {"b": "booleans", "i": "integers", "u": "integers", "f": "floats", "U": "texts"}

    def describe(leaf: np.ndarray) -> str:
        is_pixel = argument == "x" and leaf.dtype == np.uint8
        sort = "pixels" if is_pixel else sorts.get(leaf.dtype.kind, str(leaf.dtype))
        return f"{sort} {leaf.shape[1:]}"

    described = jax.tree.map(describe, values)
    return described if isinstance(described, str) else str(described)


def _read(data: Any, name: str) -> tuple[PyTree, np.ndarray]:
    """All examples of one Dataset or DataLoader."""
    if hasattr(data, "sampler"):
        if not _takes_all(data):
            return _stacked(_rows_of_batches(data, name), name)
        data = data.dataset
    tensors = getattr(data, "tensors", None)
    if isinstance(tensors, tuple) and len(tensors) == 2:
        x, y = tensors
        return to_numpy(name, x), to_numpy("y", y)
    is_stream = _is_of(data, ITERABLE)
    is_indexed = not is_stream and hasattr(data, "__getitem__") and hasattr(data, "__len__")
    rows = (data[row] for row in range(len(data))) if is_indexed else iter(data)
    return _stacked(rows, name)


def _takes_all(loader: Any) -> bool:
    """Whether a DataLoader gives each example of its data set once, in mini-batches that PyTorch stacks."""
    sampler = type(loader.sampler).__name__
    is_plain = sampler == "SequentialSampler"
    is_shuffled = sampler == "RandomSampler" and not loader.sampler.replacement
    is_all = is_shuffled and loader.sampler.num_samples == len(loader.dataset)
    collate = getattr(loader.collate_fn, "__name__", "")
    return (is_plain or is_all) and collate in ("default_collate", "default_convert")


def _rows_of_batches(loader: Any, name: str) -> Iterable[Any]:
    """The examples of a DataLoader's mini-batches."""
    for batch in loader:
        x, y = _pair(batch, name)
        arrays = jax.tree.map(lambda leaf: to_numpy(name, leaf), x)
        targets = to_numpy("y", y)
        for row in range(len(targets)):
            yield jax.tree.map(lambda leaf, row=row: leaf[row], arrays), targets[row]


def _pair(example: Any, name: str) -> tuple[Any, Any]:
    """An example's inputs and target."""
    if not isinstance(example, Sequence) or len(example) != 2:
        text = f"is a data set of {shown(type(example).__name__)}; {ACCEPTED}"
        raise ArgumentError(name, text)
    x, y = example
    return x, y


def _stacked(rows: Iterable[Any], name: str) -> tuple[PyTree, np.ndarray]:
    """Examples (x, y) as arrays."""
    inputs = []
    targets = []
    for row in rows:
        x, y = _pair(row, name)
        inputs.append(jax.tree.map(lambda leaf: _array(leaf, name), x, is_leaf=_is_list))
        targets.append(_array(y, "y"))
    if not inputs:
        raise ArgumentError(name, "is a data set without examples")
    try:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *inputs), np.stack(targets)
    except ValueError as error:
        text = "is a data set of examples that differ in shape; accepted: one shape, such as after padding"
        raise ArgumentError(name, text) from error


def _is_list(value: Any) -> bool:
    """Whether an input is a list, which is an array and no tree."""
    return isinstance(value, list)


def _array(value: Any, name: str) -> np.ndarray:
    """A tensor, array, number or list of numbers of one example."""
    if _is_list(value):
        return to_numpy(name, value)
    is_number = isinstance(value, numbers.Number | np.generic | str)
    if not is_number and not hasattr(value, "shape"):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        hint = "; torchvision.transforms.ToTensor() converts images" if "PIL" in kind else ""
        raise ArgumentError(name, f"is a data set of {kind}; {ACCEPTED}{hint}")
    if is_number:
        return np.asarray(value)
    return to_numpy(name, value)
