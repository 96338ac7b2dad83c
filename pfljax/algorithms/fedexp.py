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

from pfljax.algorithms.common import aggregation, updates
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, ClientOutput, Prediction, Report
from pfljax.local.problem import Problem


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
    predict: Literal["mean", "last"] = knob("mean", help="predict with the mean of the last two models, or the last")
    mean: Literal["weighted", "uniform"] = knob("weighted", help="weight clients by n_k or equally")

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver
        square = lambda update: tree.inner(*solver.trained(update, update))

        def client_update(context, models, kept, data):
            trained, kept, losses = problem.fit(context, models, kept, data.train)
            update = updates.added(solver, models, trained)
            upload, sent = aggregation.weighted(update, updates.weight_of(data.train.size, self.mean))
            report = {"loss": losses[0], "square": upload["weight"][0] * square(update)}
            return ClientOutput(kept, upload, report, sent)

        def server_update(key, state, aggregate):
            weight = aggregate.upload["weight"]
            update = aggregation.mean(aggregate)
            mean_square = aggregate.report["square"].sum() / jnp.maximum(weight.sum(), 1)
            rate = jnp.maximum(1, mean_square / (2 * (square(update) + self.eps)))
            models = updates.moved(solver, state.models, updates.scaled(solver, update, rate), weight > 0)
            return state._replace(server=state.models, models=models), {"server_rate": rate}

        def middle(context, models, row, data):
            return Prediction(jax.tree.map(lambda a, b: (a + b) / 2, models, context.server))

        last = self.predict == "last"
        report = Report("the global model" if last else "the mean of the last two global models")
        functions = {"client_update": client_update, "server_update": server_update, "averages": True}
        functions |= {"predict": None if last else middle, "report": report}
        return averaging(problem, beside=lambda models, clients: models, **functions)
