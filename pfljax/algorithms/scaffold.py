"""SCAFFOLD: local steps corrected by control variates.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic controlled averaging for
federated learning" (ICML 2020, Algorithm 1).

    A round: client k of S receives x and c; local steps y <- y - eta (g(y) - c_k + c) from y = x;
    c_k+ <- grad f_k(x)  (option I),  or c_k - c + (x - y) / (steps eta),
        the mean of the g(y) on the way  (option II);
    x <- x + rate (sum_k n_k y_k / sum_k n_k - x);  c <- c + sum_k n_k (c_k+ - c_k) / sum_{all} n_k.

Departures from the paper: Both means are weighted by n_k, as everywhere here, so that SCAFFOLD
minimizes the weighted objective (`mean=uniform` is the paper's). Option II's c_k+ is computed as
that mean of gradients, which is the same for plain SGD and is defined for any optimizer. Batch
statistics have no control variate and are averaged, whatever eta_g.
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
from pfljax.local.problem import Problem, SlopeFunction
from pfljax.local.solver import Slope
from pfljax.settings.method import hyperparameter, method


class Server(NamedTuple):
    """What the server keeps beside the model x.

    Attributes:
        control_variate: c, a tree like the parameters.
        total_weight: () weight of all clients together.
    """

    control_variate: Params
    total_weight: Array


@method(
    keeps="its control variate",
    travels="the global model and control variate, both ways",
)
@dataclasses.dataclass(frozen=True)
class Scaffold:
    """SCAFFOLD (Karimireddy et al., 2020): local steps corrected by control variates.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.Scaffold(option="I")
        Scaffold(correction=1.0, server_learning_rate=1.0, option='I', mean='weighted')
    """

    correction: float = hyperparameter(
        1.0, at_least=0, help="factor of the correction c - c_k in each step; 0 is FedAvg"
    )
    server_learning_rate: float = hyperparameter(
        1.0, above=0, help="eta_g, learning rate of the server", former="rate"
    )
    option: Literal["I", "II"] = hyperparameter(
        "II",
        help="c_k+: the gradient at x over all of a client's examples (I), or its steps' mean "
        "gradient (II)",
    )
    mean: Literal["weighted", "uniform"] = hyperparameter(
        "weighted", help="weight clients by n_k or equally"
    )

    def build(self, problem: Problem) -> Algorithm:
        def first_row(key: Key, client: Array) -> Params:
            """c_k = 0. A client's row is its control variate."""
            return problem.zero_params()

        def first_server(key: Key, params: Params, clients: ClientData) -> Server:
            weights = client_weight(clients.train.size, self.mean)
            return Server(problem.zero_params(), jnp.maximum(weights.sum(), 1))

        def train(
            context: ClientContext, models: Params, control_variate: Params, data: ClientData
        ) -> Trained:
            # y <- y - eta (g(y) - c_k + c), from y = x; along the way, sum the g(y).
            server_variate = context.server.control_variate
            correction = tree.subtract(server_variate, control_variate)
            correction = tree.scale(correction, self.correction)

            def corrected(
                slope_at: SlopeFunction, y: Params, carry: tuple[Params, Array]
            ) -> tuple[Slope, tuple[Params, Array]]:
                gradient_sum, num_steps = carry
                slope = slope_at(y)
                carry = (tree.add(gradient_sum, slope.gradient), num_steps + 1)
                return slope._replace(gradient=tree.add(slope.gradient, correction)), carry

            start = (problem.zero_params(), jnp.zeros(()))
            trained, carry = problem.descend(context, models, data.train, corrected, start)
            gradient_sum, num_steps = carry

            # c_k+: a gradient at x over all examples (option I), or the mean of the g(y).
            if self.option == "I":
                new_variate = problem.full_gradient(context, models, data.train)
            else:
                new_variate = tree.scale(gradient_sum, 1 / jnp.maximum(num_steps, 1))
            new_variate = tree.where(num_steps > 0, new_variate, control_variate)

            weight = client_weight(data.train.size, self.mean)
            change = tree.subtract(new_variate, control_variate)
            return trained._replace(
                row=new_variate,
                weight=weight,
                sums={"control": tree.scale(change, weight)},
            )

        def server_step(received: Received, server: Server) -> ServerStep:
            # x <- x + rate (sum_k n_k y_k / sum_k n_k - x)
            update = tree.scale(received.update, self.server_learning_rate)
            # c <- c + sum_k n_k (c_k+ - c_k) / sum_{all} n_k
            change = tree.scale(received.sums["control"], 1 / server.total_weight)
            control_variate = tree.add(server.control_variate, change)
            return ServerStep(update, server._replace(control_variate=control_variate))

        if self.option == "I":
            ledger = Ledger(
                gradients=1,
                passes=1 + problem.passes(1),
                unaccounted="the full-data gradients, which are sent without noise",
            )
        else:
            ledger = Ledger(gradients=1)
        return averaging(
            problem,
            train=train,
            ledger=ledger,
            first_row=first_row,
            first_server=first_server,
            server_step=server_step,
            changes=("control",),
        )
