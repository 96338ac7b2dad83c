"""Clients that train their own model and the global model side by side, on the same mini-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import optax

from pfljax.contract import tree
from pfljax.contract.types import Array, ClientContext, Params, PyTree, Split
from pfljax.local.problem import Problem


def rows(problem: Problem, own: Params, models: Params) -> PyTree:
    """The clients' rows: their own models (K, ...), the optimizers of these, and of the global model if kept."""
    kept = problem.optimizer_rows(models, tree.num_rows(own))
    return {"own": own, "optimizer": problem.init_optimizers(own), "kept": kept}


def descend(
    problem: Problem,
    context: ClientContext,
    models: Params,
    row: PyTree,
    split: Split,
    gradient: Callable,
    memory: PyTree = (),
) -> tuple[Params, PyTree, Array, PyTree]:
    """Like `Problem.descend_model`, for a stack of one model (1, ...) and the client's own model.

    Args:
        problem: The problem of the method.
        context: The client's context.
        models: The global model, leaves (1, ...).
        row: The client's row, from `rows`.
        split: Its training data.
        gradient: As in `Solver.descend`, with parameters {"global": ..., "own": ...}.
        memory: As in `Solver.descend`.

    Returns:
        The global model (1, ...) as trained by the client, its next row, the mean loss and the memory.
    """
    solver = problem.solver._replace(optimizer=apart(problem.solver.optimizer))
    start, keep = {"global": tree.first(models), "own": row["own"]}, problem.keep_optimizer
    shared = tree.first(row["kept"]) if keep else problem.solver.optimizer.init(start["global"])
    optimizer = {"global": shared, "own": row["optimizer"]}
    trained, optimizer, loss, memory = solver.descend(
        context.key, start, optimizer, split, gradient, memory, round_number=context.round
    )
    kept = tree.stack_one(optimizer["global"]) if keep else ()
    row = {"own": trained["own"], "optimizer": optimizer["own"], "kept": kept}
    return tree.stack_one(trained["global"]), row, loss, memory


def apart(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """The optimizer for a dict of parameter trees, with a separate state for each."""

    def update(updates, states, params, **extra):
        done = {name: optimizer.update(updates[name], states[name], params[name], **extra) for name in updates}
        return {name: moved for name, (moved, _) in done.items()}, {name: state for name, (_, state) in done.items()}

    def init(params: Any) -> dict[str, optax.OptState]:
        return {name: optimizer.init(part) for name, part in params.items()}

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))
