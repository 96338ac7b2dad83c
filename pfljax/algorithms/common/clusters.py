"""Spectral clusters of clients, from how similar each two of them are.

They are those of scikit-learn's SpectralClustering, with labels by the rotation of Yu and Shi, "Multiclass spectral
clustering" (ICCV 2003).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pfljax.contract.types import Array

ROTATIONS = 20  # alternations between labels and rotation; a few are enough
TINY = 1e-12  # least degree of a client, and least norm of a row of eigenvectors


def spectral_clusters(affinity: Array, num: int) -> Array:
    """(K,) labels below `num`, from symmetric, positive affinities (K, K); the diagonal does not count.

    Normalized cuts: takes the eigenvectors of D^-1/2 A D^-1/2 with the largest eigenvalues, normalizes their rows, and
    rotates them as close to cluster indicators as possible. Computes all eigenvectors, O(K^3) per round.
    """
    _, vectors = jnp.linalg.eigh(normalized(affinity))
    rows = vectors[:, -num:]
    rows = rows / jnp.maximum(jnp.linalg.norm(rows, axis=1, keepdims=True), TINY)

    # Begin with axes along rows that are as orthogonal as possible.
    def add_axis(number: Array, carry: tuple[jax.Array, Array]) -> tuple[jax.Array, Array]:
        axes, nearness = carry
        nearness = nearness + jnp.abs(rows @ axes[number - 1])
        return axes.at[number].set(rows[jnp.argmin(nearness)]), nearness

    first_axes = jnp.zeros((num, num)).at[0].set(rows[0])
    axes, _ = jax.lax.fori_loop(1, num, add_axis, (first_axes, jnp.zeros(len(rows))))

    # Alternate between the labels, and the rotation that fits them best.
    def rotate(_: Array, axes: Array) -> Array:
        indicators = jax.nn.one_hot(jnp.argmax(rows @ axes.T, axis=1), num)
        left, _, right = jnp.linalg.svd(indicators.T @ rows)
        return left @ right

    axes = jax.lax.fori_loop(0, ROTATIONS, rotate, axes)
    return jnp.argmax(rows @ axes.T, axis=1)


def by_eigengap(affinity: Array, most: int) -> Array:
    """(K,) labels of 2 to `most` `spectral_clusters`: of as many as have the largest gap between eigenvalues.

    All in one cluster if K is less than 3.
    """
    most = min(most, len(affinity) - 1)
    if most < 2:
        return jnp.zeros(len(affinity), jnp.int32)
    values = jnp.linalg.eigvalsh(normalized(affinity))[::-1]
    gaps = values[1:most] - values[2 : most + 1]  # after the second to the last eigenvalue

    def clusters(affinity: Array, num: int) -> Array:
        return spectral_clusters(affinity, num).astype(jnp.int32)

    branches = [functools.partial(clusters, num=num) for num in range(2, most + 1)]
    return jax.lax.switch(jnp.argmax(gaps), branches, affinity)


def normalized(affinity: Array) -> Array:
    """D^-1/2 A D^-1/2 of affinities A, without their diagonal."""
    affinity = affinity * (1 - jnp.eye(len(affinity)))
    scale = 1 / jnp.sqrt(jnp.maximum(affinity.sum(axis=1), TINY))
    return affinity * scale[:, None] * scale[None, :]
