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

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import aggregation
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.method import knob
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    Key,
    Ledger,
    Metrics,
    Params,
    Predictor,
    PyTree,
    Report,
    Split,
    State,
)
from pfljax.local.batches import Batch
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem


class Surrogate(NamedTuple):
    """A client's partial first-order surrogate g(u, v) near (u, v), and its predictor.

    Attributes:
        num_models: J, number of blocks of u, each a model.
        init: u (J, ...) -> v, before a client's first round.
        minimize: (context, u, v, training data) -> (v, aux, metrics): the v that minimizes g(u, .); inputs of `loss`
            that depend on it, leaves (J, ...); and sums over the client's examples, which are logged as means.
        loss: (block of u, mini-batch, row of aux) -> (), the objective of local steps in u.
        predictor: (predictor with equal weights on all blocks, v of all clients (K, ...)) -> Predictor.
        scored: Description of the model that is scored.
        newcomer_steps: Number of minimizations of v, with fixed u, for a client unseen in training.
    """

    num_models: int
    init: Callable[[Params], PyTree]
    minimize: Callable[[ClientContext, Params, PyTree, Split], tuple[PyTree, PyTree, Metrics]]
    loss: Callable[[Params, Batch, PyTree], Array]
    predictor: Callable[[Predictor, PyTree], Predictor]
    scored: str
    newcomer_steps: int = 1


@dataclasses.dataclass(frozen=True)
class CommunicationGraph:
    """Knobs of a decentralized method: its communication graph and mixing weights."""

    graph: Literal["erdos_renyi", "ring", "torus", "random_regular", "complete", "file"] = knob(
        "erdos_renyi", help="communication graph"
    )
    edge_probability: float = knob(
        0.5,
        at_least=1e-6,
        at_most=1,
        static=True,
        read_with=("graph", "erdos_renyi"),
        help="edge probability of erdos_renyi",
    )
    degree: int = knob(
        4, at_least=1, read_with=("graph", "random_regular"), help="number of neighbors per client in random_regular"
    )
    edge_file: str = knob(
        "", read_with=("graph", "file"), help='file for graph=file: one line "i j" per edge, clients numbered from 0'
    )
    graphs: int = knob(
        1, at_least=1, at_most=10_000, help="T, number of random graphs, used in turn from round to round"
    )
    mixing: Literal["metropolis", "fastest", "file"] = knob(
        "metropolis", help="mixing matrix W on the graph; fastest maximizes the spectral gap"
    )
    mixing_file: str = knob(
        "",
        read_with=("mixing", "file"),
        help="file for mixing=file: K x K numbers (.npy or text), which also define the graph",
    )
    graph_seed: int = knob(0, at_least=0, help="seed of the random graphs")


class ClientRow(NamedTuple):
    """A client's row.

    Attributes:
        v: Its own part.
        optimizer: Leaves (J, ...), or () if it is reset in every round.
        edges: A decentralized client's neighborhoods (T, J') and its weights in them; otherwise ().
    """

    v: PyTree
    optimizer: PyTree
    edges: PyTree = ()


