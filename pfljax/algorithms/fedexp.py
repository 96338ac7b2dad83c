"""FedExP: FedAvg with larger server steps when clients' updates disagree.

Jhunjhunwala, Wang, Joshi, "FedExP: speeding up federated averaging via extrapolation" (ICLR 2023).

    A round: clients of the cohort train theta to theta_k as in FedAvg;  delta_k = theta_k - theta,
    delta = sum_k p_k delta_k,  p_k = n_k / sum_k n_k;
    rate <- max(1, sum_k p_k |delta_k|^2 / (2 (|delta|^2 + eps)));  theta <- theta + rate delta.
    Clients predict with the mean of the last two theta, since those of extrapolated rounds oscillate.

Departures from the paper: Clients are weighted by n_k, as everywhere here (`mean=uniform` is the paper's). Batch
statistics are averaged and do not count in the norms. eps is the paper's; the authors' code adds eps times S.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.algorithms.common.aggregation import client_weight
from pfljax.algorithms.common.global_model import Received, ServerStep, averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    MethodReport,
    Metrics,
    Params,
    Prediction,
    PyTree,
    Start,
    State,
    Trained,
)
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedExP:
    """FedExP (Jhunjhunwala et al., 2023): FedAvg with larger server steps when clients' updates disagree.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedExP(eps=0.01)
        FedExP(eps=0.01, predict='mean', mean='weighted')
    """

    eps: float = hyperparameter(
        0.001,
        above=0,
        grid=(0.001, 0.01, 0.1, 1.0),
        help="added to the squared norm of the mean update; much larger values give FedAvg",
    )
    predict: Literal["mean", "last"] = hyperparameter(
        "mean", help="predict with the mean of the last two models, or the last"
    )
    mean: Literal["weighted", "uniform"] = hyperparameter(
        "weighted", help="weight clients by n_k or equally"
    )

    def build(self, problem: Problem) -> Algorithm:
        def train(context: ClientContext, models: Params, row: PyTree, data: ClientData) -> Trained:
            # delta_k = theta_k - theta, in which batch statistics are None
            trained = problem.fit(context, models, data.train)
            delta_k = tree.subtract(trained.models, models)
            # n_k |delta_k|^2
            weight = client_weight(data.train.size, self.mean)
            weighted_square = weight * tree.inner(delta_k, delta_k)
            return trained._replace(models=delta_k, weight=weight, square=weighted_square)

        def server_step(received: Received, server: PyTree) -> ServerStep:
            # delta = sum_k p_k delta_k,  p_k = n_k / sum_k n_k
            delta = received.update
            # sum_k p_k |delta_k|^2 and |delta|^2; if nobody sent anything, the former is 0 / 1
            assert received.square is not None
            mean_square = received.square.sum() / jnp.maximum(received.weight, 1)
            square_of_mean = tree.inner(delta, delta)
            # rate <- max(1, sum_k p_k |delta_k|^2 / (2 (|delta|^2 + eps)))
            ratio = mean_square / (2 * (square_of_mean + self.eps))
            rate = jnp.maximum(1, ratio)
            # theta <- theta + rate delta
            update = tree.scale(delta, rate)
            return ServerStep(update, metrics={"server_rate": rate})

        def predict_with_mean(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> Prediction:
            """The mean of the last two theta. The server's state is the earlier one."""
            earlier = context.server
            mean = jax.tree.map(lambda new, old: (new + old) / 2, models, earlier)
            return Prediction(mean)

        if self.predict == "last":
            predict = None
            report = MethodReport("the global model")
        else:
            predict = predict_with_mean
            report = MethodReport("the mean of the last two global models")
        algorithm = averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=1),
            server_step=server_step,
            uploads="updates",
            predict=predict,
            report=report,
        )

        # The server's state is theta before the last round. `server_step` cannot keep it, since
        # clients also need its batch statistics, which `averaging` does not show there.
        def start(key: Key, clients: ClientData) -> Start:
            """Before the first round, the last two theta are both the initial one."""
            initial = algorithm.start(key, clients)
            return initial._replace(state=initial.models)

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            new_state, metrics = algorithm.server_update(key, state, aggregate)
            return new_state.with_server(state.models), metrics

        return dataclasses.replace(algorithm, start=start, server_update=server_update)
