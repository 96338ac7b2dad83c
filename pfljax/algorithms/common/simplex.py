"""Points of a simplex for clients, by what changed for them in training.

Grinwald, Wiesner, Nakajima, "Federated learning over connected modes" (NeurIPS 2024).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from optax.projections import projection_simplex

from pfljax.contract import tree
from pfljax.contract.types import Array, Key, PyTree
from pfljax.exchange.plan import ExecutionPlan

SCALES = 1000  # number of values of z
CLOSEST = 1e-4  # least value of z, and least distance in the energy
NEGLIGIBLE = 1e-6  # a component's variance, relative to the first one's, that is rounding


def draw(key: Key, point: Array, radius: Array | float) -> Array:
    """A point (M,) of the simplex: from the whole of it for radius inf, otherwise from a region around a point."""
    direction_key, radius_key = jax.random.split(key)
    anywhere = jax.random.exponential(direction_key, point.shape)
    direction = jax.random.uniform(direction_key, point.shape, minval=-1)
    direction /= jnp.maximum(jnp.abs(direction).sum(), jnp.finfo(jnp.float32).tiny)
    near = point + jax.random.uniform(radius_key) * jnp.where(jnp.isinf(radius), 0, radius) * direction
    alpha = jnp.where(jnp.isinf(radius), anywhere, jnp.maximum(near, 0))
    return alpha / alpha.sum()


def components(plan: ExecutionPlan, changes: PyTree, known: Array, num: int) -> Array:
    """(K, num) principal components of the known changes; 0 for the others, and where there is no variance.

    In each direction, the change with the largest absolute value is positive, as in scikit-learn.
    """
    mean = tree.mix(known / jnp.maximum(known.sum(), 1), changes)
    centered = jax.tree.map(lambda leaf, mean: jnp.where(tree.per_row(known, leaf), leaf - mean, 0), changes, mean)
    variances, vectors = jnp.linalg.eigh(plan.gram(centered))
    variances, vectors = variances[::-1][:num], vectors[:, ::-1][:, :num]
    directions = [leaf.reshape(len(variances), -1) for leaf in jax.tree.leaves(tree.mix(vectors.T, centered))]
    directions = jnp.concatenate(directions, axis=1)
    largest = jnp.take_along_axis(directions, jnp.abs(directions).argmax(axis=1)[:, None], axis=1)[:, 0]
    scale = jnp.where(variances > NEGLIGIBLE * variances[0], jnp.sqrt(jnp.maximum(variances, 0)), 0)
    found = vectors * scale * jnp.where(largest < 0, -1, 1)
    return jnp.pad(found, ((0, 0), (0, num - found.shape[1])))


def projected(plan: ExecutionPlan, changes: PyTree, known: Array, num: int) -> Array:
    """(K, M) the points beta of clients whose changes are known; the simplex's center for the others.

    Args:
        plan: Maps over rows.
        changes: Leaves (K, M, ...).
        known: (K,) bool.
        num: M.
    """
    kappa = components(plan, changes, known, num)
    kappa -= kappa.max(axis=1, keepdims=True)  # the same projection, with less rounding
    pairs = known[:, None] & known & ~jnp.eye(len(known), dtype=bool)

    def one(best, z):
        points = plan.over_rows(lambda row: projection_simplex(row, z), kappa)
        points /= points.sum(axis=1, keepdims=True)
        squares = jnp.square(points[:, None] - points).sum(axis=-1)
        energy = jnp.where(pairs, 1 / jnp.maximum(squares, CLOSEST**2), 0).sum()
        better = energy < best[0]
        return (jnp.where(better, energy, best[0]), jnp.where(better, points, best[1])), None

    begin = jnp.float32(jnp.inf), jnp.full_like(kappa, 1 / num)
    points = jax.lax.scan(one, begin, jnp.linspace(CLOSEST, 1, SCALES))[0][1]
    return jnp.where(known[:, None], points, 1 / num)
