"""Mixtures of peers' parameters (not predictions), with weights of any sign."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import Array, ClientData, ClientOutput, Key, Params, Predictor
from pfljax.local.problem import Problem

SHOWN = 16  # number of heaviest clients that a run records for each client


def mixture(problem: Problem, weights: Array, own: Params, others: Params) -> Params:
    """weights[0] own + sum_j weights[j] others[j - 1], with the client's own batch statistics."""
    statistics = problem.model.statistics(own) or jax.tree.map(lambda _: False, own)
    mean = tree.mix(weights[1:], others)
    return jax.tree.map(lambda s, mine, rest: mine if s else weights[0] * mine + rest, statistics, own, mean)


def of_some(models: Params, index: Array, weights: Array) -> Predictor:
    """The models of index (n, J), the client's own first, for `mixed` to combine with weights (n, K).

    The weights of models outside the index are added to the client's own.
    """
    some = jnp.take_along_axis(weights, index, axis=1)
    some = some.at[:, 0].add(weights.sum(axis=1) - some.sum(axis=1))
    return Predictor(models, index, by_size(some), "shared", rows=some)


def mixed(problem: Problem, key: Key, predictor: Predictor, clients: ClientData) -> Predictor:
    """Each client's mixture of the models from `of_some`, as `Algorithm.fine_tune`."""
    if not jax.tree.leaves(predictor.rows):  # newcomers have their own models
        return predictor

    def mix(models, _, weights):
        others = jax.tree.map(lambda leaf: leaf[1:], models)
        return ClientOutput((), (), mixture(problem, weights[...], tree.first(models), others))

    parts = (predictor.models, predictor.index, (), predictor.rows)
    return Predictor.own(problem.plan.exchange(mix, *parts, topology=predictor.topology)[1].report)


def heaviest(weights: Array) -> dict[str, Array]:
    """The models with the largest |weights| (n, K) for each client; "signed" holds the weights with their signs."""
    index = jax.lax.top_k(jnp.abs(weights), min(SHOWN, weights.shape[1]))[1].astype(jnp.int32)
    signed = jnp.take_along_axis(weights, index, axis=1)
    return {"index": index, "weights": by_size(signed), "signed": signed}


def by_size(weights: Array) -> Array:
    """|weights|, with each row normalized to sum to 1."""
    return jnp.abs(weights) / jnp.maximum(jnp.abs(weights).sum(axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
