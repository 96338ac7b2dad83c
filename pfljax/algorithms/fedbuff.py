"""FedBuff: an asynchronous server that applies buffers of updates, some from older models.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, "Federated learning with buffered asynchronous
aggregation" (AISTATS 2022).

    A round is a step of the server, and its cohort is the buffer: client k of S is s_k steps late;
    it received theta_(t - s_k) and trained it to theta_k;  p_k = n_k / sum_k n_k;
    theta_(t+1) <- theta_t
        + server_learning_rate sum_k p_k (1 + s_k)^-discount (theta_k - theta_(t - s_k)).

With a simulated clock, arrivals follow from it: Algorithm 1 of the paper, see `stages.asynchrony`.
As in the paper, no update is too late, unless max_staleness is given; later ones are then
discarded. Without a clock, s_k is drawn for each upload, at most max_staleness (by default 5) and
the number of rounds played. Then slow clients are not late more often than others, and a client may
be drawn while it would still be training. The stack holds the server's last max_staleness + 1
models, newest first.

Departures from the paper: A buffer has updates from S distinct clients. Updates are weighted by
n_k, as everywhere here (`mean=uniform` is the paper's). Batch statistics are averaged over the
buffer, whatever their age.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from pfljax.algorithms.common import aggregation, stale
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    Cohort,
    Key,
    Ledger,
    Metrics,
    Mixture,
    Params,
    PyTree,
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.local.problem import Problem
from pfljax.local.solver import joined
from pfljax.settings.method import hyperparameter, method

MOST_DRAWN = 5  # steps late without a clock, by default


@method(keeps="nothing", travels="a current or stale global model down, its update up")
@dataclasses.dataclass(frozen=True)
class FedBuff:
    """FedBuff (Nguyen et al., 2022): an asynchronous server that applies buffers of stale updates.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedBuff(max_staleness=10)
        FedBuff(max_staleness=10, delays='half_normal', staleness=2.0, discount=0.5,
                server_learning_rate=1.0, mean='weighted')
    """

    max_staleness: int | None = hyperparameter(
        None,
        at_least=0,
        at_most=10_000,
        help="most steps late; 0 with server_learning_rate 1 is FedAvg. "
        "Default: any number with a clock, 5 without one",
    )
    delays: Literal["half_normal", "uniform"] = hyperparameter(
        "half_normal", help="how delays are drawn, up to max_staleness, without a clock"
    )
    staleness: float = hyperparameter(
        2.0,
        at_least=0,
        help="mean of the half-normal before rounding and clipping; not with a clock",
    )
    discount: float = hyperparameter(
        0.5, at_least=0, help="an update s steps late counts (1 + s)^-discount; 0: no discount"
    )
    server_learning_rate: float = hyperparameter(
        1.0, above=0, grid=(0.1, 0.3, 1.0), help="learning rate of the server", former="server_rate"
    )
    mean: Literal["weighted", "uniform"] = hyperparameter(
        "weighted", help="weight clients by n_k or equally"
    )

    def build(self, problem: Problem) -> Algorithm:
        without_statistics = problem.solver.without_statistics
        any_age = problem.clock is not None and self.max_staleness is None
        most = MOST_DRAWN if self.max_staleness is None else self.max_staleness

        # ---- The client.

        def download(context: ClientContext, row: PyTree, cohort: Cohort) -> Array:
            """s_k, without a clock."""
            return stale.draw_delay(
                key=context.key,
                delays=self.delays,
                mean=self.staleness,
                most=most,
                rounds=context.round,
            )

        def client_update(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> ClientOutput:
            trained = problem.fit(context, models, data.train)

            # (1 + s_k)^-discount (theta_k - theta_(t - s_k))
            params, statistics = without_statistics(trained.models)
            received, _ = without_statistics(models)
            counts = (1.0 + context.index) ** -self.discount
            update = tree.scale(tree.subtract(params, received), counts)

            # Batch statistics are no updates: the server averages them.
            weight = aggregation.client_weight(data.train.size, self.mean)[None]
            sums = {} if statistics is None else {"statistics": tree.scale(statistics, weight)}
            return ClientOutput(
                row=row,
                upload=Upload(update, weight, sums),
                report=ClientReport(trained.losses[0], entries={"late": context.index[0]}),
                opt_state=trained.opt_state,
            )

        # ---- The server.

        def start(key: Key, clients: ClientData) -> Start:
            models = problem.init_models(key, 1)
            return Start(models=stale.begin(models, 0 if any_age else most))

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            # theta_t + server_learning_rate sum_k p_k (1 + s_k)^-discount (theta_k - theta_(t - s_k))
            came = stale.buffer(aggregate)
            assert came.weight is not None
            mean = aggregation.mean(aggregate._replace(upload=came))
            old = stale.newest(state.models)
            params, statistics = without_statistics(old)
            new = tree.add(params, tree.scale(mean, self.server_learning_rate))
            if statistics is not None:
                share = 1 / jnp.where(came.weight > 0, came.weight, 1)
                new = joined(new, tree.scale(came.sums["statistics"], share))

            # An empty buffer moves nothing.
            new = tree.where(came.weight > 0, new, old)
            metrics = {"staleness": stale.mean_lateness(aggregate.report.entries["late"])}
            return state.with_models(stale.with_newest(state.models, new)), metrics

        # ---- What a client predicts with: the newest model.

        def select_models(context: ClientContext, row: PyTree, size: Array) -> Mixture:
            return stale.THE_NEWEST

        return Algorithm(
            topology=Topology.SHARED,
            start=start,
            download=download,
            client_update=client_update,
            server_update=server_update,
            select_models=select_models,
            averages=True,
            ledger=Ledger(gradients=1),
            stale=True,
            any_age=any_age,
        )
