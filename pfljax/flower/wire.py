"""Trees as named NumPy arrays, as they travel between a server and its nodes, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract.errors import RunError
from pfljax.contract.types import Array, PyTree

Arrays = dict[str, np.ndarray]


def names_of(like: PyTree) -> list[str]:
    """The name of each leaf of a tree: its keys, fields and positions."""
    leaves = jax.tree_util.tree_leaves_with_path(like)
    return [jax.tree_util.keystr(path, simple=True, separator=".") or "value" for path, _ in leaves]


def pack(section: str, tree: PyTree, mask: PyTree | None = None) -> Arrays:
    """The leaves of a tree as arrays, under the names SECTION/LEAF.

    Args:
        section: Name of the tree.
        tree: Arrays.
        mask: A tree of bools: which leaves travel. None: all.
    """
    leaves = jax.tree.leaves(tree)
    travels = [True] * len(leaves) if mask is None else jax.tree.leaves(mask)
    arrays: Arrays = {}
    for name, leaf, is_sent in zip(names_of(tree), leaves, travels, strict=True):
        if is_sent:
            arrays[f"{section}/{name}"] = as_numpy(leaf)
    return arrays


def unpack(
    section: str, like: PyTree, arrays: Mapping[str, np.ndarray], mask: PyTree | None = None
) -> PyTree:
    """The tree of which `pack` made arrays; leaves that do not travel are zeros.

    Args:
        section: Name of the tree.
        like: Shapes and types of its arrays.
        arrays: What arrived.
        mask: As in `pack`.

    Raises:
        RunError: if an array is missing, or has another shape.
    """
    leaves, structure = jax.tree.flatten(like)
    travels = [True] * len(leaves) if mask is None else jax.tree.leaves(mask)
    values = []
    for name, leaf, is_sent in zip(names_of(like), leaves, travels, strict=True):
        if not is_sent:
            values.append(zeros_of(leaf))
            continue
        full_name = f"{section}/{name}"
        if full_name not in arrays:
            raise RunError(f"a message lacks {full_name}; server and nodes need the same app")
        values.append(as_leaf(full_name, arrays[full_name], leaf))
    return structure.unflatten(values)


def has_section(section: str, arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether a message has arrays of this name."""
    return any(name.startswith(f"{section}/") for name in arrays)


def num_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """Bytes of some arrays."""
    return sum(array.nbytes for array in arrays.values())


def zeros_of(leaf: Any) -> Any:
    """Zeros of a shape and type; for random keys, a key."""
    if is_key(leaf):
        return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return np.zeros(leaf.shape, leaf.dtype)


def int32(value: Any) -> Array:
    """A number as an array ()."""
    return np.asarray(value, np.int32)


def is_key(leaf: Any) -> bool:
    """Whether a leaf has random keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_numpy(leaf: Any) -> np.ndarray:
    """A leaf as an array of one of NumPy's own types: random keys and bfloat16 as integers."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    if array.dtype.kind == "V":  # such as bfloat16
        array = array.view(f"u{array.dtype.itemsize}")
    return array


def as_leaf(name: str, array: np.ndarray, like: Any) -> Any:
    """The leaf of which `as_numpy` made an array. Raises `RunError` for another shape."""
    if is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(array))
    if np.dtype(like.dtype).kind == "V":
        array = array.view(like.dtype)
    if tuple(array.shape) != tuple(like.shape):
        text = f"a message has {name} of shape {array.shape}, expected {tuple(like.shape)}"
        raise RunError(f"{text}; server and nodes need the same app and the same form of data")
    return np.asarray(array, like.dtype)
