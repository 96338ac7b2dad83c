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
    Params,
    Prediction,
    PyTree,
    Split,
    Start,
    State,
    Topology,
    Trained,
    Upload,
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


class RowWithNeighbors(NamedTuple):
    """A decentralized client's row.

    Attributes:
        v: Its own part.
        neighbors: (T, J') int32, its neighborhoods, itself first.
        weights: (T, J'), its weights in them.
    """

    v: PyTree
    neighbors: Array
    weights: Array


def client_server(problem: Problem, surrogate: Surrogate) -> Algorithm:
    """Federated surrogate optimization with a server: the blocks of u are shared models.

    A client's row is v_k.
    """

    # ---- The client.

    def first_row(key: Key, client: Array, start: Start) -> First:
        return First(surrogate.init(start.models))

    def client_update(
        context: ClientContext, u: Params, v: PyTree, data: ClientData
    ) -> ClientOutput:
        trained = local_step(problem, surrogate, context, u, v, data.train)
        weights = jnp.full((surrogate.num_models,), data.train.size, jnp.float32)
        return ClientOutput(
            row=trained.row,
            upload=Upload(tree.subtract(trained.models, u), weights),
            report=ClientReport(trained.losses.sum(), entries=dict(trained.report)),
            opt_state=trained.opt_state,
        )

    # ---- The server.

    def start(key: Key, clients: ClientData) -> Start:
        return Start(models=initial_blocks(problem, surrogate, key))

    def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
        # u <- sum_k n_k u_k / sum_k n_k.
        u = aggregation.average(state.models, aggregate)
        return state.with_models(u), means(aggregate.report)

    # ---- What a client predicts with.

    def predict(context: ClientContext, u: Params, v: PyTree, data: ClientData) -> Prediction:
        return surrogate.predict(v)

    def adapt(context: ClientContext, u: Params, data: ClientData) -> Prediction:
        return newcomer(surrogate, context, u, data)

    return Algorithm(
        topology=Topology.SHARED,
        start=start,
        first_row=first_row,
        client_update=client_update,
        server_update=server_update,
        averages=True,
        predict=predict,
        adapt=adapt,
        ledger=Ledger(gradients=surrogate.num_models, unaccounted=BY_LOSS),
        report=MethodReport(surrogate.scored),
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
        text = "accepted below 1 only with a symmetric mixing matrix"
        raise ArgumentError("participation", text)

    # ---- The client.

    def first_row(key: Key, client: Array, start: Start) -> First:
        u = initial_blocks(problem, surrogate, key)
        row = RowWithNeighbors(
            v=surrogate.init(u),
            neighbors=jnp.asarray(mixing.neighbors)[:, client],
            weights=jnp.asarray(mixing.weights)[:, client],
        )
        return First(row, u)

    def download(context: ClientContext, row: RowWithNeighbors, cohort: Cohort) -> Array:
        """The client, and its neighbors of this round that are in the cohort; itself in place of the others."""
        neighbors = row.neighbors[context.round % mixing.period]
        return jnp.where(cohort.position(neighbors) >= 0, neighbors, context.client)

    def client_update(
        context: ClientContext, models: Params, row: RowWithNeighbors, data: ClientData
    ) -> ClientOutput:
        u = tree.first(models)
        trained = local_step(problem, surrogate, context, u, row.v, data.train)

        # W[i, k] for the neighbors i; the weights of absent ones are added to the client's own.
        weights = row.weights[context.round % mixing.period]
        is_other = context.index != context.index[0]
        own_weight = jnp.where(is_other, 0, weights).sum()
        weights = jnp.where(is_other, weights, 0).at[0].set(own_weight)
        return ClientOutput(
            row=row._replace(v=trained.row),
            upload=Upload(trained.models),
            report=ClientReport(trained.losses.sum(), entries=dict(trained.report)),
            opt_state=trained.opt_state,
            sent=is_other.at[0].set(True),
            mixing_weights=weights,
        )

    # ---- The sums of what the neighbors sent.

    def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
        # u_k <- sum_i W[k, i] u_i.
        return state.with_models(aggregate.upload.update), means(aggregate.report)

    # ---- What a client predicts with.

    def predict(
        context: ClientContext, models: Params, row: RowWithNeighbors, data: ClientData
    ) -> Prediction:
        return with_blocks(surrogate.predict(row.v), tree.first(models))

    def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
        u = jax.tree.map(lambda leaf: leaf.mean(axis=0), models)
        return with_blocks(newcomer(surrogate, context, u, data), u)

    return Algorithm(
        topology=Topology.PUSH,
        first_row=first_row,
        download=download,
        client_update=client_update,
        server_update=server_update,
        predict=predict,
        adapt=adapt,
        sends="models",
        ledger=Ledger(gradients=surrogate.num_models, unaccounted=BY_LOSS),
        report=MethodReport(surrogate.scored, mixing.facts),
    )


def initial_blocks(problem: Problem, surrogate: Surrogate, key: Key) -> Params:
    """J different initial models."""
    return problem._replace(common_init=False).init_models(key, surrogate.num_models)


def local_step(
    problem: Problem,
    surrogate: Surrogate,
    context: ClientContext,
    u: Params,
    v: PyTree,
    split: Split,
) -> Trained:
    """Minimizes v, which becomes the `row`, then trains u; tells the sums over the client's examples."""
    # v_k <- argmin_v g_k(u, v).
    v, aux, sums = surrogate.minimize(context, u, v, split)

    # u_k <- local steps from u on g_k(., v_k), block by block.
    trained = problem.fit(context, u, split, surrogate.loss, per_model=aux)
    return trained._replace(row=v, report={"sums": sums, "size": split.size})


def means(report: ClientReport) -> Metrics:
    """Turns the clients' sums over examples into means over all examples of the cohort."""
    total_size = jnp.maximum(report.entries["size"].sum(), 1)
    sums = report.entries["sums"]
    return {name: values.sum() / total_size for name, values in sums.items()}


def newcomer(
    surrogate: Surrogate, context: ClientContext, u: Params, data: ClientData
) -> Prediction:
    """Prediction of a client unseen in training, which minimizes v from its initial value, with u fixed."""

    def step(number: Array, v: PyTree) -> PyTree:
        v, _, _ = surrogate.minimize(context, u, v, data.train)
        return v

    v = jax.lax.fori_loop(0, surrogate.newcomer_steps, step, surrogate.init(u))
    return surrogate.predict(v)


def with_blocks(prediction: Prediction, u: Params) -> Prediction:
    """A prediction whose models are the blocks of u, unless it has models of its own."""
    has_models = jax.tree.leaves(prediction.models)
    return prediction if has_models else prediction._replace(models=u)
