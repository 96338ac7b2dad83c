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
    """Returns a + b, leaf by leaf.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> tree.add({"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([10.0, 20.0])})["w"].tolist()
        [11.0, 22.0]
    """
    return jax.tree.map(jnp.add, a, b)


def subtract(a: PyTree, b: PyTree) -> PyTree:
    """Returns a - b, leaf by leaf.

    Examples:
        The change of a client's model, which starts from the global one:

        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> global_params = {"w": jnp.array([1.0, 2.0])}
        >>> params = {"w": jnp.array([1.5, 1.0])}
        >>> tree.subtract(params, global_params)["w"].tolist()
        [0.5, -1.0]
    """
    return jax.tree.map(jnp.subtract, a, b)


def per_row(rows: Array, leaf: Array) -> Array:
    """Reshapes `rows` (N,) so that it broadcasts against a stacked leaf (N, ...).

    Args:
        rows: One value per row. Shape (N,).
        leaf: A leaf with at least as many axes.

    Returns:
        The values. Shape (N, 1, ..., 1).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> leaf = jnp.ones((2, 3, 4))
        >>> tree.per_row(jnp.array([1.0, 2.0]), leaf).shape
        (2, 1, 1)
    """
    ones = (1,) * (leaf.ndim - rows.ndim)
    return rows.reshape(rows.shape + ones)


def scale(tree: PyTree, rows: Array | float) -> PyTree:
    """Multiplies row n of every leaf by rows[n], or everything by a scalar.

    Args:
        tree: A stacked tree; any tree if `rows` is a scalar.
        rows: One factor per row, shape (N,), or a scalar.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> models = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
        >>> tree.scale(models, jnp.array([1.0, 10.0]))["w"].tolist()
        [[1.0, 2.0], [30.0, 40.0]]
        >>> tree.scale(models, 0.5)["w"].tolist()
        [[0.5, 1.0], [1.5, 2.0]]
    """
    rows = jnp.asarray(rows)
    return jax.tree.map(lambda leaf: leaf * per_row(rows, leaf), tree)


def where(rows: Array, a: PyTree, b: PyTree) -> PyTree:
    """Selects row n of `a` where rows[n] is True, otherwise row n of `b`.

    Args:
        rows: Booleans. Shape (N,).
        a: A stacked tree of N rows.
        b: A tree of the same structure and shapes.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> trained = {"w": jnp.array([[1.0, 1.0], [2.0, 2.0]])}
        >>> before = {"w": jnp.zeros((2, 2))}
        >>> tree.where(jnp.array([True, False]), trained, before)["w"].tolist()
        [[1.0, 1.0], [0.0, 0.0]]
    """
    return jax.tree.map(lambda x, y: jnp.where(per_row(rows, x), x, y), a, b)


def squared_distance(a: PyTree, b: PyTree) -> Array:
    """Returns the squared L2 distance over all leaves. Shape ().

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> a = {"w": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}
        >>> b = {"w": jnp.array([1.0, 0.0]), "b": jnp.array(2.0)}
        >>> float(tree.squared_distance(a, b))
        5.0
    """
    squares = jax.tree.map(lambda x, y: jnp.square(x - y).sum(), a, b)
    return _sum_of_leaves(squares)


def inner(a: PyTree, b: PyTree) -> Array:
    """Returns the inner product over all leaves. Shape ().

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> a = {"w": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}
        >>> b = {"w": jnp.array([1.0, 0.0]), "b": jnp.array(2.0)}
        >>> float(tree.inner(a, b))
        7.0
    """
    return _sum_of_leaves(jax.tree.map(jnp.vdot, a, b))


def _sum_of_leaves(tree: PyTree) -> Array:
    return jnp.asarray(sum(jax.tree.leaves(tree)))


