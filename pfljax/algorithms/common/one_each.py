"""A server that computes a model, or something else, for each client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    Cohort,
    First,
    Key,
    Ledger,
    MethodReport,
    Metrics,
    Mixture,
    Params,
    Prediction,
    PyTree,
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.local.problem import Objective, Personal, Problem

StartFunction = Callable[[Key, ClientData], Start]
ServerUpdate = Callable[[Key, State, Aggregate], tuple[State, Metrics]]
PredictFunction = Callable[[ClientContext, Params, PyTree, ClientData], Prediction]


def one_for_each(
    *,
    start: StartFunction,
    client_update: Callable[[ClientContext, Params, PyTree, ClientData], ClientOutput],
    server_update: ServerUpdate,
    predict: PredictFunction,
    adapt: Callable[[ClientContext, Params, ClientData], Prediction],
    report: MethodReport,
    first_row: Callable[[Key, Array, Start], First] | None = None,
    sends: Literal["updates", "sums", "models", "products"] = "updates",
) -> Algorithm:
    """An algorithm whose server has a stack (K, ...), of which client k receives entry k.

    The arguments are those of `Algorithm`. Clients compute one gradient per mini-batch.
    """

    def own_index(context: ClientContext, row: PyTree, cohort: Cohort) -> Array:
        return context.client[None]

    def select_models(context: ClientContext, row: PyTree, size: Array) -> Mixture:
        return Mixture(context.client[None], jnp.ones((1,)))

    def no_row(key: Key, client: Array, start: Start) -> First:
        return First()

    return Algorithm(
        start=start,
        first_row=first_row or no_row,
        download=own_index,
        client_update=client_update,
        server_update=server_update,
        select_models=select_models,
        predict=predict,
        adapt=adapt,
        topology=Topology.SHARED,
        ledger=Ledger(gradients=1),
        report=report,
        sends=sends,
    )


def start_for_each(
    problem: Problem,
    *,
    start: StartFunction,
    server_update: ServerUpdate,
    objective: Callable[[Params], Objective] | None = None,
    predict: PredictFunction | None = None,
    report: MethodReport | None = None,
) -> Algorithm:
    """An algorithm whose server has a model u_k for each client k, from which that client begins.

        A round: client k receives u_k, trains it to w_k, and sends w_k and n_k;
        the server makes the next u_k.  Client k predicts with w_k.

    Newcomers train from the mean of all u_k, for as many rounds as the run has.

    Args:
        problem: The problem to build the algorithm for.
        start: As in `Algorithm`.
        server_update: As in `Algorithm`. `aggregate.upload.update` is w_k and `aggregate.upload.count`
            n_k, both stacked over all clients; zeros of clients that sent nothing.
        objective: u_k -> what client k minimizes; None: the mean loss.
        predict: As in `Algorithm`; None: with w_k.
        report: As in `Algorithm`; None: that of w_k.
    """

    def objective_near(received: Params) -> Objective | None:
        return None if objective is None else objective(received)

    def first_row(key: Key, client: Array, start: Start) -> First:
        """A client's row is w_k, at first u_k, and its optimizer."""
        return First(problem.personal(tree.take(start.models, client)))

    def client_update(
        context: ClientContext, models: Params, personal: Personal, data: ClientData
    ) -> ClientOutput:
        received = tree.first(models)
        personal, loss = problem.fit_personal(
            context,
            personal._replace(params=received),
            data.train,
            objective_near(received),
        )
        upload = Upload(
            update=tree.stack_one(personal.params),
            count=jnp.float32(data.train.size)[None],
        )
        return ClientOutput(row=personal, upload=upload, report=ClientReport(loss))

    def predict_with_own(
        context: ClientContext, models: Params, personal: Personal, data: ClientData
    ) -> Prediction:
        return Prediction.single(personal.params)

    def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
        mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), models)
        params = problem.train_newcomer(context, data, objective_near(mean), start=mean)
        return Prediction.single(params)

    return one_for_each(
        start=start,
        first_row=first_row,
        client_update=client_update,
        server_update=server_update,
        predict=predict or predict_with_own,
        adapt=adapt,
        report=report or MethodReport("each client's own model"),
        sends="models",
    )
