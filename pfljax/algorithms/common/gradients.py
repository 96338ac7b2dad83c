"""Rounds in which clients send gradients: each mini-batch is one exchange, and the models' owners take the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.contract import tree
from pfljax.contract.types import Aggregate, Array, ClientContext, ClientOutput, Params, PyTree, Split, State, Topology
from pfljax.exchange.views import read
from pfljax.local.problem import Problem

NEGLIGIBLE = 1e-12  # a weight whose gradient would not change a model in float32


class Weighed(NamedTuple):
    """What a client computes in an exchange: its E-step, and its models' losses and gradients.

    Attributes:
        row: The client's next own state.
        totals: (J,) losses, summed over the client's data; valid only in a round's first exchange.
        losses: (J,) mean losses on the mini-batch; 0 where the weight is negligible.
        upload: Gradients (J, ...), times the weight and the client's number of examples; 0 where it is negligible.
    """

    row: PyTree
    totals: Array
    losses: Array
    upload: Params


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
        row: The client's own state.
        e_step: Summed losses (J,) -> the client's next own state.
        weights: The client's own state -> weights (J,) of the models.
        evaluate: A model's loss on the client's data, summed; None: the training loss, which gradients of full batches
            come with.
    """
    first, total = context.step == 0, evaluate or problem.solver.total_loss
    step = lambda totals: jax.tree.map(lambda new, old: jnp.where(first, new, old), e_step(totals), row)
    nothing = jnp.zeros((tree.num_rows(models),))
    if context.later:  # a program without an E-step is smaller
        return Weighed(row, nothing, *of_batch(problem, context, models, split, weights(row)))
    if evaluate is None and _losses_cover_data(problem, models):
        losses, grads = of_batch(problem, context, models, split)
        totals = losses * split.size
        row = step(totals)
        # A model's loss may be infinite, and 0 x inf would reach its owner.
        zeros, weight = jax.tree.map(jnp.zeros_like, (losses, grads)), weights(row)
        losses, grads = tree.where(weight > NEGLIGIBLE, (losses, grads), zeros)
        return Weighed(row, totals, losses, tree.scale(grads, weight * split.size))
    of_all = lambda: problem.plan.over_models(lambda params: total(params, split), models)
    totals = jax.lax.cond(first, of_all, lambda: nothing)
    row = step(totals)
    return Weighed(row, totals, *of_batch(problem, context, models, split, weights(row)))


def of_batch(
    problem: Problem, context: ClientContext, models: Params, split: Split, weights: Array | None = None
) -> tuple[Array, Params]:
    """Mean loss (J,) and gradient (J, ...) of each received model on this exchange's mini-batch.

    With `weights` (J,), gradients are times the weight and the client's number of examples. Loss and gradient are 0 for
    models of negligible weight, and clients processed one by one save that work.
    """
    solver = problem.solver
    orders = solver.draw_orders(context.key, split.size, problem.n_max)
    batch = solver.take_batch(context.key, orders, split, context.step)

    def one(params, number, weight):
        compute = jax.value_and_grad(lambda params: solver.mean_loss(params, batch.of_model(number)))
        if weights is None:
            return compute(params)
        loss, grads = if_weighed(weight, compute, params)
        return loss, jax.tree.map(
            lambda leaf: weight * split.size * leaf, grads
        )  # here, a TPU need not read them again

    num = tree.num_rows(models)
    return problem.plan.over_models(one, models, jnp.arange(num), jnp.ones(num) if weights is None else weights)


def if_weighed(weight: Array, compute: Callable[..., tuple[Array, Params]], params: Params, *args: PyTree) -> PyTree:
    """compute(params, *args), a loss () and a tree like `params`; zeros where the weight is negligible."""
    skip = lambda params, *args: (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.cond(weight > NEGLIGIBLE, compute, skip, params, *args)


def local_changes(
    problem: Problem, context: ClientContext, models: Params, weights: Array, split: Split
) -> tuple[Array, Params]:
    """Mean losses (J,) and changes (J, ...) of local training; 0 for models of negligible weight."""

    def train(params, number):
        objective = lambda params, batch: problem.solver.mean_loss(params, batch.of_model(number))
        key, optimizer = context.key, problem.solver.optimizer.init(params)
        trained, _, loss = problem.solver.fit(
            key, params, optimizer, split, round_number=context.round, objective=objective
        )
        return loss, tree.subtract(trained, params)

    one = lambda params, number, weight: if_weighed(weight, train, params, number)
    return problem.plan.over_models(one, models, jnp.arange(weights.shape[0]), weights)


def _losses_cover_data(problem: Problem, models: Params) -> bool:
    """Whether a mini-batch holds all data of a client, and its losses are those of evaluation."""
    model, solver = problem.model, problem.solver
    as_in_evaluation = not model.network.stochastic and model.statistics(tree.first(models)) is None
    return as_in_evaluation and solver.batch(problem.n_max) == problem.n_max


def takes_step(problem: Problem, context: ClientContext, split: Split) -> Array:
    """(J,) bool: whether a client with this data has a mini-batch for this exchange."""
    has_batch = context.step < problem.solver.num_steps(split.size, problem.n_max)
    return jnp.broadcast_to(has_batch, context.index.shape)


def apply(problem: Problem, state: State, aggregate: Aggregate, sizes: Array, topology: Topology) -> State:
    """Each owner that received gradients takes an optimizer step; the others stay as they are.

    Args:
        problem: The problem of the method.
        state: The models and their optimizers, leaves (N, ...).
        aggregate: Sums of gradients, each weighted by its sender's number of examples.
        sizes: (N,): divisor of each model's sum, above 0.
        topology: Topology of the method.
    """
    arrived = aggregate.count > 0

    def step(total, size, opt_state, params):
        grads = jax.tree.map(lambda leaf: leaf / size, total)
        updates, new_state = problem.solver.optimizer.update(grads, opt_state, params, round_number=state.round)
        return optax.apply_updates(params, updates), new_state

    if topology == "shared":
        models, optimizer = problem.plan.over_rows(step, aggregate.upload, sizes, state.optimizer, state.models)
        models, optimizer = tree.where(arrived, (models, optimizer), (state.models, state.optimizer))
        return state._replace(models=models, optimizer=optimizer)

    # One owner at a time: the summed gradients are overwritten in place by the next models. The branch also keeps XLA
    # from fusing reads of the stacks into their replacement, which would copy whole stacks for every owner.
    def owner(total, opt_state, data):
        params, arrived, size = data
        stay = lambda total, size, opt_state, params: (params, opt_state)
        params, opt_state = jax.lax.cond(arrived, step, stay, tree.first(total), size, opt_state, read(params))
        return ClientOutput(opt_state, tree.stack_one(params), {})

    index = jnp.arange(arrived.shape[0])[:, None]
    data = (state.models, arrived, sizes)
    optimizer, moved = problem.plan.exchange(owner, aggregate.upload, index, state.optimizer, data, topology="own")
    return state._replace(models=moved.upload, optimizer=optimizer)
