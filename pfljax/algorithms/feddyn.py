"""FedDyn: dynamic regularization, so that local minimizers agree in the long run.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated learning based on dynamic
regularization" (ICLR 2021, Algorithm 1).

    A round: client k of S receives theta and takes local steps on
        l_k(theta_k) - <g_k, theta_k> + alpha / 2 |theta_k - theta|^2,  from theta_k = theta;
    g_k <- g_k - alpha (theta_k - theta), which is the gradient of l_k if theta_k is the minimizer;
    h <- h - alpha sum_k n_k (theta_k - theta) / sum_{all} n_k;
        theta <- sum_k n_k theta_k / sum_k n_k - h / alpha.

As alpha goes to 0, clients train as in FedAvg, but the server's correction h / alpha does not
vanish.

Departures from the paper: Clients are weighted by n_k, as everywhere here, so that FedDyn minimizes
the weighted objective (`mean=uniform` is the paper's). Clients take the solver's local steps
instead of training to the minimizer. Batch statistics are averaged.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp

from pfljax.algorithms.common.aggregation import client_weight
from pfljax.algorithms.common.global_model import Received, ServerStep, averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    Params,
    Trained,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


class Server(NamedTuple):
    """What the server keeps beside the model theta.

    Attributes:
        h: A tree like the parameters.
        total_weight: () weight of all clients together.
    """

    h: Params
    total_weight: Array


@method(keeps="its local gradient", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedDyn:
    """FedDyn (Acar et al., 2021): dynamic regularization makes local minimizers agree.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedDyn(alpha=0.01)
        FedDyn(alpha=0.01, mean='weighted')
    """

    alpha: float = hyperparameter(
        0.1,
        above=0,
        grid=(0.001, 0.01, 0.1, 0.3, 1.0),
        help="strength of the regularization; the server adds -h / alpha to the clients' mean",
    )
    mean: Literal["weighted", "uniform"] = hyperparameter(
        "weighted", help="weight clients by n_k or equally"
    )

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver

        def first_row(key: Key, client: Array) -> Params:
            """g_k = 0. A client's row is its local gradient."""
            return problem.zero_params()

        def first_server(key: Key, params: Params, clients: ClientData) -> Server:
            weights = client_weight(clients.train.size, self.mean)
            return Server(problem.zero_params(), jnp.maximum(weights.sum(), 1))

        def objective(params: Params, batch: Batch, received: tuple[Params, Params]) -> Array:
            """l_k(theta_k) - <g_k, theta_k> + alpha / 2 |theta_k - theta|^2  (Eq. 1)."""
            global_params, local_gradient = received
            distance = solver.squared_distance(params, global_params)
            proximal_loss = solver.mean_loss(params, batch) + self.alpha / 2 * distance
            return proximal_loss - tree.inner(local_gradient, params)

        def train(
            context: ClientContext, models: Params, local_gradient: Params, data: ClientData
        ) -> Trained:
            received = (models, tree.stack_one(local_gradient))
            trained = problem.fit(context, models, data.train, objective, per_model=received)
            update = tree.subtract(trained.models, models)
            # g_k <- g_k - alpha (theta_k - theta)
            change = tree.scale(tree.first(update), self.alpha)
            return trained._replace(
                models=update,
                row=tree.subtract(local_gradient, change),
                weight=client_weight(data.train.size, self.mean),
            )

        def server_step(received: Received, server: Server) -> ServerStep:
            # h <- h - alpha sum_k n_k (theta_k - theta) / sum_{all} n_k
            share = self.alpha * received.weight / server.total_weight
            h = tree.subtract(server.h, tree.scale(received.update, share))
            # theta <- sum_k n_k theta_k / sum_k n_k - h / alpha
            update = tree.subtract(received.update, tree.scale(h, 1 / self.alpha))
            return ServerStep(update, server._replace(h=h))

        return averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=1),
            first_row=first_row,
            first_server=first_server,
            server_step=server_step,
            uploads="updates",
        )
