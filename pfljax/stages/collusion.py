"""Attacks by clients that see what all others send, and send the same thing.

With mean m and standard deviation s of the honest updates u_k, coordinate by coordinate, n clients and f attackers:

- "alie": m - z s. Baruch, Baruch, Goldberg, "A little is enough" (NeurIPS 2019). Their program has z = 1.5. Their
  formula has the largest z for which enough honest updates are farther away, with Phi(z) = (n - f - g) / (n - f) and
  g = floor(n / 2 + 1) - f. With few attackers this is hardly an attack: z is 0 for 10 clients with 2 attackers, 0.16
  for 20 with 4, and 0.34 for 50 with 12.
- "ipm": -strength m, whose inner product with the honest mean is negative. Xie, Koyejo, Gupta, "Fall of empires" (UAI
  2020).
- "min_max": m - gamma s, with the largest gamma for which no honest update is farther away than the two most distant
  ones from each other; "min_sum": for which the sum of squared distances to the honest ones is at most the largest such
  sum of an honest one. Shejwalkar, Houmansadr, "Manipulating the Byzantine" (NDSS 2021).

Departures from the papers: ALIE's attackers estimate m and s from their own updates; here they know the honest ones.
Both bounds on gamma are solved for, not searched. Weights are the attackers' own.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import Array, PyTree
from pfljax.stages.robust import TINY, distances, shares_of

Collusion = Literal["alie", "ipm", "min_max", "min_sum"]


def colluded(
    kind: Collusion, factor: float | None, updates: PyTree, counts: Array, attackers: Array
) -> PyTree:
    """The n stacked updates (n, ...) with what the attackers send.

    Args:
        kind: The attack.
        factor: The strength of "ipm"; z of "alie", where None is that of the formula. Others read none.
        updates: Leaves (n, ...).
        counts: (n,) bool: which updates are sent.
        attackers: (n,) bool.
    """
    honest = counts & ~attackers
    mean = tree.mix(shares_of(honest), updates)
    if kind == "ipm":
        assert factor is not None
        crafted = tree.scale(mean, -factor)
    else:
        # m - z s
        centered = jax.tree.map(jnp.subtract, updates, mean)
        shares = shares_of(honest)
        variance = tree.mix(shares, jax.tree.map(jnp.square, centered))
        deviation = jax.tree.map(jnp.sqrt, variance)
        if kind != "alie":
            z = farthest(kind, updates, centered, deviation, honest)
        elif factor is None:
            z = quantile(counts.sum(), (counts & attackers).sum())
        else:
            z = factor
        crafted = tree.subtract(mean, tree.scale(deviation, z))

    def to_all(value: Array, leaf: Array) -> Array:
        return jnp.broadcast_to(value, leaf.shape)

    crafted = jax.tree.map(to_all, crafted, updates)
    return tree.where(attackers & honest.any(), crafted, updates)


def quantile(num: Array, attackers: Array) -> Array:
    """z of the formula of "alie"; 0 if the attackers are a majority."""
    needed = jnp.floor(num / 2 + 1) - attackers
    share = (num - attackers - needed) / jnp.maximum(num - attackers, 1)
    return jnp.maximum(jax.scipy.special.ndtri(jnp.clip(share, 0.5, 1 - 1e-6)), 0)


def farthest(
    kind: Collusion, updates: PyTree, centered: PyTree, deviation: PyTree, honest: Array
) -> Array:
    """gamma: |m - gamma s - u_k|^2 = gamma^2 |s|^2 + 2 gamma <s, u_k - m> + |u_k - m|^2 is within the bound."""
    between = distances(updates, honest)
    between = jnp.where(jnp.isfinite(between), between, 0)

    # |s|^2, <s, u_k - m> and |u_k - m|^2
    square = jnp.maximum(tree.inner(deviation, deviation), TINY)
    products = tree.inner_products(centered, tree.stack_one(deviation))[:, 0]
    norms = jnp.diagonal(tree.inner_products(centered, centered))

    if kind == "min_max":
        bound = between.max()
        discriminant = jnp.square(products) + square * jnp.maximum(bound - norms, 0)
        root = (jnp.sqrt(discriminant) - products) / square
        return jnp.min(jnp.where(honest, root, jnp.inf))

    # The sum of <s, u_k - m> over the honest updates is 0.
    bound = between.sum(axis=1).max()
    total = jnp.where(honest, norms, 0).sum()
    return jnp.sqrt(jnp.maximum(bound - total, 0) / (square * jnp.maximum(honest.sum(), 1)))