def map_rows(fn: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Applies a function to every stacked leaf.

    Pooled examples, which clients share, are a leaf: the function gets their index, whose rows are the clients.

    Args:
        fn: Function of a leaf (N, ...).
        tree: A stacked tree.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> models = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
        >>> tree.map_rows(jnp.flipud, models)["w"].tolist()
        [[3.0, 4.0], [1.0, 2.0]]
    """

    def map_leaf(leaf: Any) -> Any:
        if is_pooled(leaf):
            return dataclasses.replace(leaf, index=fn(leaf.index))
        return fn(leaf)

    return jax.tree.map(map_leaf, tree, is_leaf=is_pooled)


def take(tree: PyTree, index: Array | tuple[Array, ...]) -> PyTree:
    """Returns leaf[index] of every leaf.

    Args:
        tree: A stacked tree.
        index: Index of a row, an array of such indices, or a tuple of them for several axes. They must be in range,
            which is not checked.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> models = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])}
        >>> tree.take(models, jnp.array([2, 0]))["w"].tolist()
        [[5.0, 6.0], [1.0, 2.0]]
    """
    return map_rows(lambda leaf: leaf.at[index].get(mode="promise_in_bounds"), tree)


def shapes_of_rows(tree: PyTree, *num: int) -> PyTree:
    """Returns the shapes and types of rows of a stacked tree. Those of pooled examples are of copies.

    Args:
        tree: A stacked tree.
        num: Number of rows; without it, those of one row without the leading axis.

    Returns:
        A tree of `jax.ShapeDtypeStruct`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> models = {"w": jnp.zeros((8, 2, 3))}
        >>> tree.shapes_of_rows(models)["w"]
        ShapeDtypeStruct(shape=(2, 3), dtype=float32)
        >>> tree.shapes_of_rows(models, 4)["w"]
        ShapeDtypeStruct(shape=(4, 2, 3), dtype=float32)
    """

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*num, *leaf.shape[1:]), leaf.dtype)

    return jax.tree.map(shape, tree, is_leaf=is_pooled)


def first(tree: PyTree) -> PyTree:
    """Returns row 0 of every leaf, such as the only model of a stack (1, ...).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> tree.first({"w": jnp.array([[1.0, 2.0]])})["w"].tolist()
        [1.0, 2.0]
    """
    return jax.tree.map(lambda leaf: leaf[0], tree)


def repeat(tree: PyTree, num: int) -> PyTree:
    """Repeats the only row of a stack (1, ...).

    Args:
        tree: A stacked tree with one row.
        num: Number of copies.

    Returns:
        A tree of leaves (num, ...).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> tree.repeat({"w": jnp.array([[1.0, 2.0]])}, 3)["w"].tolist()
        [[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]
    """

    def copies(leaf: Array) -> Array:
        return jnp.broadcast_to(leaf[0], (num, *leaf.shape[1:]))

    return jax.tree.map(copies, tree)


def mix(rows: Array, tree: PyTree) -> PyTree:
    """Returns mixtures of N stacked models: sum_n rows[..., n] tree[n].

    Args:
        rows: Weights. Shape (N,), or (K, N) for K mixtures.
        tree: A stacked tree of N rows.

    Returns:
        The mixture without a leading axis, or K stacked mixtures.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> models = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
        >>> tree.mix(jnp.array([0.5, 0.5]), models)["w"].tolist()
        [2.0, 3.0]
        >>> tree.mix(jnp.array([[1.0, 0.0], [0.5, 0.5]]), models)["w"].tolist()
        [[1.0, 2.0], [2.0, 3.0]]
    """
    return jax.tree.map(lambda leaf: jnp.tensordot(rows, leaf, axes=1), tree)


def partition(tree: PyTree, mask: PyTree) -> tuple[PyTree, PyTree]:
    """Divides a tree in two: the leaves that a mask selects, and the others.

    Args:
        tree: Any tree.
        mask: A tree of bools with the same structure.

    Returns:
        The selected leaves and the others, as trees with None in place of leaves that are left out.

    Examples:
        >>> from pfljax.author import tree
        >>> params = {"body": 1.0, "head": 2.0}
        >>> tree.partition(params, {"body": False, "head": True})
        ({'body': None, 'head': 2.0}, {'body': 1.0, 'head': None})
    """
    chosen = jax.tree.map(lambda is_chosen, leaf: leaf if is_chosen else None, mask, tree)
    others = jax.tree.map(lambda is_chosen, leaf: None if is_chosen else leaf, mask, tree)
    return chosen, others


def combine(a: PyTree, b: PyTree) -> PyTree:
    """Combines the two trees of `partition`.

    Args:
        a: The first tree, with None where it has no leaf.
        b: The second one, which has these leaves.

    Examples:
        >>> from pfljax.author import tree
        >>> tree.combine({"body": None, "head": 2.0}, {"body": 1.0, "head": None})
        {'body': 1.0, 'head': 2.0}
    """

    def is_left_out(leaf: Any) -> bool:
        return leaf is None

    return jax.tree.map(lambda x, y: y if x is None else x, a, b, is_leaf=is_left_out)


def complement(mask: PyTree) -> PyTree:
    """Negates a tree of bools.

    Examples:
        >>> from pfljax.author import tree
        >>> tree.complement({"body": False, "head": True})
        {'body': True, 'head': False}
    """
    return jax.tree.map(lambda leaf: not leaf, mask)


def overlap(a: PyTree, b: PyTree) -> bool:
    """Returns whether two masks, trees of bools, are both True for some leaf.

    Examples:
        >>> from pfljax.author import tree
        >>> head = {"body": False, "head": True}
        >>> tree.overlap(head, tree.complement(head))
        False
    """
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any(x and y for x, y in pairs)


def inner_products(a: PyTree, b: PyTree) -> Array:
    """Returns the inner products of N stacked models with M others. Shape (N, M).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> a = {"w": jnp.array([[1.0, 0.0], [0.0, 1.0]])}
        >>> b = {"w": jnp.array([[2.0, 3.0]])}
        >>> tree.inner_products(a, b).tolist()
        [[2.0], [3.0]]
    """

    def flat(leaf: Array) -> Array:
        return leaf.reshape(leaf.shape[0], -1)

    products = jax.tree.map(lambda x, y: flat(x) @ flat(y).T, a, b)
    return _sum_of_leaves(products)


def stack_one(tree: PyTree) -> PyTree:
    """Adds a leading axis of one, which makes a model a stack of one model.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> tree.stack_one({"w": jnp.array([1.0, 2.0])})["w"].tolist()
        [[1.0, 2.0]]
    """
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)


def num_rows(tree: PyTree) -> int:
    """Returns the number of rows of a stacked tree: the length of the leading axis.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> tree.num_rows({"w": jnp.zeros((8, 2, 3)), "b": jnp.zeros(8)})
        8
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_pooled)
    return leaves[0].shape[0]


def num_bytes(tree: PyTree) -> int:
    """Returns the bytes of all leaves, which are arrays or have shapes and types like them.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> tree.num_bytes({"w": jnp.zeros((8, 2, 3)), "b": jnp.zeros(8)})
        224
    """
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def row_bytes(tree: PyTree) -> int:
    """Returns the bytes of one row of a stacked tree. Pooled examples count as copies for each client.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pfljax.author import tree
        >>> tree.row_bytes({"w": jnp.zeros((8, 2, 3)), "b": jnp.zeros(8)})
        28
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_pooled)
    return sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in leaves)
