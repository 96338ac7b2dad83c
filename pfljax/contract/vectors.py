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
    flat = [array.reshape(*leading, math.prod(array.shape[num_leading:])) for array in arrays]
    ends = list(itertools.accumulate(array.shape[-1] for array in flat))

    def unpack(packed: Array) -> list[Array]:
        parts = jnp.split(packed, ends[:-1], axis=-1)
        return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]

    return Packed(flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=-1), unpack)


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

    def add(found: jax.Array, n: Array) -> tuple[jax.Array, None]:
        row = given = rows[..., n, :]
        for _ in range(2):
            row = row - jnp.einsum(
                "...ro,...r->...o", found, jnp.einsum("...ro,...o->...r", found, row)
            )
        norm, least = (jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (row, given))
        new = (norm > 1e-5 * least) & (norm > 0)
        return found.at[..., n, :].set(jnp.where(new, row / jnp.where(new, norm, 1), 0)), None

    return jax.lax.scan(add, jnp.zeros_like(rows), jnp.arange(rows.shape[-2]))[0]
