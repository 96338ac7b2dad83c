"""Clusters of clients, from how similar each two of them are.

Spectral clusters are those of scikit-learn's SpectralClustering, with labels by the rotation of Yu and Shi, "Multiclass
spectral clustering" (ICCV 2003). Bipartitions are agglomerative.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pfljax.contract.types import Array

ROTATIONS = 20  # alternations between labels and rotation; a few are enough


def spectral_clusters(affinity: Array, num: int) -> Array:
    """(K,) labels below `num`, from symmetric, positive affinities (K, K); the diagonal does not count.

    Normalized cuts: takes the eigenvectors of D^-1/2 A D^-1/2 with the largest eigenvalues, normalizes their rows, and
    rotates them as close to cluster indicators as possible. Computes all eigenvectors, O(K^3) per round.
    """
    affinity = affinity * (1 - jnp.eye(len(affinity)))
    scale = 1 / jnp.sqrt(jnp.maximum(affinity.sum(axis=1), 1e-12))
    _, vectors = jnp.linalg.eigh(affinity * scale[:, None] * scale[None, :])
    rows = vectors[:, -num:]
    rows = rows / jnp.maximum(jnp.linalg.norm(rows, axis=1, keepdims=True), 1e-12)

    def add_axis(number, carry):
        axes, near = carry
        near = near + jnp.abs(rows @ axes[number - 1])
        return axes.at[number].set(rows[jnp.argmin(near)]), near

    def turn(_, axes):
        chosen = jax.nn.one_hot(jnp.argmax(rows @ axes.T, axis=1), num)
        left, _, right = jnp.linalg.svd(chosen.T @ rows)
        return left @ right

    start: Any = (jnp.zeros((num, num)).at[0].set(rows[0]), jnp.zeros(len(rows)))
    axes, _ = jax.lax.fori_loop(1, num, add_axis, start)
    axes = jax.lax.fori_loop(0, ROTATIONS, turn, axes)
    return jnp.argmax(rows @ axes.T, axis=1)


def by_eigengap(affinity: Array, most: int) -> Array:
    """(K,) labels of 2 to `most` `spectral_clusters`: of as many as have the largest gap between eigenvalues.

    All in one cluster if K is less than 3.
    """
    most = min(most, len(affinity) - 1)
    if most < 2:
        return jnp.zeros(len(affinity), jnp.int32)
    apart = affinity * (1 - jnp.eye(len(affinity)))
    scale = 1 / jnp.sqrt(jnp.maximum(apart.sum(axis=1), 1e-12))
    values = jnp.linalg.eigvalsh(apart * scale[:, None] * scale[None, :])[::-1]
    gaps = values[1:most] - values[2 : most + 1]  # after the second to the last eigenvalue
    branches = [lambda a, n=n: spectral_clusters(a, n).astype(jnp.int32) for n in range(2, most + 1)]
    return jax.lax.switch(jnp.argmax(gaps), branches, affinity)


def bipartition(similarity: Array, member: Array, linkage: str = "single") -> Array:
    """(K,) bool: which members leave for a new cluster; the first member stays.

    Agglomerative clustering: merges the two most similar parts until two are left.

    Args:
        similarity: (K, K), symmetric.
        member: (K,) bool, at least two of them true.
        linkage: Similarity of two parts: the largest between their members (single) or the least (complete).
    """
    num = member.shape[0]
    both = member[:, None] & member[None, :] & ~jnp.eye(num, dtype=bool)
    alike = jnp.where(both, similarity, -jnp.inf)
    combine = jnp.maximum if linkage == "single" else jnp.minimum

    def merge(carry):
        alike, part, left = carry
        i, j = jnp.divmod(jnp.argmax(alike), num)
        i, j = jnp.minimum(i, j), jnp.maximum(i, j)
        row = combine(alike[i], alike[j]).at[jnp.array([i, j])].set(-jnp.inf)
        alike = alike.at[i].set(row).at[:, i].set(row).at[j].set(-jnp.inf).at[:, j].set(-jnp.inf)
        return alike, jnp.where(part == j, i, part), left - 1

    carry = (alike, jnp.arange(num), member.sum())
    _, part, _ = jax.lax.while_loop(lambda carry: carry[2] > 2, merge, carry)
    return member & (part != part[jnp.argmax(member)])
