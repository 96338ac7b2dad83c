"""Rounds in which clients send gradients: each mini-batch is one exchange, and the models' owners take the steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from pfljax.core import tree
from pfljax.core.types import Aggregate, Array, ClientContext, ClientOutput, Params, Split, State, Topology
from pfljax.engine.views import read
from pfljax.local.problem import Problem


def of_batch(problem: Problem, context: ClientContext, models: Params, split: Split) -> tuple[Array, Params]:
    """Mean loss (J,) and gradient (J, ...) of each received model on this exchange's mini-batch."""
    solver = problem.solver
    orders = solver.draw_orders(context.key, split.size, problem.n_max)
    batch = solver.take_batch(context.key, orders, split, context.step)

    def one(params, number):
        return jax.value_and_grad(lambda params: solver.mean_loss(params, batch.of_model(number)))(params)

    return problem.plan.over_models(one, models, jnp.arange(tree.num_rows(models)))


def losses_at_start(problem: Problem, context: ClientContext, models: Params, split: Split, losses: Array) -> Array:
    """Losses (J,) of the received models, summed over the client's data; valid only in a round's first exchange.

    Args:
        problem: The problem of the method.
        context: The client's context.
        models: Leaves (J, ...).
        split: The client's training data.
        losses: Losses from `of_batch`; they already cover all data if it fits in one batch.
    """
    model = problem.model
    as_in_evaluation = not model.stochastic and model.statistics(tree.first(models)) is None
    if as_in_evaluation and problem.solver.batch(problem.n_max) == problem.n_max:
        return losses * split.size
    evaluate = lambda: problem.plan.over_models(lambda params: problem.solver.total_loss(params, split), models)
    return jax.lax.cond(context.step == 0, evaluate, lambda: jnp.zeros_like(losses))


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
