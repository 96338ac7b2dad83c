"""pFedGraph: the server infers whom each client should collaborate with, and mixes a model for each of them.

Ye, Ni, Wu, Chen, Wang, "Personalized federated learning with inferred collaboration graphs" (ICML 2023).

    A round: client k receives u_k and trains it to w_k on l_k(w) - strength cos(w, u_k);
    a_k <- argmin over the simplex of sum_j (alpha (a_kj - p_j)^2 - a_kj cos(w_k - w_0, w_j - w_0)),
    the point of the simplex nearest to p + cos(...) / (2 alpha);  p_j = n_j / n, and w_0 is the initial model;
    u_k <- sum_j a_kj w_j.  Client k predicts with w_k.

Departures from the paper: The graph and p are those of the cohort; other clients keep their u_k. In the authors' code,
the local cosine is with sum_j a_kj w_j / |w_j|, which would travel besides u_k, and has the opposite sign; cosines
above 0.9 count as 1 in the graph. Cosines leave out batch statistics. The grids are ours. Newcomers train from the mean
of all u_k, with the cosine to it, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from optax.projections import projection_simplex

from pfljax.algorithms.common import parameters
from pfljax.algorithms.common.one_each import start_for_each
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, Params, Report, Start
from pfljax.local.problem import Problem


class Server(NamedTuple):
    """w_0 (1, ...) and a (K, K)."""

    initial: Params
    graph: Array


@method(keeps="its model", travels="a mixture of models down, its own up")
@dataclasses.dataclass(frozen=True)
class PFedGraph:
    """pFedGraph (Ye et al., 2023): a mixture of models for each client, by an inferred collaboration graph."""

    alpha: float = knob(0.8, above=0, grid=(0.2, 0.8, 3.2), help="pull of the graph toward n_k / n; near 0: Local")
    strength: float = knob(0.01, at_least=0, grid=(0.01, 0.1, 1.0), help="lambda, factor of the cosine to u_k")

    def build(self, problem: Problem) -> Algorithm:
        solver, num = problem.solver, problem.num_clients
        angle = lambda a, b: cosines(tree.inner(*solver.trained(a, b)), square(a), square(b))
        square = lambda params: tree.inner(*solver.trained(params, params))
        near = lambda u: lambda params, batch: solver.mean_loss(params, batch) - self.strength * angle(params, u)

        def start(key, clients):
            initial = problem.init_models(key, 1)
            return Start(Server(initial, jnp.eye(num)), tree.repeat(initial, num))

        def server_update(key, state, aggregate):
            here, (trained, sizes) = aggregate.count > 0, (aggregate.upload["model"], aggregate.upload["weight"])
            products = problem.plan.gram(tree.subtract(*solver.trained(trained, state.server.initial)))
            graph = tree.where(here, self._graph(problem, products, sizes, here), state.server.graph)
            models = tree.where(here, problem.plan.mix(graph, trained), state.models)
            metrics = {"weight_of_others": 1 - jnp.where(here, jnp.diagonal(graph), 0).sum() / here.sum()}
            return state._replace(server=state.server._replace(graph=graph), models=models), metrics

        shown = lambda context, row: parameters.heaviest(context.server.graph[context.client])
        report = Report(scored="each client's own model", collaboration=shown, topology="peers")
        return start_for_each(problem, near, start=start, server_update=server_update, report=report)

    def _graph(self, problem: Problem, products: Array, sizes: Array, here: Array) -> Array:
        """(K, K) a, of the clients that are here (K,), from their n_k (K,) and inner products (K, K) of w_k - w_0."""
        square = jnp.diagonal(products)
        angles = cosines(products, square[:, None], square)
        target = sizes / jnp.maximum(sizes.sum(), 1) + angles / (2 * self.alpha)
        return problem.plan.over_rows(projection_simplex, jnp.where(here, target, -1e6))


def cosines(products: Array, a: Array, b: Array) -> Array:
    """Cosines from inner products and the vectors' squared lengths; 0 for a vector of length 0."""
    return products / jnp.sqrt(jnp.maximum(a * b, jnp.finfo(jnp.float32).tiny))
