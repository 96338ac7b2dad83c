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
import optax

from pfljax.algorithms.common import aggregation, by_loss
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, ClientOutput, Ledger, Start
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class AFL:
    """Agnostic FL (Mohri et al., 2019): one model, optimized for the worst-case mixture of the clients."""

    rate: float = knob(0.01, at_least=0, grid=(0.001, 0.01, 0.1), help="step size for lambda; 0 is FedAvg")

    def build(self, problem: Problem) -> Algorithm:
        def start(key, clients):
            size, models = clients.train.size.astype(jnp.float32), problem.init_models(key, 1)
            return Start(size / jnp.maximum(size.sum(), 1), models)

        def client_update(context, models, kept, data):
            loss = by_loss.at_start(problem, models, data)
            trained, kept, losses = problem.fit(context, models, kept, data.train)
            weight = jnp.where(data.train.size > 0, context.server[context.client], 0)
            upload, sent = aggregation.weighted(tree.subtract(trained, models), weight)
            report = {"loss": losses[0], "start": jnp.where(data.train.size > 0, loss, 0), "client": context.client}
            return ClientOutput(kept, upload, report, sent)

        def server_update(key, state, aggregate):
            ascent = jnp.zeros_like(state.server).at[aggregate.report["client"]].add(aggregate.report["start"])
            weights = optax.projections.projection_simplex(state.server + self.rate * ascent)
            weights = jnp.where(self.rate > 0, weights, state.server)
            state = state._replace(models=aggregation.average(state.models, aggregate), server=weights)
            return state, {"clients_that_count": (weights > 0).sum()}

        functions = {"start": start, "client_update": client_update, "server_update": server_update}
        traffic = lambda counted: counted._replace(server=0)  # a client receives only its own entry of lambda, a scalar
        ledger = Ledger(gradients=1, unaccounted=BY_LOSS)
        return averaging(problem, **functions, traffic=traffic, ledger=ledger)
