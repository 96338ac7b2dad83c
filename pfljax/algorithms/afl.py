"""AFL: one model, optimized for the worst-case mixture of the clients.

Mohri, Sivek, Suresh, "Agnostic federated learning" (ICML 2019): min_w max_lambda sum_k lambda_k l_k(w), lambda on the
simplex.

    A round: client k receives w, with F_k = l_k(w), and trains it to w_k;
    w <- sum_k lambda_k w_k / sum_k lambda_k;  lambda <- projection onto the simplex of lambda + rate F.

Departures from the paper: Local epochs replace its single stochastic gradient. In the step of lambda, which starts at
n_k / sum n_k, clients outside the cohort have F_k = 0. We return the last w, not the average over rounds.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from optax.projections import projection_simplex

from pfljax.algorithms.common import by_loss
from pfljax.algorithms.common.global_model import Received, ServerStep, averaging
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    Params,
    PyTree,
    Traffic,
    Trained,
)
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class AFL:
    """Agnostic FL (Mohri et al., 2019): one model, optimized for the worst-case mixture of the clients.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.AFL(weights_learning_rate=0.1)
        AFL(weights_learning_rate=0.1)
    """

    weights_learning_rate: float = hyperparameter(
        0.01,
        at_least=0,
        grid=(0.001, 0.01, 0.1),
        help="learning rate of lambda, the clients' weights; 0 is FedAvg",
        former="rate",
    )

    def build(self, problem: Problem) -> Algorithm:
        def first_server(key: Key, params: Params, clients: ClientData) -> Array:
            """lambda = n_k / sum n_k. The server's state is lambda (K,)."""
            size = clients.train.size.astype(jnp.float32)
            return size / jnp.maximum(size.sum(), 1)

        def train(context: ClientContext, models: Params, row: PyTree, data: ClientData) -> Trained:
            has_examples = data.train.size > 0
            # F_k = l_k(w), of w as received.
            loss = by_loss.loss_at_start(problem, context, models, data)
            # w_k, with weight lambda_k.
            trained = problem.fit(context, models, data.train)
            weight = jnp.where(has_examples, context.server[context.client], 0)
            report = {"start": jnp.where(has_examples, loss, 0), "client": context.client}
            return trained._replace(weight=weight, report=report)

        def server_step(received: Received, weights: Array) -> ServerStep:
            # lambda <- projection onto the simplex of lambda + rate F
            losses = (
                jnp.zeros_like(weights).at[received.report["client"]].add(received.report["start"])
            )
            projected = projection_simplex(weights + self.weights_learning_rate * losses)
            weights = jnp.where(self.weights_learning_rate > 0, projected, weights)
            metrics = {"clients_that_count": (weights > 0).sum()}
            return ServerStep(server=weights, metrics=metrics)

        def traffic(counted: Traffic) -> Traffic:
            """A client receives only its own entry of lambda, a scalar."""
            return counted._replace(server=0)

        return averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=1, unaccounted=BY_LOSS),
            first_server=first_server,
            server_step=server_step,
            traffic=traffic,
        )
