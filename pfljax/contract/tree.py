"""Arithmetic on stacked pytrees: a leading axis of K clients or N models on every leaf."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pfljax.contract.pooled import is_pooled
from pfljax.contract.types import Array, PyTree

__all__ = [
    "add",
    "combine",
    "complement",
    "first",
    "inner",
    "inner_products",
    "map_rows",
    "mix",
    "num_bytes",
    "num_rows",
    "overlap",
    "partition",
    "per_row",
    "repeat",
    "row_bytes",
    "scale",
    "shapes_of_rows",
    "squared_distance",
    "stack_one",
    "subtract",
    "take",
    "where",
]


def __dir__() -> list[str]:
    return __all__


def add(a: PyTree, b: PyTree) -> PyTree:
    """Leafwise a + b."""
    return jax.tree.map(jnp.add, a, b)


def subtract(a: PyTree, b: PyTree) -> PyTree:
    """Leafwise a - b."""
    return jax.tree.map(jnp.subtract, a, b)


def per_row(rows: Array, leaf: Array) -> Array:
    """Shapes `rows` (N,) so that it broadcasts against a stacked leaf (N, ...)."""
    ones = (1,) * (leaf.ndim - rows.ndim)
    return rows.reshape(rows.shape + ones)


def scale(tree: PyTree, rows: Array | float) -> PyTree:
    """Multiplies row n of every leaf by rows[n] (or everything by a scalar)."""
    rows = jnp.asarray(rows)
    return jax.tree.map(lambda leaf: leaf * per_row(rows, leaf), tree)


def where(rows: Array, a: PyTree, b: PyTree) -> PyTree:
    """Row n of `a` where rows[n] holds, else row n of `b`."""
    return jax.tree.map(lambda x, y: jnp.where(per_row(rows, x), x, y), a, b)


def squared_distance(a: PyTree, b: PyTree) -> Array:
    """() squared L2 distance over all leaves."""
    squares = jax.tree.map(lambda x, y: jnp.square(x - y).sum(), a, b)
    return _sum_of_leaves(squares)


def inner(a: PyTree, b: PyTree) -> Array:
    """() inner product over all leaves."""
    return _sum_of_leaves(jax.tree.map(jnp.vdot, a, b))


def _sum_of_leaves(tree: PyTree) -> Array:
    return jnp.asarray(sum(jax.tree.leaves(tree)))


def map_rows(fn: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Applies fn to every stacked leaf; for pooled examples, to the index, whose rows are the clients."""

    def map_leaf(leaf: Any) -> Any:
        if is_pooled(leaf):
            return dataclasses.replace(leaf, index=fn(leaf.index))
        return fn(leaf)

    return jax.tree.map(map_leaf, tree, is_leaf=is_pooled)


def take(tree: PyTree, index: Array | tuple[Array, ...]) -> PyTree:
    """leaf[index] of every leaf; indices must be in range."""
    return map_rows(lambda leaf: leaf.at[index].get(mode="promise_in_bounds"), tree)


def shapes_of_rows(tree: PyTree, *num: int) -> PyTree:
    """Shapes and types of `num` rows of a stacked tree, or of one without its axis; pooled examples are copied."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*num, *leaf.shape[1:]), leaf.dtype)

    return jax.tree.map(shape, tree, is_leaf=is_pooled)


def first(tree: PyTree) -> PyTree:
    """Row 0 of every leaf: the only model of a stack (1, ...)."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def repeat(tree: PyTree, num: int) -> PyTree:
    """`num` copies (num, ...) of the only row of a stack (1, ...)."""

    def copies(leaf: Array) -> Array:
        return jnp.broadcast_to(leaf[0], (num, *leaf.shape[1:]))

    return jax.tree.map(copies, tree)


def mix(rows: Array, tree: PyTree) -> PyTree:
    """sum_n rows[..., n] tree[n]: a mixture (...) of N stacked models, or several (K, ...) for rows (K, N)."""
    return jax.tree.map(lambda leaf: jnp.tensordot(rows, leaf, axes=1), tree)


def partition(tree: PyTree, mask: PyTree) -> tuple[PyTree, PyTree]:
    """The leaves where the mask, a tree of bools, is True, and the others; None replaces leaves left out."""
    chosen = jax.tree.map(lambda is_chosen, leaf: leaf if is_chosen else None, mask, tree)
    others = jax.tree.map(lambda is_chosen, leaf: None if is_chosen else leaf, mask, tree)
    return chosen, others


def combine(a: PyTree, b: PyTree) -> PyTree:
    """Undoes `partition`."""

    def is_left_out(leaf: Any) -> bool:
        return leaf is None

    return jax.tree.map(lambda x, y: y if x is None else x, a, b, is_leaf=is_left_out)


def complement(mask: PyTree) -> PyTree:
    """Negates a tree of bools."""
    return jax.tree.map(lambda leaf: not leaf, mask)


def overlap(a: PyTree, b: PyTree) -> bool:
    """Whether two masks, trees of bools, are both True for some leaf."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any(x and y for x, y in pairs)


def inner_products(a: PyTree, b: PyTree) -> Array:
    """(N, M) inner products of N stacked models with M other models."""

    def flat(leaf: Array) -> Array:
        return leaf.reshape(leaf.shape[0], -1)

    products = jax.tree.map(lambda x, y: flat(x) @ flat(y).T, a, b)
    return _sum_of_leaves(products)


def stack_one(tree: PyTree) -> PyTree:
    """Adds a leading axis of one: a stack of a single model."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)


def num_rows(tree: PyTree) -> int:
    """Length of the leading axis."""
    leaves = jax.tree.leaves(tree, is_leaf=is_pooled)
    return leaves[0].shape[0]


def num_bytes(tree: PyTree) -> int:
    """Bytes of all leaves (arrays or ShapeDtypeStructs)."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def row_bytes(tree: PyTree) -> int:
    """Bytes of one row of a stacked tree, with pooled examples copied for each client."""
    leaves = jax.tree.leaves(tree, is_leaf=is_pooled)
    return sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in leaves)
