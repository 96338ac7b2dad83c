"""Trees as vectors, and orthonormal rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pfljax.contract.types import Array, PyTree


def over_vectors(fn: Callable[[Array], Array], stack: PyTree) -> PyTree:
    """Applies fn, (N, n) to (N, n), to stacked trees, each of which is one vector of n entries."""
    leaves, form = jax.tree.flatten(stack)
    if not leaves:
        return stack
    ends = list(itertools.accumulate(math.prod(leaf.shape[1:]) for leaf in leaves))
    found = fn(jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], axis=1))
    parts = jnp.split(found, ends[:-1], axis=1)
    same = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(form, same)


def orthonormal(rows: Array) -> Array:
    """Orthonormal rows (..., r, n) that span the given ones; zeros for rows that add nothing.

    By Gram and Schmidt, twice: clients do this side by side, where LAPACK's decompositions may wait for each other.
    """

    def add(found: jax.Array, n: Array) -> tuple[jax.Array, None]:
        row = given = rows[..., n, :]
        for _ in range(2):
            row = row - jnp.einsum("...ro,...r->...o", found, jnp.einsum("...ro,...o->...r", found, row))
        norm, least = (jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (row, given))
        new = (norm > 1e-5 * least) & (norm > 0)
        return found.at[..., n, :].set(jnp.where(new, row / jnp.where(new, norm, 1), 0)), None

    return jax.lax.scan(add, jnp.zeros_like(rows), jnp.arange(rows.shape[-2]))[0]
