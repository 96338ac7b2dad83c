"""A client trains a model of its own beside the global one, on the same mini-batches and step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import optax

from pfljax.core import tree
from pfljax.core.types import Array, ClientContext, Params, PyTree, Split
from pfljax.local.problem import Problem


def rows(problem: Problem, own: Params, models: Params) -> PyTree:
    """What clients keep: models of their own (K, ...) with their optimizers, and what they keep of the global one's."""
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
    """As `Problem.descend_model`, for the one model of a stack (1, ...) and the client's own.

    Args:
        problem: What the method is built for.
        context: The client's.
        models: The global model.
        row: The client's of `rows`.
        split: Its training data.
        gradient: As for `Solver.descend`, of parameters {"global": ..., "own": ...}.
        memory: As there.

    Returns:
        The global model (1, ...) as the client has trained it, its next row, the mean loss and the memory.
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
    """The optimizer for several trees of parameters by name, each with a state of its own."""

    def update(updates, states, params, **extra):
        done = {name: optimizer.update(updates[name], states[name], params[name], **extra) for name in updates}
        return {name: moved for name, (moved, _) in done.items()}, {name: state for name, (_, state) in done.items()}

    def init(params: Any) -> dict[str, optax.OptState]:
        return {name: optimizer.init(part) for name, part in params.items()}

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))
