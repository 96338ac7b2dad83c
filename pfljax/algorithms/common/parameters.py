"""Mixtures of peers' parameters (not predictions), with weights of any sign."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import Array, Mixture, Params
from pfljax.local.problem import Problem

SHOWN = 16  # number of heaviest models that a run records for each client


def mixture(problem: Problem, weights: Array, own: Params, others: Params) -> Params:
    """weights[0] own + sum_j weights[j] others[j - 1], with the client's own batch statistics."""
    statistics = problem.model.statistics(own) or jax.tree.map(lambda _: False, own)
    mean = tree.mix(weights[1:], others)
    return jax.tree.map(lambda s, mine, rest: mine if s else weights[0] * mine + rest, statistics, own, mean)


def heaviest(weights: Array) -> dict[str, Array]:
    """The models with the largest |weights| (K,); "signed" holds the weights with their signs."""
    index = jax.lax.top_k(jnp.abs(weights), min(SHOWN, len(weights)))[1].astype(jnp.int32)
    return by_size(index, weights[index])._asdict() | {"signed": weights[index]}


def by_size(index: Array, weights: Array) -> Mixture:
    """The models in index (J,), weighted by |weights| (J,), normalized to sum to 1."""
    size = jnp.abs(weights)
    return Mixture(index, size / jnp.maximum(size.sum(), jnp.finfo(jnp.float32).tiny))
