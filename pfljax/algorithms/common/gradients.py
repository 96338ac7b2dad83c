"""Rounds in which clients send gradients: each mini-batch is one exchange, and the models' owners take the steps.

Models are whole here: the gradient of a batch statistic is its old value minus the new one, so that a
step along gradients sets it to the mean of the new values. Where weights of gradients do not add up to
the divisor of the sum, clients send them too: see `weights_of_statistics`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Array,
    ClientContext,
    ClientOutput,
    ClientReport,
    Params,
    PyTree,
    Split,
    State,
    Topology,
    Upload,
)
from pfljax.exchange.views import read
from pfljax.local.batches import Batch
from pfljax.local.problem import Problem
from pfljax.local.solver import joined

NEGLIGIBLE = 1e-12  # a weight whose gradient would not change a model in float32
STATISTICS = "statistics_weight"  # name in `Upload.sums`


class Divisors(NamedTuple):
    """By what the sums of a model are divided.

    Attributes:
        gradient: () divisor of its gradient, above 0.
        statistics: () divisor of the changes of its batch statistics, above 0; None: `gradient`.
    """

    gradient: Array
    statistics: Array | None = None


class Weighed(NamedTuple):
    """What a client computes in an exchange: its E-step, and losses and gradients of its models.

    Attributes:
        row: The client's next row.
        totals: (J,) losses, summed over the client's data; valid only in a round's first exchange.
        losses: (J,) mean losses on the mini-batch; 0 where the weight is negligible.
        gradients: Gradients (J, ...), times the weight and the client's number of examples; 0 where
            the weight is negligible.
    """

    row: PyTree
    totals: Array
    losses: Array
    gradients: Params


def init_optimizers(problem: Problem, models: Params) -> PyTree:
    """New optimizer states of N models, leaves (N, ...)."""
    params, _ = problem.solver.without_statistics(models)
    return problem.plan.over_rows(problem.solver.optimizer.init, params)


def after_e_step(
    problem: Problem,
    context: ClientContext,
    models: Params,
    split: Split,
    row: PyTree,
    e_step: Callable[[Array], PyTree],
    weights: Callable[[PyTree], Array],
    evaluate: Callable[[Params, Split], Array] | None = None,
) -> Weighed:
    """An E-step in a round's first exchange; in every exchange, gradients of the models that have weight after it.

    Args:
        problem: The problem of the method.
        context: The client's context.
        models: Leaves (J, ...).
        split: The client's training data.
        row: The client's row.
        e_step: Summed losses (J,) -> the client's next row.
        weights: The client's row -> weights (J,) of the models.
        evaluate: A model's loss on the client's data, summed; None: the training loss, which
            gradients of full batches come with.
    """
    is_first = context.step == 0
    nothing = jnp.zeros((tree.num_rows(models),))

    def next_row(totals: Array) -> PyTree:
        return jax.tree.map(lambda new, old: jnp.where(is_first, new, old), e_step(totals), row)

    # A program without an E-step is smaller.
    if context.later:
        losses, gradients = batch_gradients(problem, context, models, split, weights(row))
        return Weighed(row, nothing, losses, gradients)

    # The losses that come with gradients are those of all the client's data.
    if evaluate is None and losses_cover_data(problem, models):
        losses, gradients = batch_gradients(problem, context, models, split)
        totals = losses * split.size
        row = next_row(totals)
        weight = weights(row)

        # A model's loss may be infinite, and 0 x inf would reach its owner.
        counts = weight > NEGLIGIBLE
        losses = jnp.where(counts, losses, 0)
        gradients = tree.where(counts, gradients, jax.tree.map(jnp.zeros_like, gradients))
        return Weighed(row, totals, losses, tree.scale(gradients, weight * split.size))

    # Evaluate all models on all data, then compute gradients on the mini-batch.

    def evaluate_models() -> Array:
        return total_losses(problem, models, split, evaluate)

    totals = jax.lax.cond(is_first, evaluate_models, lambda: nothing)
    row = next_row(totals)
    losses, gradients = batch_gradients(problem, context, models, split, weights(row))
    return Weighed(row, totals, losses, gradients)


def batch_gradients(
    problem: Problem,
    context: ClientContext,
    models: Params,
    split: Split,
    weights: Array | None = None,
) -> tuple[Array, Params]:
    """Mean loss (J,) and gradient (J, ...) of each received model on this exchange's mini-batch.

    With `weights` (J,), gradients are times the weight and the client's number of examples. Loss and
    gradient are 0 for models of negligible weight, and clients processed one by one save that work.
    """
    solver = problem.solver
    orders = solver.draw_orders(context.key, split.size, problem.n_max)
    batch = solver.take_batch(context.key, orders, split, context.step)

    def model_gradient(model: Params, number: Array, weight: Array) -> tuple[Array, Params]:
        def mean_loss(model: Params) -> Array:
            return solver.mean_loss(model, batch.for_model(number))

        loss_and_gradient = jax.value_and_grad(mean_loss)
        if weights is None:
            return loss_and_gradient(model)
        loss, gradient = if_weighed(weight, loss_and_gradient, model)
        # Scaled here, a TPU need not read the gradient again.
        return loss, jax.tree.map(lambda leaf: weight * split.size * leaf, gradient)

    num = tree.num_rows(models)
    all_weights = jnp.ones(num) if weights is None else weights
    return problem.plan.over_models(model_gradient, models, jnp.arange(num), all_weights)


def if_weighed(
    weight: Array, compute: Callable[..., tuple[Array, Params]], model: Params, *args: PyTree
) -> tuple[Array, Params]:
    """compute(model, *args), a loss () and a tree like `model`; zeros where the weight is negligible."""

    def skip(model: Params, *args: PyTree) -> tuple[Array, Params]:
        return jnp.zeros(()), jax.tree.map(jnp.zeros_like, model)

    return jax.lax.cond(weight > NEGLIGIBLE, compute, skip, model, *args)


def total_losses(
    problem: Problem,
    models: Params,
    split: Split,
    evaluate: Callable[[Params, Split], Array] | None = None,
) -> Array:
    """(J,) losses of the models, summed over all of a client's examples; by `evaluate`, if it is given."""
    total_loss = evaluate or problem.solver.total_loss

    def loss_of_model(model: Params) -> Array:
        return total_loss(model, split)

    return problem.plan.over_models(loss_of_model, models)


