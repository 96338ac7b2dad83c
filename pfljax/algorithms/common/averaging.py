"""One global model that clients train and a server averages, as in FedAvg and its variants.

    A round: every client of the cohort receives theta and trains it to theta_k (`train`);
    theta <- sum_k n_k theta_k / sum_k n_k, or a server optimizer's step with theta minus that mean as the gradient.

A method defines how a client trains, what it keeps (its row) and what it predicts with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pfljax.algorithms.common.aggregation import average, mean, weighted
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    First,
    Key,
    Ledger,
    Metrics,
    Mixture,
    Params,
    Prediction,
    PyTree,
    Report,
    Start,
    State,
)
from pfljax.local.problem import Problem
from pfljax.local.training import beside_statistics

Train = Callable[[ClientContext, Params, PyTree, ClientData], tuple[Params, PyTree, Array]]
# The only model; if no part of a model is shared, no leaf shows the number of models.
THE_ONE = Mixture(np.zeros((1,), np.int32), np.ones((1,), np.float32))


def averaging(
    problem: Problem,
    *,
    shared: Callable[[Params], PyTree] | None = None,
    train: Train | None = None,
    row: Callable[[Key, Array, Params], PyTree] | None = None,
    own: Callable[[PyTree], Params] | None = None,
    beside: Callable[[Params, ClientData], PyTree] = lambda models, clients: (),
    server: optax.GradientTransformation | None = None,
    ledger: Ledger | None = None,
    **others: Any,
) -> Algorithm:
    """An algorithm with one averaged model.

    Args:
        problem: The problem to build the algorithm for.
        shared: A model's parameters -> a tree of bools: which leaves are averaged and travel; the others become None
            in `models`. None: all.
        train: (context, models (1, ...), row, data) -> (models, row, losses (1,)); None: the solver's epochs or steps.
        row: (key, client, models (1, ...)) -> what a client keeps at first; None: its optimizer, if it is kept.
        own: Row -> the client's own model, with which it predicts; None: it predicts with the global model.
        beside: (models (1, ...), clients) -> what the server keeps beside the model; by default, nothing.
        server: The server's optimizer; None: the mean replaces the model. Batch statistics are always replaced.
        ledger: As in `Algorithm`; required with a custom `train`. Plain training takes one gradient.
        others: Fields of the `Algorithm` in place of those described here.
    """
    if ledger is None and train is not None:
        raise ValueError("ledger: required with train; it says how many gradients are computed per mini-batch")
    if server is not None and problem.solver.statistics is not None:
        server = beside_statistics(server, problem.solver.statistics)
    plain: Train = lambda context, models, kept, data: problem.fit(context, models, kept, data.train)
    kept = row or (lambda key, client, models: problem.kept_optimizers(models))

    def start(key, clients):
        models = problem.init_models(key, 1)
        models = models if shared is None else tree.partition(models, shared(models))[0]
        return Start(beside(models, clients), models, server.init(models) if server else ())

    def client_update(context, models, row, data):
        trained, row, losses = (train or plain)(context, models, row, data)
        upload, sent = weighted(tree.subtract(trained, models), data.train.size)
        return ClientOutput(row, upload, {"loss": losses[0]}, sent)

    fields: dict[str, Any] = {
        "start": start,
        "first_row": lambda key, client, start: First(kept(key, client, start.models)),
        "download": lambda context, row, cohort: THE_ONE.index,
        "client_update": client_update,
        "server_update": functools.partial(server_update, server),
        "whom": lambda context, row, size: THE_ONE,
        "averages": True,
    }
    if own is not None:
        fields["predict"] = lambda context, models, row, data: Prediction.one(own(row))
        fields["report"] = Report("each client's own model")
    return Algorithm(topology="shared", ledger=ledger or Ledger(gradients=1), **fields | others)


def server_update(
    server: optax.GradientTransformation | None, key: Key, state: State, aggregate: Aggregate
) -> tuple[State, Metrics]:
    """The model moves by the mean update; with an optimizer, the negative mean is a gradient for its step."""
    if server is None:
        return state._replace(models=average(state.models, aggregate)), {}
    gradient = jax.tree.map(jnp.negative, mean(aggregate))
    updates, optimizer = server.update(gradient, state.optimizer, state.models)
    moved = state._replace(models=optax.apply_updates(state.models, updates), optimizer=optimizer)
    came = aggregate.upload["weight"].sum() > 0  # otherwise take no step, not even with a zero gradient
    return jax.tree.map(lambda new, old: jnp.where(came, new, old), moved, state), {}
