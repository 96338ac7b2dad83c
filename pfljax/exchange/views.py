"""Views of clients' data in client updates: rows of the stacks, without copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.lazy import LazyArray
from pfljax.contract.pooled import Pooled, is_pooled
from pfljax.contract.types import Array, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowView(LazyArray):
    """One client's row of a stacked array, read lazily: row[index] gathers from the stack."""

    stack: jax.Array | Pooled
    position: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    def __getitem__(self, index: Any) -> Array:
        if isinstance(self.stack, Pooled):
            row = RowView(jnp.asarray(self.stack.index), self.position)
            return self.stack.examples(row[index])
        if index is Ellipsis:
            return jax.lax.dynamic_index_in_dim(self.stack, self.position, keepdims=False)
        return self.stack.at[self.position, index].get(mode="promise_in_bounds")


class Joined(LazyArray):
    """A client's examples followed by others: positions from `size` on read the other array."""

    def __init__(self, base: RowView | Array, size: Array, other: jax.Array) -> None:
        self.base = base
        self.size = size
        self.other = other

    @property
    def shape(self) -> tuple[int, ...]:
        num_own, *features = self.base.shape
        return (num_own + self.other.shape[0], *features)

    def __getitem__(self, index: Any) -> Array:
        # Both are read at positions within their bounds; only one of them counts.
        positions = self.positions(index)
        own_positions = jnp.minimum(positions, self.base.shape[0] - 1)
        base = self.base[own_positions]
        other_positions = jnp.clip(positions - self.size, 0, self.other.shape[0] - 1)
        other = self.other.at[other_positions].get()
        return tree.where(positions < self.size, base, other)


class Chosen(LazyArray):
    """A subset or reordering of a client's examples: position i reads example `order[i]`."""

    def __init__(self, base: RowView | Array, order: Array) -> None:
        self.base = base
        self.order = order

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.order.shape[0], *self.base.shape[1:])

    def __getitem__(self, index: Any) -> Array:
        return self.base[self.order[index]]


def map_examples(fn: Callable[..., Any], *trees: PyTree) -> PyTree:
    """`jax.tree.map` over arrays, views and pooled examples."""
    return jax.tree.map(fn, *trees, is_leaf=lambda node: hasattr(node, "shape"))


def read(view: PyTree, index: Any = ...) -> PyTree:
    """Reads leaf[index] of a view's arrays, such as some of a client's examples; in full by default."""
    return map_examples(lambda leaf: leaf[index], view)


def view(data: PyTree, position: Array) -> PyTree:
    """A client's data: `RowView`s of its arrays, and plain scalars."""

    def view_leaf(leaf: Any) -> Any:
        return RowView(leaf, position) if leaf.ndim > 1 else leaf[position]

    return jax.tree.map(view_leaf, data, is_leaf=is_pooled)
