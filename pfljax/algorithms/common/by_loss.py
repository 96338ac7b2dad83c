"""Clients that choose among models by training loss."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import (
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    Params,
    Prediction,
    PyTree,
    Split,
    Topology,
    Upload,
)
from pfljax.local.problem import Problem

BLOCK = 16  # most models that a client evaluates at a time


def losses_of(problem: Problem, models: Params, split: Split) -> Array:
    """(N,) mean losses of N models on a client's examples, 0 for a client without any."""
    totals = evaluate_all(problem, models, split, problem.solver.total_loss)
    return totals / jnp.maximum(split.size, 1)


def evaluate_all(
    problem: Problem,
    models: Params,
    split: Split,
    evaluate: Callable[[Params, Split], Array],
) -> Array:
    """(N, ...) what `evaluate` (model, examples) returns for each of N models.

    Processes models in blocks, so that a client needs memory for a few of them only.

    Args:
        problem: The problem of the method.
        models: Whole models, leaves (N, ...).
        split: The client's examples.
        evaluate: Evaluates one model.
    """
    num = tree.num_rows(models)
    size = min(BLOCK, num)

    def evaluate_one(params: Params) -> Array:
        return evaluate(params, split)

    def add_block(number: Array, values: Array) -> Array:
        # The last block overlaps the one before it.
        first = jnp.minimum(number * size, num - size)
        block = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, size), models)
        new = problem.plan.over_models(evaluate_one, block)
        return jax.lax.dynamic_update_slice_in_dim(values, new, first, 0)

    num_blocks = -(-num // size)
    shape = jax.eval_shape(evaluate_one, tree.shapes_of_rows(models))
    zeros = jnp.zeros((num, *shape.shape))
    return jax.lax.fori_loop(0, num_blocks, add_block, zeros)


def loss_at_start(
    problem: Problem, context: ClientContext, models: Params, data: ClientData
) -> Array:
    """() mean loss of the received model (1, ...) on a client's training data."""
    _, whole = problem.whole(context, models)
    total = problem.solver.total_loss(tree.first(whole), data.train)
    return total / jnp.maximum(data.train.size, 1)


def losses_of_all(problem: Problem, models: Params, splits: Split) -> Array:
    """(K, N) `losses_of` N models on every client's examples."""

    def client(_: Params, row: PyTree, split: Split, models: Params) -> ClientOutput:
        losses = losses_of(problem, models, split)
        return ClientOutput(row, Upload(), ClientReport(jnp.zeros(()), entries={"losses": losses}))

    # Clients receive no model each, but all of them in common.
    index = jnp.zeros((splits.size.shape[0], 0), jnp.int32)
    _, aggregate = problem.plan.exchange(
        client, (), index, (), splits, topology=Topology.SHARED, common=models
    )
    return aggregate.report.entries["losses"]


def best_of(problem: Problem, models: Params, data: ClientData) -> Array:
    """() int32, index of the one of N models that has the least loss on a client's training data."""
    return jnp.argmin(losses_of(problem, models, data.train)).astype(jnp.int32)


def best_fit(problem: Problem, models: Params, data: ClientData) -> Prediction:
    """A client predicts with the `best_of` N models."""
    best = best_of(problem, models, data)
    return Prediction(index=best[None], weights=jnp.ones((1,)))


def posterior(
    problem: Problem,
    models: Params,
    data: ClientData,
    num_mixed: int,
    examples: Array | float = jnp.inf,
) -> Prediction:
    """A client mixes the `num_mixed` models of highest posterior weight, the softmax of minus the training loss.

    Args:
        problem: The problem of the method.
        models: N models with equal prior weights.
        data: The client's data.
        num_mixed: Number of models to mix; all, if there are fewer.
        examples: Number of examples that the client's likelihood counts as, at most n_k.
    """
    num_counted = jnp.minimum(examples, data.train.size)
    logits = -losses_of(problem, models, data.train) * num_counted
    logits, index = jax.lax.top_k(logits, min(num_mixed, len(logits)))
    return Prediction(index=index.astype(jnp.int32), weights=jax.nn.softmax(logits))
