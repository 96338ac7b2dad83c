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


class TorchData(NamedTuple):
    """Examples of PyTorch's data sets.

    Attributes:
        x: (n, *features), or a tree of such arrays.
        y: (n, ...) targets.
        client: (n,) the client of each example, if there is a data set for each; otherwise None.
    """

    x: PyTree
    y: np.ndarray
    client: np.ndarray | None


def is_data_set(value: Any) -> bool:
    """Whether a value is a Dataset or DataLoader of PyTorch."""
    names = {(base.__module__, base.__name__) for base in inspect.getmro(type(value))}
    data_sets = {
        ("torch.utils.data.dataset", "Dataset"),
        ("torch.utils.data.dataloader", "DataLoader"),
    }
    return not names.isdisjoint(data_sets)


def is_torch_data(value: Any) -> bool:
    """Whether a value is a Dataset or DataLoader, or a list or dict of these, one per client."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return bool(value) and all(map(is_data_set, value))
    return is_data_set(value)


def read_torch(data: Any) -> TorchData:
    """Reads all examples of a Dataset or DataLoader, or of one for each client in a list or dict.

    Raises:
        ArgumentError: if there are none, or they are no pairs of arrays with equal shapes.
    """
    if is_data_set(data):
        x, y = _read(data, "x")
        return TorchData(x, y, None)
    is_named = isinstance(data, Mapping)
    names = list(data) if is_named else range(len(data))
    parts = []
    for name in names:
        parts.append(_read(data[name], f"x[{name!r}]"))
    structures = {jax.tree.structure(x) for x, _ in parts}
    shapes = {tuple(leaf.shape[1:] for leaf in jax.tree.leaves(x)) for x, _ in parts}
    if len(structures) > 1 or len(shapes) > 1:
        text = "has data sets whose examples differ in shape; accepted: one shape for all clients"
        raise ArgumentError("x", text)
    x = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(x for x, _ in parts))
    y = np.concatenate([y for _, y in parts])
    sizes = [len(y) for _, y in parts]
    ids = np.asarray(list(names))
    return TorchData(x, y, np.repeat(ids, sizes))


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
    is_indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
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
        inputs.append(jax.tree.map(lambda leaf: _array(leaf, name), x))
        targets.append(_array(y, "y"))
    if not inputs:
        raise ArgumentError(name, "is a data set without examples")
    try:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *inputs), np.stack(targets)
    except ValueError as error:
        text = "is a data set of examples that differ in shape; accepted: one shape, such as after padding"
        raise ArgumentError(name, text) from error


def _array(value: Any, name: str) -> np.ndarray:
    """A tensor, array or number of one example."""
    is_number = isinstance(value, numbers.Number | np.generic | str)
    if not is_number and not hasattr(value, "shape"):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        hint = "; torchvision.transforms.ToTensor() converts images" if "PIL" in kind else ""
        raise ArgumentError(name, f"is a data set of {kind}; {ACCEPTED}{hint}")
    if is_number:
        return np.asarray(value)
    return to_numpy(name, value)
