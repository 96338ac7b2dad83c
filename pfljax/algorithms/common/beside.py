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
    kept = problem.of_server.kept_optimizers
    return lambda key, client, models: Row(problem.own_model(key, client), kept(models))


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
    server = problem.of_server
    start = Pair(tree.first(models), row.own.model)
    states = Pair(server.round_optimizer(tree.first(row.optimizer), start.shared), row.own.optimizer)
    solver = problem.solver._replace(optimizer=apart(server.solver.optimizer, problem.solver.optimizer))
    trained, states, loss, memory = solver.descend(
        context.key, start, states, split, gradient, memory, round_number=context.round
    )
    kept = tree.stack_one(server.kept_optimizer(states.shared, trained.shared))
    row = Row(OwnModel(trained.own, states.own), kept)
    return tree.stack_one(trained.shared), row, loss, memory


def apart(*optimizers: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """One optimizer for a `Pair` of models, made of one for each."""

    def init(params: Any) -> Any:
        return Pair(*(each.init(model) for each, model in zip(optimizers, params, strict=True)))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        of_each = zip(optimizers, updates, state, params, strict=True)
        updates, state = zip(*(each.update(*one, **extra) for each, *one in of_each), strict=True)
        return Pair(*updates), Pair(*state)

    return optax.GradientTransformationExtraArgs(init, update)
