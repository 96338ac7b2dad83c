"""AFL: one model for the worst mixture of the clients.

Mohri, Sivek, Suresh, "Agnostic federated learning" (ICML 2019): min_w max_lambda sum_k lambda_k l_k(w), lambda on the
simplex.

    A round: client k receives w, with F_k = l_k(w), and trains it to w_k;
    w <- sum_k lambda_k w_k / sum_k lambda_k;  lambda <- projection onto the simplex of lambda + rate F.

Departures from the paper: local epochs stand for its single stochastic gradient; clients out of the cohort have F_k = 0
in the step of lambda, which starts at n_k / sum n_k. The last w is taken, not the average over rounds.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import optax

from pfljax.algorithms.common import aggregation
from pfljax.algorithms.common.averaging import averaging, loss_at_start
from pfljax.core.types import Algorithm, ClientOutput, UsageError
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class AFLConfig:
    """AFL's knob.

    Attributes:
        rate: of the steps of lambda; 0 is FedAvg
    """

    rate: float = 0.01

    def __post_init__(self):
        if self.rate < 0:
            raise UsageError(f"--afl.rate={self.rate}: accepted: 0 or more")


def afl(problem: Problem, config: AFLConfig) -> Algorithm:
    """AFL."""
    base = averaging(problem)

    def init(key, clients):
        size = clients.train.size.astype(jnp.float32)
        state = base.init(key, clients)
        rows = {"id": jnp.arange(size.shape[0], dtype=jnp.int32), "optimizer": state.clients}
        return state._replace(server=size / jnp.maximum(size.sum(), 1), clients=rows)

    def work(turn, models, row, shard):
        loss = loss_at_start(problem, models, shard)
        trained, kept, losses = problem.fit_models(turn, models, row["optimizer"], shard.train)
        share = jnp.where(shard.train.size > 0, turn.server[row["id"]], 0)
        upload, sent = aggregation.weighted(trained, share)
        report = {"loss": losses[0], "start": jnp.where(shard.train.size > 0, loss, 0), "client": row["id"]}
        return ClientOutput(row | {"optimizer": kept}, upload, report, sent)

    def update(key, state, returned):
        ascent = jnp.zeros_like(state.server).at[returned.report["client"]].add(returned.report["start"])
        share = optax.projections.projection_simplex(state.server + config.rate * ascent)
        share = share if config.rate else state.server
        state = state._replace(models=aggregation.average(state.models, returned), server=share)
        return state, {"clients_that_count": (share > 0).sum()}

    return base._replace(init=init, work=work, update=update, unaccounted=BY_LOSS)