def local_changes(
    problem: Problem, context: ClientContext, models: Params, weights: Array, split: Split
) -> tuple[Array, Params]:
    """Mean losses (J,) and changes (J, ...) of local training; 0 for models of negligible weight."""
    solver = problem.solver

    def train(model: Params, number: Array) -> tuple[Array, Params]:
        def objective(params: Params, batch: Batch) -> Array:
            return solver.mean_loss(params, batch.for_model(number))

        trained, loss = solver.fit(
            context.key, solver.begin(model), split, objective, round_number=context.round
        )
        return loss, tree.subtract(trained.whole, model)

    def train_if_weighed(model: Params, number: Array, weight: Array) -> tuple[Array, Params]:
        return if_weighed(weight, train, model, number)

    numbers = jnp.arange(weights.shape[0])
    return problem.plan.over_models(train_if_weighed, models, numbers, weights)


def losses_cover_data(problem: Problem, models: Params) -> bool:
    """Whether a mini-batch holds all data of a client, and its losses are those of evaluation."""
    model = problem.model
    has_statistics = model.statistics(tree.first(models)) is not None
    if model.network.stochastic or has_statistics:
        return False
    return problem.solver.batch(problem.n_max) == problem.n_max


def weights_of_statistics(
    problem: Problem, models: Params, weights: Array, split: Split
) -> dict[str, PyTree]:
    """What a client sends beside gradients weighted by `weights` (J,), as `Upload.sums`: the weights of new statistics.

    Their mean needs the sum of the weights: with the owner's number of examples as the divisor, a sum of more weight
    would move variances below 0. Nothing for models (J, ...) without batch statistics.
    """
    if problem.model.statistics(tree.first(models)) is None:
        return {}
    counted = jnp.where(weights > NEGLIGIBLE, weights, 0)
    return {STATISTICS: counted * split.size}


