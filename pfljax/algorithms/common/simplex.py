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
    is_anywhere = jnp.isinf(radius)
    # From the whole simplex
    anywhere = jax.random.exponential(direction_key, point.shape)
    # From the region around the point
    direction = jax.random.uniform(direction_key, point.shape, minval=-1)
    direction /= jnp.maximum(jnp.abs(direction).sum(), jnp.finfo(jnp.float32).tiny)
    distance = jax.random.uniform(radius_key) * jnp.where(is_anywhere, 0, radius)
    near = jnp.maximum(point + distance * direction, 0)
    alpha = jnp.where(is_anywhere, anywhere, near)
    return alpha / alpha.sum()


def components(plan: ExecutionPlan, changes: PyTree, known: Array, num: int) -> Array:
    """(K, num) principal components of the known changes; 0 for the others, and where there is no variance.

    In each direction, the change with the largest absolute value is positive, as in scikit-learn.
    """
    # The known changes, centered.
    means = tree.mix(known / jnp.maximum(known.sum(), 1), changes)

    def center(leaf: Array, mean: Array) -> Array:
        return jnp.where(tree.per_row(known, leaf), leaf - mean, 0)

    centered = jax.tree.map(center, changes, means)

    # Eigenvectors of their inner products, the largest variances first.
    variances, vectors = jnp.linalg.eigh(plan.gram(centered))
    variances = variances[::-1][:num]
    vectors = vectors[:, ::-1][:, :num]

    # The sign of each direction.
    directions = tree.mix(vectors.T, centered)
    flat = [leaf.reshape(len(variances), -1) for leaf in jax.tree.leaves(directions)]
    flat_directions = jnp.concatenate(flat, axis=1)
    index = jnp.abs(flat_directions).argmax(axis=1)
    largest = jnp.take_along_axis(flat_directions, index[:, None], axis=1)[:, 0]
    sign = jnp.where(largest < 0, -1, 1)

    deviation = jnp.sqrt(jnp.maximum(variances, 0))
    scale = jnp.where(variances > NEGLIGIBLE * variances[0], deviation, 0)
    projections = vectors * scale * sign
    return jnp.pad(projections, ((0, 0), (0, num - projections.shape[1])))


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
    is_pair = known[:, None] & known & ~jnp.eye(len(known), dtype=bool)

    def keep_better(best: tuple[Array, Array], z: Array) -> tuple[tuple[Array, Array], None]:
        """The points for the z of least energy so far."""
        least_energy, best_points = best

        def project(row: Array) -> Array:
            return projection_simplex(row, z)

        points = plan.over_rows(project, kappa)
        points /= points.sum(axis=1, keepdims=True)
        squares = jnp.square(points[:, None] - points).sum(axis=-1)
        energy = jnp.where(is_pair, 1 / jnp.maximum(squares, CLOSEST**2), 0).sum()
        is_better = energy < least_energy
        energy = jnp.where(is_better, energy, least_energy)
        return (energy, jnp.where(is_better, points, best_points)), None

    start = (jnp.float32(jnp.inf), jnp.full_like(kappa, 1 / num))
    (_, points), _ = jax.lax.scan(keep_better, start, jnp.linspace(CLOSEST, 1, SCALES))
    return jnp.where(known[:, None], points, 1 / num)
