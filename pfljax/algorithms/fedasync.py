"""FedAsync: an asynchronous server that moves toward each client's model, less if it is late.

Xie, Koyejo, Gupta, "Asynchronous federated optimization" (2019; OPT 2020), Algorithm 1 and Section
5.2.

    Client k received theta_(t - s), s steps before, and minimizes
        f_k(theta) + rho/2 |theta - theta_(t - s)|^2;
    theta_(t+1) <- (1 - alpha_s) theta_t + alpha_s theta_k,  alpha_s = alpha d(s), where d(s) is
    1 (constant), (1 + s)^-a (polynomial), or 1 if s <= b, else 1 / (a (s - b) + 1) (hinge).

One client a round is the paper's. It takes a simulated clock to know who comes next, see
`stages.asynchrony`; without one, s is drawn, as in FedBuff, at most max_staleness (by default 16).
With a clock, no update is too late, unless max_staleness is given. The stack holds the server's
last max_staleness + 1 models, newest first.

Departures from the paper: With S clients a round, theta_t moves by the mean of their steps,
weighted by n_k. Batch statistics are mixed as parameters are, and are not in the proximal term.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from pfljax.algorithms.common import stale
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
from pfljax.local.batches import Batch
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method

MOST_DRAWN = 16  # steps late without a clock, by default


@method(keeps="nothing", travels="a current or stale global model down, the trained one up")
@dataclasses.dataclass(frozen=True)
class FedAsync:
    """FedAsync (Xie et al., 2019): an asynchronous server that mixes clients' models into its own.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedAsync(alpha=0.9, discount="hinge")
        FedAsync(alpha=0.9, discount='hinge', a=0.5, b=4, mu=0.005, max_staleness=None,
                 delays='half_normal', staleness=2.0)
    """

    alpha: float = hyperparameter(
        0.6, above=0, at_most=1, grid=(0.3, 0.6, 0.9), help="weight of a model that is not late"
    )
    discount: Literal["constant", "polynomial", "hinge"] = hyperparameter(
        "polynomial",
        help="how the weight of a model falls with the number of steps that it is late",
    )
    a: float = hyperparameter(
        0.5,
        at_least=0,
        read_with={"discount": ("polynomial", "hinge")},
        help="exponent of the polynomial, slope of the hinge",
    )
    b: int = hyperparameter(
        4,
        at_least=0,
        read_with=("discount", "hinge"),
        help="steps late for which the hinge is 1",
    )
    mu: float = hyperparameter(
        0.005,
        at_least=0,
        grid=(0.0, 0.005, 0.05),
        help="rho, weight of the proximal term",
        former="rho",
    )
    max_staleness: int | None = hyperparameter(
        None,
        at_least=0,
        at_most=10_000,
        help="most steps late. Default: any number with a clock, 16 without one",
    )
    delays: Literal["half_normal", "uniform"] = hyperparameter(
        "half_normal", help="how delays are drawn, up to max_staleness, without a clock"
    )
    staleness: float = hyperparameter(
        2.0,
        at_least=0,
        help="mean of the half-normal before rounding and clipping; not with a clock",
    )

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver
        any_age = problem.clock is not None and self.max_staleness is None
        most = MOST_DRAWN if self.max_staleness is None else self.max_staleness

        def discounted(late: Array) -> Array:
            """d(s) of numbers of steps late."""
            late = late.astype(jnp.float32)
            if self.discount == "polynomial":
                return (1 + late) ** -self.a
            if self.discount == "hinge":
                return jnp.where(late <= self.b, 1, 1 / (self.a * (late - self.b) + 1))
            return jnp.ones_like(late)

        # ---- The client.

        def download(context: ClientContext, row: PyTree, cohort: Cohort) -> Array:
            """s, without a clock."""
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
            received = tree.first(models)

            def objective(params: Params, batch: Batch) -> Array:
                """f_k(theta) + rho/2 |theta - theta_(t - s)|^2."""
                distance = solver.squared_distance(params, received)
                return solver.mean_loss(params, batch) + self.mu / 2 * distance

            trained = problem.fit(context, models, data.train, objective)

            # alpha_s theta_k, weighted by n_k
            num_examples = data.train.size.astype(jnp.float32)[None]
            share = num_examples * self.alpha * discounted(context.index)
            return ClientOutput(
                row=row,
                upload=Upload(
                    update=trained.models, weight=share, sums={"num_examples": num_examples}
                ),
                report=ClientReport(trained.losses[0], entries={"late": context.index[0]}),
                opt_state=trained.opt_state,
                sent=num_examples > 0,
            )

        # ---- The server.

        def start(key: Key, clients: ClientData) -> Start:
            models = problem.init_models(key, 1)
            return Start(models=stale.begin(models, 0 if any_age else most))

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            # (1 - alpha_s) theta_t + alpha_s theta_k, in the mean over the clients that came
            came = stale.buffer(aggregate)
            assert came.weight is not None
            scale = 1 / jnp.maximum(came.sums["num_examples"], 1)
            old = tree.scale(stale.newest(state.models), 1 - scale * came.weight)
            new = tree.add(old, tree.scale(came.update, scale))
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
            ledger=Ledger(gradients=1),
            sends="sums",
            stale=True,
            any_age=any_age,
        )
