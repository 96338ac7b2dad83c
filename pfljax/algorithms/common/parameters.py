"""Mixtures of peers' parameters, by weights of any sign: what clients mix is a model, and not predictions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pfljax.core import tree
from pfljax.core.types import Array, ClientData, ClientOutput, Key, Params, Predictor
from pfljax.local.problem import Problem

SHOWN = 16  # clients of most weight that a run's files tell for each client


def mixture(problem: Problem, weights: Array, own: Params, others: Params) -> Params:
    """weights[0] own + sum_j weights[j] others[j - 1], with the client's own batch statistics."""
    statistics = problem.model.statistics(own) or jax.tree.map(lambda _: False, own)
    mean = tree.mix(weights[1:], others)
    return jax.tree.map(lambda s, mine, rest: mine if s else weights[0] * mine + rest, statistics, own, mean)


def of_some(models: Params, index: Array, weights: Array) -> Predictor:
    """The models of index (n, J), the own first, which `mixed` makes one of by weights (n, K).

    What the others weigh is added to the weight of the own.
    """
    some = jnp.take_along_axis(weights, index, axis=1)
    some = some.at[:, 0].add(weights.sum(axis=1) - some.sum(axis=1))
    return Predictor(models, index, by_size(some), "shared", rows=some)


def mixed(problem: Problem, key: Key, predictor: Predictor, clients: ClientData) -> Predictor:
    """Each client's mixture of what `of_some` gives it, as `Algorithm.fine_tune`."""
    if not jax.tree.leaves(predictor.rows):  # newcomers, who have models of their own
        return predictor

    def mix(models, _, weights):
        others = jax.tree.map(lambda leaf: leaf[1:], models)
        return ClientOutput((), (), mixture(problem, weights[...], tree.first(models), others))

    parts = (predictor.models, predictor.index, (), predictor.rows)
    return Predictor.own(problem.plan.exchange(mix, *parts, topology=predictor.topology)[1].report)


def heaviest(weights: Array) -> dict[str, Array]:
    """Whose models weigh most for each client, by the size of weights (n, K); "signed": those weights themselves."""
    index = jax.lax.top_k(jnp.abs(weights), min(SHOWN, weights.shape[1]))[1].astype(jnp.int32)
    signed = jnp.take_along_axis(weights, index, axis=1)
    return {"index": index, "weights": by_size(signed), "signed": signed}


def by_size(weights: Array) -> Array:
    """Rows |weights| on the simplex."""
    return jnp.abs(weights) / jnp.maximum(jnp.abs(weights).sum(axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
