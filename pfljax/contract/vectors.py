"""Trees as vectors, and orthonormal rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract.types import Array, PyTree


class Packed(NamedTuple):
    """Arrays as one array.

    Attributes:
        array: Their entries along the last axis, (*leading, n).
        unpack: An array of this shape -> arrays of the shapes that were packed.
    """

    array: Array
    unpack: Callable[[Array], list[Array]]


def pack(arrays: Sequence[Array], num_leading: int = 0) -> Packed:
    """Packs at least one array into one; the first `num_leading` axes, which all share, stay."""
    if len(arrays) == 1 and arrays[0].ndim == num_leading + 1:
        return Packed(arrays[0], lambda packed: [packed])
    leading = arrays[0].shape[:num_leading]
    shapes = [array.shape for array in arrays]
    lengths = [math.prod(shape[num_leading:]) for shape in shapes]
    ends = list(itertools.accumulate(lengths))
    flat = [array.reshape(*leading, length) for array, length in zip(arrays, lengths, strict=True)]
    packed_array = flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=-1)

    def unpack(packed: Array) -> list[Array]:
        pieces = jnp.split(packed, ends[:-1], axis=-1)
        return [part.reshape(shape) for part, shape in zip(pieces, shapes, strict=True)]

    return Packed(packed_array, unpack)


def over_vectors(fn: Callable[[Array], Array], stack: PyTree) -> PyTree:
    """Applies fn, (N, n) to (N, n), to stacked trees, each of which is one vector of n entries."""
    leaves, treedef = jax.tree.flatten(stack)
    if not leaves:
        return stack
    packed = pack(leaves, num_leading=1)
    results = packed.unpack(fn(packed.array))
    same_types = [result.astype(leaf.dtype) for result, leaf in zip(results, leaves, strict=True)]
    return jax.tree.unflatten(treedef, same_types)


def orthonormal(rows: Array) -> Array:
    """Orthonormal rows (..., r, n) that span the given ones; zeros for rows that add nothing.

    By Gram and Schmidt, twice: clients do this side by side, where LAPACK's decompositions may wait for each other.
    """

    def add_row(basis: jax.Array, n: Array) -> tuple[jax.Array, None]:
        # v <- v - sum_r q_r <q_r, v>, twice
        before = rows[..., n, :]
        row = before
        for _ in range(2):
            coefficients = jnp.einsum("...ro,...o->...r", basis, row)
            row = row - jnp.einsum("...ro,...r->...o", basis, coefficients)

        # q_n = v / |v|, or zeros if next to nothing of the row is left
        norm = jnp.linalg.norm(row, axis=-1, keepdims=True)
        norm_before = jnp.linalg.norm(before, axis=-1, keepdims=True)
        is_new = (norm > 1e-5 * norm_before) & (norm > 0)
        divisor = jnp.where(is_new, norm, 1)
        row = jnp.where(is_new, row / divisor, 0)
        return basis.at[..., n, :].set(row), None

    basis = jnp.zeros_like(rows)
    numbers = jnp.arange(rows.shape[-2])
    basis, _ = jax.lax.scan(add_row, basis, numbers)
    return basis
