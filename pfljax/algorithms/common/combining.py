"""Combinations of clients' estimates with the least expected error.

Xu, Tong, Huang, "Personalized federated learning with feature alignment and classifier collaboration" (ICLR 2023).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from optax.projections import projection_simplex

from pfljax.contract import tree
from pfljax.contract.types import Array
from pfljax.exchange.plan import ExecutionPlan

STEPS = 200  # projected-gradient steps


def combination(plan: ExecutionPlan, means: Array, variance: Array, active: Array) -> Array:
    """(S, S) the weights a_k on the simplex that minimize the variance and squared bias of sum_j a_kj h_j.

    Since the weights sum to 1, a common part of the means cancels, and all problems share one Hessian.

    Args:
        plan: Maps over rows.
        means: (S, C, F) h.
        variance: (S,) V_j / (n_j - 1).
        active: (S,) bool; the others have weight 0.
    """
    common = jnp.einsum("s,scf->cf", active / jnp.maximum(active.sum(), 1), means)
    products = plan.gram(jnp.where(active[:, None, None], means - common, 0))
    hessian = products + jnp.diag(variance)
    rate = 1 / jnp.maximum(jnp.linalg.eigvalsh(hessian)[-1], jnp.finfo(jnp.float32).tiny)
    project = lambda rows: plan.over_rows(projection_simplex, jnp.where(active, rows, -1e6))

    def step(_, carry):
        weights, ahead, age = carry
        new = project(ahead - rate * (ahead @ hessian - products))
        # Momentum restarts in the problems where it leads uphill.
        age = jnp.where(((ahead - new) * (new - weights)).sum(axis=1) > 0, 0, age + 1)
        return new, new + tree.per_row(age / (age + 3), new) * (new - weights), age

    start = jnp.eye(len(active))
    return jax.lax.fori_loop(0, STEPS, step, (start, start, jnp.zeros(len(active))))[0]
