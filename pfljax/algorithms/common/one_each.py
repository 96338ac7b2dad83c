"""A server that computes a model, or something else, for each client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import Algorithm, Array, ClientOutput, First, Ledger, Mixture, Params, Prediction, Report
from pfljax.local.batches import Batch
from pfljax.local.problem import OwnModel, Problem


def one_for_each(**functions: Any) -> Algorithm:
    """An algorithm whose server has a stack (K, ...): client k receives entry k, and predicts with it.

    Args:
        functions: `start`, `client_update`, `server_update` and others, as in `Algorithm`. Clients compute one gradient
            per mini-batch.
    """
    return Algorithm(
        download=lambda context, row, cohort: context.client[None],
        whom=lambda context, row, size: Mixture(context.client[None], jnp.ones((1,))),
        topology="shared",
        ledger=Ledger(gradients=1),
        **functions,
    )


def start_for_each(
    problem: Problem,
    objective: Callable[[Params], Callable[[Params, Batch], Array] | None] = lambda received: None,
    **functions: Any,
) -> Algorithm:
    """An algorithm whose server has a model for each client, which trains it, sends it, and predicts with the result.

    Newcomers train from the mean of these models, for as many rounds as the run has.

    Args:
        problem: The problem to build the algorithm for.
        objective: The received model -> what the client minimizes, or None: the mean loss.
        functions: `start`, `server_update` and others, as in `Algorithm`. The upload has a "model" (K, ...) and its
            "weight" n_k (K,).
    """

    def first_row(key, client, start):
        model = tree.take(start.models, client)
        return First(OwnModel(model, problem.solver.optimizer.init(model)))

    def client_update(context, models, row, data):
        received = tree.first(models)
        row, loss = row._replace(model=received).fit(problem, context, data.train, objective(received))
        upload = tree.stack_one({"model": row.model, "weight": jnp.float32(data.train.size)})
        return ClientOutput(row, upload, {"loss": loss})

    def adapt(context, models, data):
        mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), models)
        return Prediction.one(problem.alone(context, mean, data, rounds=problem.rounds, objective=objective(mean)))

    fields: dict[str, Any] = {
        "first_row": first_row,
        "client_update": client_update,
        "predict": lambda context, models, row, data: Prediction.one(row.model),
        "adapt": adapt,
        "sends": "models",
        "report": Report("each client's own model"),
    }
    return one_for_each(**fields | functions)