def client_server(problem: Problem, surrogate: Surrogate) -> Algorithm:
    """Federated surrogate optimization with a server: the blocks of u are shared models."""

    def init(key, clients):
        u = initial_blocks(problem, surrogate, key)
        return State((), u, (), initial_rows(problem, surrogate, u, tree.num_rows(clients), ()))

    def client_update(context, u, row, data):
        trained, row, report = local_step(problem, surrogate, context, u, row, data.train)
        upload, sent = aggregation.weighted(trained, data.train.size, surrogate.num_models)
        return ClientOutput(row, upload, report, sent)

    def server_update(key, state, aggregate):
        return state._replace(models=aggregation.average(state.models, aggregate)), means(aggregate.report)

    def predictor(key, state, clients):
        return surrogate.predictor(evenly(surrogate, state.models, tree.num_rows(clients)), state.clients.v)

    def adapt(key, state, clients):
        return newcomers(problem, surrogate, key, state.models, state.round, clients)

    return Algorithm(
        init=init,
        client_update=client_update,
        server_update=server_update,
        predictor=predictor,
        adapt=adapt,
        topology="shared",
        averages=lambda models: models,
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

    def init(key, clients):
        u, num = initial_blocks(problem, surrogate, key), tree.num_rows(clients)
        by_client = lambda leaf: jnp.swapaxes(leaf, 0, 1)[problem.ids(clients)]
        edges = jax.tree.map(by_client, (mixing.neighbors, mixing.weights))
        return State((), copies(u, num), (), initial_rows(problem, surrogate, u, num, edges))

    def download(key, state, cohort):
        neighbors = state.clients.edges[0][:, state.round % mixing.period]
        return jnp.where(cohort.position(neighbors) >= 0, neighbors, cohort.ids[:, None])

    def client_update(context, models, row, data):
        trained, row, report = local_step(problem, surrogate, context, tree.first(models), row, data.train)
        weights = row.edges[1][context.round % mixing.period]
        away = context.index != context.index[0]
        weights = jnp.where(away, weights, 0).at[0].set(jnp.where(away, 0, weights).sum())
        return ClientOutput(row, trained, report, sent=away.at[0].set(True), mixing_weights=weights)

    def server_update(key, state, aggregate):
        return state._replace(models=aggregate.upload), means(aggregate.report)

    def predictor(key, state, clients):
        return surrogate.predictor(evenly(surrogate, state.models, tree.num_rows(clients), own=True), state.clients.v)

    def adapt(key, state, clients):
        u = jax.tree.map(lambda leaf: leaf.mean(axis=0), state.models)
        return newcomers(problem, surrogate, key, u, state.round, clients)

    return Algorithm(
        init=init,
        download=download,
        client_update=client_update,
        server_update=server_update,
        predictor=predictor,
        adapt=adapt,
        topology="push",
        ledger=Ledger(surrogate.num_models, unaccounted=BY_LOSS),
        report=Report(surrogate.scored, mixing.facts),
    )


def copies(leaves: PyTree, num: int) -> PyTree:
    """Stacks `num` copies of a tree."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), leaves)


def initial_blocks(problem: Problem, surrogate: Surrogate, key: Key) -> Params:
    """J different initial models."""
    return problem._replace(common_init=False).init_models(key, surrogate.num_models)


def initial_rows(problem: Problem, surrogate: Surrogate, u: Params, num: int, edges: PyTree) -> ClientRow:
    """Initial rows of K clients."""
    return ClientRow(copies(surrogate.init(u), num), problem.optimizer_rows(u, num), edges)


def local_step(
    problem: Problem, surrogate: Surrogate, context: ClientContext, u: Params, row: ClientRow, split: Split
) -> tuple[Params, ClientRow, Metrics]:
    """Minimizes v, then trains u: (trained u, next row, report)."""
    v, aux, sums = surrogate.minimize(context, u, row.v, split)
    trained, optimizer, losses = problem.fit_models(context, u, row.optimizer, split, surrogate.loss, aux)
    report = {"loss": losses.sum(), "sums": sums, "size": split.size}
    return trained, ClientRow(v, optimizer, row.edges), report


def means(report: Metrics) -> Metrics:
    """Turns the clients' sums over examples into means over all examples of the cohort."""
    total = jnp.maximum(report["size"].sum(), 1)
    return {name: values.sum() / total for name, values in report["sums"].items()}


def evenly(surrogate: Surrogate, models: Params, num: int, *, own: bool = False) -> Predictor:
    """Equal weights on all blocks for `num` clients: of u (J, ...), or of each client's u (K, J, ...) with `own`."""
    width = surrogate.num_models
    index = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (num, width))
    if own:
        models = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), models)
        index = jnp.arange(num * width, dtype=jnp.int32).reshape(num, width)
    return Predictor(models, index, jnp.full(index.shape, 1 / width), "own" if own else "shared")


def newcomers(
    problem: Problem, surrogate: Surrogate, key: Key, u: Params, number: Array, clients: ClientData
) -> Predictor:
    """Predictor of clients unseen in training: they minimize v from its initial value, with u fixed."""
    even = evenly(surrogate, u, tree.num_rows(clients))

    def client(models, _, data):
        client_number, data = data
        own_key = jax.random.fold_in(key, client_number)
        context = ClientContext(own_key, number, jnp.zeros((), jnp.int32), even.index[0])
        step = lambda _, v: surrogate.minimize(context, models, v, data.train)[0]
        v = jax.lax.fori_loop(0, surrogate.newcomer_steps, step, surrogate.init(models))
        return ClientOutput((), (), {"v": v})

    data = (jnp.arange(even.index.shape[0]), clients)
    _, found = problem.plan.exchange(client, u, even.index, (), data, topology="shared")
    return surrogate.predictor(even, found.report["v"])
