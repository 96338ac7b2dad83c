"""Predictors that choose among models by training loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pfljax.contract.types import Array, ClientData, Params, Predictor
from pfljax.local.problem import Problem


def best_fit(problem: Problem, models: Params, clients: ClientData) -> Predictor:
    """Each client predicts with whichever of the N models has the least training loss."""
    best = problem.losses_of_all(models, clients.train).argmin(axis=1).astype(jnp.int32)
    return Predictor(models, best[:, None], jnp.ones((best.shape[0], 1)), "shared")


def posterior(
    problem: Problem, models: Params, clients: ClientData, num_mixed: int, examples: Array | float = jnp.inf
) -> Predictor:
    """Each client mixes the `num_mixed` models of highest posterior weight, the softmax of minus the training loss.

    Args:
        problem: The problem of the method.
        models: N models with equal prior weights.
        clients: Data of K clients, stacked.
        num_mixed: Number of models to mix, at most N.
        examples: Number of examples that a client's likelihood counts as, at most n_k.
    """
    counted = jnp.minimum(examples, clients.train.size)[:, None]
    logits, index = jax.lax.top_k(-problem.losses_of_all(models, clients.train) * counted, num_mixed)
    return Predictor(models, index.astype(jnp.int32), jax.nn.softmax(logits), "peers")
