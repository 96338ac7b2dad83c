"""Federated surrogate optimization, with a server or fully decentralized.

Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated multi-task learning under a mixture of distributions" (NeurIPS 2021),
Section 3.4. f(u, V) = sum_k n_k / n f_k(u, v_k), where u is shared and v_k belongs to client k. Each client minimizes a
partial first-order surrogate g_k of its f_k (Definition 1), here a sum over the J blocks of u:

    v_k <- argmin_v g_k(u, v);  u_k <- local steps from u on g_k(., v_k), block by block;
    with a server:   u <- sum_k n_k u_k / sum_k n_k;
    decentralized:   client k has its own u_k, and u_k <- sum_i W[k, i] u_i, W doubly stochastic.

A method defines a `Surrogate` and gets an `Algorithm`; algorithms/fedem.py is the example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import aggregation
from pfljax.algorithms.common.communication import CommunicationGraph
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    First,
    Key,
    Ledger,
    Metrics,
    Params,
    Prediction,
    PyTree,
    Report,
    Split,
    Start,
)
from pfljax.local.batches import Batch
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem


class Surrogate(NamedTuple):
    """A client's partial first-order surrogate g(u, v) near (u, v), and its prediction.

    Attributes:
        num_models: J, number of blocks of u, each a model.
        init: u (J, ...) -> v, before a client's first round.
        minimize: (context, u, v, training data) -> (v, aux, metrics): the v that minimizes g(u, .); inputs of `loss`
            that depend on it, leaves (J, ...); and sums over the client's examples, which are logged as means.
        loss: (block of u, mini-batch, row of aux) -> (), the objective of local steps in u.
        predict: v -> Prediction: weights (J,) of the blocks of u, or models of the client's own.
        scored: Description of the model that is scored.
        newcomer_steps: Number of minimizations of v, with fixed u, for a client unseen in training.
    """

    num_models: int
    init: Callable[[Params], PyTree]
    minimize: Callable[[ClientContext, Params, PyTree, Split], tuple[PyTree, PyTree, Metrics]]
    loss: Callable[[Params, Batch, PyTree], Array]
    predict: Callable[[PyTree], Prediction]
    scored: str
    newcomer_steps: int = 1


class ClientRow(NamedTuple):
    """A client's row.

    Attributes:
        v: Its own part.
        optimizer: Leaves (J, ...), or () if it is reset in every round.
        neighbors: (T, J') int32, a decentralized client's neighborhoods, itself first; otherwise ().
        weights: (T, J'), its weights in them; otherwise ().
    """

    v: PyTree
    optimizer: PyTree
    neighbors: PyTree = ()
    weights: PyTree = ()


def client_server(problem: Problem, surrogate: Surrogate) -> Algorithm:
    """Federated surrogate optimization with a server: the blocks of u are shared models."""

    def client_update(context, u, row, data):
        trained, row, report = local_step(problem, surrogate, context, u, row, data.train)
        upload, sent = aggregation.weighted(tree.subtract(trained, u), data.train.size, surrogate.num_models)
        return ClientOutput(row, upload, report, sent)

    def server_update(key, state, aggregate):
        return state._replace(models=aggregation.average(state.models, aggregate)), means(aggregate.report)

    return Algorithm(
        start=lambda key, clients: Start((), initial_blocks(problem, surrogate, key)),
        first_row=lambda key, client, start: First(initial_row(problem, surrogate, start.models)),
        client_update=client_update,
        server_update=server_update,
        predict=lambda context, u, row, data: surrogate.predict(row.v),
        adapt=lambda context, u, data: newcomer(surrogate, context, u, data),
        topology="shared",
        averages=True,
        ledger=Ledger(surrogate.num_models, unaccounted=BY_LOSS),
        report=Report(surrogate.scored),
    )


def decentralized(problem: Problem, surrogate: Surrogate, graph: CommunicationGraph) -> Algorithm:
    """Federated surrogate optimization without a server: a stacked "model" is one client's J blocks of u.

    With client sampling, a client adds the weight of an edge to an absent client to its own weight, which keeps
    symmetric W doubly stochastic.

    Raises:
        ArgumentError: for client sampling with an asymmetric W, or for a graph that is not connected.
    """
    from pfljax.algorithms.common.graphs import make_mixing  # slow to import: NetworkX and SciPy

    mixing = make_mixing(problem.num_clients, graph)
    if problem.cohort_size < problem.num_clients and not mixing.symmetric:
        raise ArgumentError("participation", "accepted below 1 only with a symmetric mixing matrix")

    def first_row(key, client, start):
        u = initial_blocks(problem, surrogate, key)
        neighbors, weights = (jnp.asarray(stack)[:, client] for stack in (mixing.neighbors, mixing.weights))
        return First(initial_row(problem, surrogate, u)._replace(neighbors=neighbors, weights=weights), u)

    def download(context, row, cohort):
        neighbors = row.neighbors[context.round % mixing.period]
        return jnp.where(cohort.position(neighbors) >= 0, neighbors, context.client)

    def client_update(context, models, row, data):
        trained, row, report = local_step(problem, surrogate, context, tree.first(models), row, data.train)
        weights = row.weights[context.round % mixing.period]
        away = context.index != context.index[0]
        weights = jnp.where(away, weights, 0).at[0].set(jnp.where(away, 0, weights).sum())
        return ClientOutput(row, trained, report, sent=away.at[0].set(True), mixing_weights=weights)

    def server_update(key, state, aggregate):
        return state._replace(models=aggregate.upload), means(aggregate.report)

    def adapt(context, models, data):
        u = jax.tree.map(lambda leaf: leaf.mean(axis=0), models)
        return with_blocks(newcomer(surrogate, context, u, data), u)

    return Algorithm(
        first_row=first_row,
        download=download,
        client_update=client_update,
        server_update=server_update,
        predict=lambda context, models, row, data: with_blocks(surrogate.predict(row.v), tree.first(models)),
        adapt=adapt,
        topology="push",
        sends="models",
        ledger=Ledger(surrogate.num_models, unaccounted=BY_LOSS),
        report=Report(surrogate.scored, mixing.facts),
    )


def initial_blocks(problem: Problem, surrogate: Surrogate, key: Key) -> Params:
    """J different initial models."""
    return problem._replace(common_init=False).init_models(key, surrogate.num_models)


def initial_row(problem: Problem, surrogate: Surrogate, u: Params) -> ClientRow:
    """A client's first row, without neighbors."""
    return ClientRow(surrogate.init(u), problem.kept_optimizers(u))


def local_step(
    problem: Problem, surrogate: Surrogate, context: ClientContext, u: Params, row: ClientRow, split: Split
) -> tuple[Params, ClientRow, Metrics]:
    """Minimizes v, then trains u: (trained u, next row, report)."""
    v, aux, sums = surrogate.minimize(context, u, row.v, split)
    trained, optimizer, losses = problem.fit(context, u, row.optimizer, split, surrogate.loss, aux)
    report = {"loss": losses.sum(), "sums": sums, "size": split.size}
    return trained, row._replace(v=v, optimizer=optimizer), report


def means(report: Metrics) -> Metrics:
    """Turns the clients' sums over examples into means over all examples of the cohort."""
    total = jnp.maximum(report["size"].sum(), 1)
    return {name: values.sum() / total for name, values in report["sums"].items()}


def newcomer(surrogate: Surrogate, context: ClientContext, u: Params, data: ClientData) -> Prediction:
    """Prediction of a client unseen in training, which minimizes v from its initial value, with u fixed."""
    step = lambda _, v: surrogate.minimize(context, u, v, data.train)[0]
    return surrogate.predict(jax.lax.fori_loop(0, surrogate.newcomer_steps, step, surrogate.init(u)))


def with_blocks(prediction: Prediction, u: Params) -> Prediction:
    """A prediction whose models are the blocks of u, unless it has models of its own."""
    return prediction if jax.tree.leaves(prediction.models) else prediction._replace(models=u)
