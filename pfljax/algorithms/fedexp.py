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
    Metrics,
    Params,
    Prediction,
    PyTree,
    Report,
    Start,
    State,
    Trained,
)
from pfljax.local.problem import Problem
from pfljax.settings.method import knob, method


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedExP:
    """FedExP (Jhunjhunwala et al., 2023): FedAvg with larger server steps when clients' updates disagree."""

    eps: float = knob(
        0.001,
        above=0,
        grid=(0.001, 0.01, 0.1, 1.0),
        help="added to the squared norm of the mean update; much larger values give FedAvg",
    )
    predict: Literal["mean", "last"] = knob(
        "mean", help="predict with the mean of the last two models, or the last"
    )
    mean: Literal["weighted", "uniform"] = knob("weighted", help="weight clients by n_k or equally")

    def build(self, problem: Problem) -> Algorithm:
        def train(context: ClientContext, models: Params, row: PyTree, data: ClientData) -> Trained:
            trained = problem.fit(context, models, data.train)
            update = tree.subtract(trained.models, models)
            weight = client_weight(data.train.size, self.mean)
            # n_k |delta_k|^2
            square = weight * tree.inner(update, update)
            return trained._replace(models=update, weight=weight, square=square)

        def server_step(received: Received, server: PyTree) -> ServerStep:
            assert received.square is not None
            # sum_k p_k |delta_k|^2 and |delta|^2
            mean_square = received.square.sum() / jnp.maximum(received.weight, 1)
            square_of_mean = tree.inner(received.update, received.update)
            # rate <- max(1, sum_k p_k |delta_k|^2 / (2 (|delta|^2 + eps)))
            rate = jnp.maximum(1, mean_square / (2 * (square_of_mean + self.eps)))
            # theta <- theta + rate delta
            update = tree.scale(received.update, rate)
            return ServerStep(update, metrics={"server_rate": rate})

        def middle(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> Prediction:
            """The mean of the last two theta."""
            return Prediction(jax.tree.map(lambda a, b: (a + b) / 2, models, context.server))

        last = self.predict == "last"
        algorithm = averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=1),
            server_step=server_step,
            uploads="updates",
            predict=None if last else middle,
            report=Report("the global model" if last else "the mean of the last two global models"),
        )

        # The server's state is theta before the last round, with its batch statistics.

        def start(key: Key, clients: ClientData) -> Start:
            first = algorithm.start(key, clients)
            return first._replace(state=first.models)

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            new_state, metrics = algorithm.server_update(key, state, aggregate)
            return new_state.with_server(state.models), metrics

        return dataclasses.replace(algorithm, start=start, server_update=server_update)
