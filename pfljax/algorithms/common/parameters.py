"""Weights of any sign by which peers' parameters (not predictions) are mixed, as a run records them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

<<<<<<< HEAD
from pfljax.contract.types import Array, Mixture
=======
from pfljax.contract import tree
from pfljax.contract.types import Array, Mixture, Params
from pfljax.local.problem import Problem
from pfljax.local.solver import joined
>>>>>>> mB

NUM_SHOWN = 16  # number of heaviest models that a run records for each client


<<<<<<< HEAD
def heaviest(weights: Array) -> dict[str, Array]:
    """The models with the largest |weights| (K,); "signed" holds the weights with their signs."""
    num_shown = min(SHOWN, len(weights))
=======
def mixture(problem: Problem, weights: Array, own: Params, others: Params) -> Params:
    """weights[0] own + sum_j weights[j] others[j - 1], with the client's own batch statistics."""
    own_params, statistics = problem.solver.without_statistics(own)
    other_params, _ = problem.solver.without_statistics(others)
    weighted_own = tree.scale(own_params, weights[0])
    mixed = tree.add(weighted_own, tree.mix(weights[1:], other_params))
    return joined(mixed, statistics)


def heaviest(weights: Array) -> dict[str, Array]:
    """The models with the largest |weights| (K,); "signed" holds the weights with their signs."""
    num_shown = min(NUM_SHOWN, len(weights))
>>>>>>> mB
    _, index = jax.lax.top_k(jnp.abs(weights), num_shown)
    index = index.astype(jnp.int32)
    shown = by_size(index, weights[index])
    return {"index": shown.index, "weights": shown.weights, "signed": weights[index]}


def by_size(index: Array, weights: Array) -> Mixture:
    """The models in index (J,), weighted by |weights| (J,), normalized to sum to 1."""
    size = jnp.abs(weights)
    total = jnp.maximum(size.sum(), jnp.finfo(jnp.float32).tiny)
    return Mixture(index, size / total)
