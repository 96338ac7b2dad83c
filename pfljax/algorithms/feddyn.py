"""FedDyn: dynamic regularization, so that local minimizers agree in the long run.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated learning based on dynamic regularization" (ICLR
2021, Algorithm 1).

    A round: client k of S receives theta and takes local steps on
        l_k(theta_k) - <g_k, theta_k> + alpha / 2 |theta_k - theta|^2,  from theta_k = theta;
    g_k <- g_k - alpha (theta_k - theta), which is the gradient of l_k if theta_k is the minimizer;
    h <- h - alpha sum_k n_k (theta_k - theta) / sum_{all} n_k;  theta <- sum_k n_k theta_k / sum_k n_k - h / alpha.

As alpha goes to 0, clients train as in FedAvg, but the server's correction h / alpha does not vanish.

Departures from the paper: Clients are weighted by n_k, as everywhere here, so that FedDyn minimizes the weighted
objective (`mean=uniform` is the paper's). Clients take the solver's local steps instead of training to the minimizer.
Batch statistics are averaged.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import aggregation, updates
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, ClientOutput, Params, PyTree
from pfljax.local.problem import Problem


class Server(NamedTuple):
    """h (1, ...), and the weight () of all clients together."""

    h: Params
    total: Array


class Row(NamedTuple):
    """The client's g_k, and its optimizer, if it is kept."""

    gradient: Params
    optimizer: PyTree


@method(keeps="its local gradient", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedDyn:
    """FedDyn (Acar et al., 2021): dynamic regularization, so that local minimizers agree in the long run."""

    alpha: float = knob(
        0.1,
        above=0,
        grid=(0.001, 0.01, 0.1, 0.3, 1.0),
        help="strength of the regularization; the server adds -h / alpha to the clients' mean",
    )
    mean: Literal["weighted", "uniform"] = knob("weighted", help="weight clients by n_k or equally")

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver
        parameters = lambda models: solver.trained(models)[0]

        zeros = lambda models: jax.tree.map(jnp.zeros_like, parameters(models))
        row = lambda key, client, models: Row(tree.first(zeros(models)), problem.kept_optimizers(models))

        def beside(models, clients):
            total = jnp.maximum(updates.weight_of(clients.train.size, self.mean).sum(), 1)
            return Server(zeros(models), total)

        def objective(params, batch, received):  # Eq. 1
            theta, gradient = received
            return solver.proximal(theta, self.alpha)(params, batch) - tree.inner(gradient, parameters(params))

        def client_update(context, models, row, data):
            received = models, tree.stack_one(row.gradient)
            trained, optimizer, losses = problem.fit(context, models, row.optimizer, data.train, objective, received)
            update = updates.added(solver, models, trained)
            gradient = tree.subtract(row.gradient, tree.scale(tree.first(parameters(update)), self.alpha))
            upload, sent = aggregation.weighted(update, updates.weight_of(data.train.size, self.mean))
            return ClientOutput(Row(gradient, optimizer), upload, {"loss": losses[0]}, sent)

        def server_update(key, state, aggregate):
            weight = aggregate.upload["weight"]
            mean = aggregation.mean(aggregate)
            drift = parameters(mean)
            h = tree.subtract(state.server.h, tree.scale(drift, self.alpha * weight / state.server.total))
            update = tree.combine(tree.subtract(drift, tree.scale(h, 1 / self.alpha)), mean)
            models = updates.moved(solver, state.models, update, weight > 0)
            return state._replace(server=state.server._replace(h=h), models=models), {}

        functions = {"client_update": client_update, "server_update": server_update, "averages": True}
        return averaging(problem, row=row, beside=beside, **functions)
