"""FedBuff: an asynchronous server that applies buffers of updates, some computed from older models.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, "Federated learning with buffered asynchronous aggregation"
(AISTATS 2022).

    A round is a step of the server, and its cohort is the buffer: client k of S is s_k steps late; it received
    theta_(t - s_k) and trained it to theta_k;  p_k = n_k / sum_k n_k;
    theta_(t+1) <- theta_t + server_rate sum_k p_k (1 + s_k)^-discount (theta_k - theta_(t - s_k)).

With a simulated clock, arrivals follow from it: Algorithm 1 of the paper, see `stages.asynchrony`. As in the paper, no
update is too late, unless max_staleness is given; later ones are then discarded. Without a clock, s_k is drawn for each
upload, at most max_staleness (by default 5) and the number of rounds played. Then slow clients are not late more often
than others, and a client may be drawn while it would still be training. The stack holds the server's last max_staleness
+ 1 models, newest first.

Departures from the paper: A buffer has updates from S distinct clients. Updates are weighted by n_k, as everywhere here
(`mean=uniform` is the paper's). Batch statistics are averaged over the buffer, whatever their age.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from pfljax.algorithms.common import aggregation, stale, updates
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, ClientOutput, Start
from pfljax.local.problem import Problem

MOST_DRAWN = 5  # steps late without a clock, by default


@method(keeps="nothing", travels="a current or stale global model down, its update up")
@dataclasses.dataclass(frozen=True)
class FedBuff:
    """FedBuff (Nguyen et al., 2022): an asynchronous server that applies buffers of stale updates."""

    max_staleness: int | None = knob(
        None,
        at_least=0,
        at_most=10_000,
        help="most steps late; not given: any number with a clock, 5 without one; 0 with server_rate 1 is FedAvg",
    )
    delays: Literal["half_normal", "uniform"] = knob(
        "half_normal", help="how delays are drawn, up to max_staleness, without a clock"
    )
    staleness: float = knob(
        2.0, at_least=0, help="mean of the half-normal before rounding and clipping; not with a clock"
    )
    discount: float = knob(0.5, at_least=0, help="an update s steps late counts (1 + s)^-discount; 0: no discount")
    server_rate: float = knob(1.0, above=0, grid=(0.1, 0.3, 1.0), help="learning rate of the server")
    mean: Literal["weighted", "uniform"] = knob("weighted", help="weight clients by n_k or equally")

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver
        any_age = problem.clock is not None and self.max_staleness is None
        most = MOST_DRAWN if self.max_staleness is None else self.max_staleness

        def start(key, clients):
            return Start((), stale.begin(problem.init_models(key, 1), 0 if any_age else most))

        def download(context, row, cohort):
            return stale.drawn(context.key, self.delays, self.staleness, most, context.round)

        def client_update(context, models, kept, data):
            trained, kept, losses = problem.fit(context, models, kept, data.train)
            counts = (1.0 + context.index) ** -self.discount
            update = updates.scaled(solver, updates.added(solver, models, trained), counts)
            upload, sent = aggregation.weighted(update, updates.weight_of(data.train.size, self.mean))
            return ClientOutput(kept, upload, {"loss": losses[0], "late": context.index[0]}, sent)

        def server_update(key, state, aggregate):
            buffer = jax.tree.map(lambda leaf: leaf.sum(axis=0, keepdims=True), aggregate.upload)
            mean = aggregation.mean(aggregate._replace(upload=buffer))
            update = updates.scaled(solver, mean, self.server_rate)
            new = updates.moved(solver, stale.newest(state.models), update, buffer["weight"] > 0)
            models = stale.with_newest(state.models, new)
            return state._replace(models=models), {"staleness": stale.mean_lateness(aggregate.report["late"])}

        row = lambda key, client, models: problem.kept_optimizers(stale.newest(models))
        functions = {"start": start, "row": row, "download": download, "client_update": client_update}
        return averaging(problem, **functions, server_update=server_update, stale=True, any_age=any_age)