def takes_step(problem: Problem, context: ClientContext, split: Split) -> Array:
    """(J,) bool: whether a client with this data has a mini-batch for this exchange."""
    has_batch = context.step < problem.solver.num_steps(split.size, problem.n_max)
    return jnp.broadcast_to(has_batch, context.index.shape)


def mean_changes(problem: Problem, aggregate: Aggregate, sizes: Array) -> Params:
    """Changes of the models (N, ...): sums divided by `sizes` (N,), and the means of their batch statistics."""
    totals = aggregate.upload.update
    changes = tree.scale(totals, 1 / sizes)
    if STATISTICS not in aggregate.upload.sums:
        return changes
    weight = aggregate.upload.sums[STATISTICS]
    means = tree.scale(totals, 1 / jnp.maximum(weight, jnp.finfo(jnp.float32).tiny))
    params, _ = problem.solver.without_statistics(changes)
    _, statistics = problem.solver.without_statistics(means)
    return joined(params, statistics)


def apply(
    problem: Problem, state: State, aggregate: Aggregate, sizes: Array, topology: Topology
) -> State:
    """Each owner that received gradients takes an optimizer step; the others stay as they are.

    Args:
        problem: The problem of the method.
        state: The models and their optimizers, leaves (N, ...).
        aggregate: Sums of gradients, each weighted by its sender's number of examples.
        sizes: (N,): divisor of each model's sum, above 0.
        topology: Topology of the method.
    """
    solver = problem.solver
    totals = aggregate.upload.update
    has_gradients = aggregate.num_sent > 0
    divisors = Divisors(sizes)
    if STATISTICS in aggregate.upload.sums:
        weight = aggregate.upload.sums[STATISTICS]
        divisors = Divisors(sizes, jnp.maximum(weight, jnp.finfo(jnp.float32).tiny))

    def step(
        total: Params, divisor: Divisors, opt_state: PyTree, model: Params
    ) -> tuple[Params, PyTree]:
        mean = jax.tree.map(lambda leaf: leaf / divisor.gradient, total)
        gradient, statistics_change = solver.without_statistics(mean)
        if divisor.statistics is not None:
            _, statistics_total = solver.without_statistics(total)
            statistics_change = tree.scale(statistics_total, 1 / divisor.statistics)
        params, statistics = solver.without_statistics(model)
        updates, opt_state = solver.optimizer.update(
            gradient, opt_state, params, round_number=state.round
        )
        params = optax.apply_updates(params, updates)
        statistics = tree.subtract(statistics, statistics_change)
        return joined(params, statistics), opt_state

    if topology == Topology.SHARED:
        moved = problem.plan.over_rows(step, totals, divisors, state.opt_state, state.models)
        models, opt_state = tree.where(has_gradients, moved, (state.models, state.opt_state))
        return state.with_models(models, opt_state)

    # One owner at a time: the summed gradients are overwritten in place by the next models. The
    # branch also keeps XLA from fusing reads of the stacks into their replacement, which would copy
    # whole stacks for every owner.
    def stay(
        total: Params, divisor: Divisors, opt_state: PyTree, model: Params
    ) -> tuple[Params, PyTree]:
        return model, opt_state

    def owner(total: Params, opt_state: PyTree, data: tuple[Params, Array, Array]) -> ClientOutput:
        model, has_gradient, divisor = data
        model, opt_state = jax.lax.cond(
            has_gradient, step, stay, tree.first(total), divisor, opt_state, read(model)
        )
        return ClientOutput(opt_state, Upload(tree.stack_one(model)), ClientReport(jnp.zeros(())))

    index = jnp.arange(tree.num_rows(totals))[:, None]
    data = (state.models, has_gradients, divisors)
    opt_state, moved = problem.plan.exchange(
        owner, totals, index, state.opt_state, data, topology=Topology.OWN
    )
    return state.with_models(moved.upload.update, opt_state)
