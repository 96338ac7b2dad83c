"""pFedGraph: the server infers whom each client should collaborate with, and mixes a model for each of them.

Ye, Ni, Wu, Chen, Wang, "Personalized federated learning with inferred collaboration graphs" (ICML
2023).

    A round: client k receives u_k and trains it to w_k on l_k(w) - mu cos(w, u_k);
    a_k <- argmin over the simplex of
        sum_j (alpha (a_kj - p_j)^2 - a_kj cos(w_k - w_0, w_j - w_0)),
    the point of the simplex nearest to p + cos(...) / (2 alpha);
        p_j = n_j / n, and w_0 is the initial model;
    u_k <- sum_j a_kj w_j.  Client k predicts with w_k.

Departures from the paper: The graph and p are those of the cohort; other clients keep their u_k. In
the authors' code, the local cosine is with sum_j a_kj w_j / |w_j|, which would travel besides u_k,
and has the opposite sign; cosines above 0.9 count as 1 in the graph. Cosines leave out batch
statistics. The grids are ours. Newcomers train from the mean of all u_k, with the cosine to it, for
as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from optax.projections import projection_simplex

from pfljax.algorithms.common import parameters
from pfljax.algorithms.common.one_each import start_for_each
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    MethodReport,
    Metrics,
    Params,
    PyTree,
    Start,
    State,
    Topology,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Objective, Problem
from pfljax.settings.method import hyperparameter, method


class Server(NamedTuple):
    """What the server keeps beside the models u_k.

    Attributes:
        initial: w_0, stacked (1, ...).
        graph: (K, K) a.
    """

    initial: Params
    graph: Array


@method(keeps="its model", travels="a mixture of models down, its own up")
@dataclasses.dataclass(frozen=True)
class PFedGraph:
    """pFedGraph (Ye et al., 2023): a mixture of models for each client, by an inferred collaboration graph.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.PFedGraph(alpha=0.2)
        PFedGraph(alpha=0.2, mu=0.01)
    """

    alpha: float = hyperparameter(
        0.8, above=0, grid=(0.2, 0.8, 3.2), help="pull of the graph toward n_k / n; near 0: Local"
    )
    mu: float = hyperparameter(
        0.01,
        at_least=0,
        grid=(0.01, 0.1, 1.0),
        help="lambda, factor of the cosine to u_k",
        former="strength",
    )

    def build(self, problem: Problem) -> Algorithm:
        num_clients = problem.num_clients
        solver = problem.solver

        # ---- The client.

        def objective_near(received: Params) -> Objective:
            """l_k(w) - mu cos(w, u_k)."""
            u, _ = solver.without_statistics(received)

            def objective(params: Params, batch: Batch) -> Array:
                loss = solver.mean_loss(params, batch)
                product = tree.inner(params, u)
                cosine = cosines(product, tree.inner(params, params), tree.inner(u, u))
                return loss - self.mu * cosine

            return objective

        # ---- The server.

        def start(key: Key, clients: ClientData) -> Start:
            initial = tree.stack_one(problem.init_global(key))
            server = Server(initial, graph=jnp.eye(num_clients))
            return Start(server, tree.repeat(initial, num_clients))

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            server: Server = state.server.state
            trained = aggregate.upload.update
            in_cohort = aggregate.num_sent > 0

            # cos(w_k - w_0, w_j - w_0)
            params, _ = solver.without_statistics(trained)
            initial, _ = solver.without_statistics(server.initial)
            products = problem.plan.gram(tree.subtract(params, initial))
            square = jnp.diagonal(products)
            similarity = cosines(products, square[:, None], square)

            # a_k <- the point of the simplex nearest to p + cos(...) / (2 alpha), in the cohort
            sizes = aggregate.upload.count
            assert sizes is not None
            p = sizes / jnp.maximum(sizes.sum(), 1)
            target = jnp.where(in_cohort, p + similarity / (2 * self.alpha), -1e6)
            graph = problem.plan.over_rows(projection_simplex, target)
            graph = tree.where(in_cohort, graph, server.graph)

            # u_k <- sum_j a_kj w_j
            models = tree.where(in_cohort, problem.plan.mix(graph, trained), state.models)
            own_weight = jnp.where(in_cohort, jnp.diagonal(graph), 0).sum() / in_cohort.sum()
            state = state.with_server(server._replace(graph=graph)).with_models(models)
            return state, {"weight_of_others": 1 - own_weight}

        # ---- Accounting.

        def heaviest(context: ClientContext, row: PyTree) -> Mapping[str, Array]:
            return parameters.heaviest(context.server.graph[context.client])

        return start_for_each(
            problem,
            start=start,
            server_update=server_update,
            objective=objective_near,
            report=MethodReport(
                scored="each client's own model",
                collaboration=heaviest,
                topology=Topology.PEERS,
            ),
        )


def cosines(products: Array, a: Array, b: Array) -> Array:
    """Cosines from inner products and the vectors' squared lengths; 0 for a vector of length 0."""
    return products / jnp.sqrt(jnp.maximum(a * b, jnp.finfo(jnp.float32).tiny))
