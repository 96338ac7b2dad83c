"""Clients that train their own model and the global model side by side, on the same mini-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from pfljax.contract import tree
from pfljax.contract.types import Array, ClientContext, Key, Params, PyTree, Split
from pfljax.local.problem import OwnModel, Problem


class Row(NamedTuple):
    """The client's own model, and its optimizer for the global one, if it is kept."""

    own: OwnModel
    optimizer: PyTree


class Pair(NamedTuple):
    """The global model and the client's own, or their gradients or optimizer states."""

    shared: PyTree
    own: PyTree


def first_row(problem: Problem) -> Callable[[Key, Array, Params], Row]:
    """The `row` argument of `averaging`: a client begins with an initial model of its own."""
    return lambda key, client, models: Row(problem.own_model(key, client), problem.kept_optimizers(models))


def descend(
    problem: Problem,
    context: ClientContext,
    models: Params,
    row: Row,
    split: Split,
    gradient: Callable,
    memory: PyTree = (),
) -> tuple[Params, Row, Array, PyTree]:
    """Like `Problem.descend`, for a stack of one model (1, ...) and the client's own model.

    Args:
        problem: The problem of the method.
        context: The client's context.
        models: The global model, leaves (1, ...).
        row: The client's row.
        split: Its training data.
        gradient: As in `Solver.descend`, with a `Pair` of parameters.
        memory: As in `Solver.descend`.

    Returns:
        The global model (1, ...) as trained by the client, its next row, the mean loss and the memory.
    """
    optimizer, keep = problem.solver.optimizer, problem.keep_optimizer
    start = Pair(tree.first(models), row.own.model)
    states = Pair(tree.first(row.optimizer) if keep else optimizer.init(start.shared), row.own.optimizer)
    trained, states, loss, memory = problem.solver._replace(optimizer=apart(optimizer)).descend(
        context.key, start, states, split, gradient, memory, round_number=context.round
    )
    row = Row(OwnModel(trained.own, states.own), tree.stack_one(states.shared) if keep else ())
    return tree.stack_one(trained.shared), row, loss, memory


def apart(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """The optimizer for a `Pair`, with a separate state for each of its models."""

    def init(params: Any) -> Any:
        return Pair(*map(optimizer.init, params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, state = zip(*map(lambda *one: optimizer.update(*one, **extra), updates, state, params), strict=True)
        return Pair(*updates), Pair(*state)

    return optax.GradientTransformationExtraArgs(init, update)
