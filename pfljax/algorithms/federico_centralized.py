"""FedeRiCo with a server: every client weighs all K models in every round.

"Find your friends: personalized federated learning with the right collaborators" (TMLR submission;
arXiv 2210.06597), Section 3.2. A round, with Pi_ij uniform at first:

    client i receives all models phi_j;
    w_ij ~ Pi_ij exp(-sum_s l(phi_j; x_s, y_s));  Pi_i <- w_i                               (Eq. 3-4)
    it sends w_ij / n_i * grad_phi_j sum_s l(phi_j; x_s, y_s) for each j                      (Eq. 5)
    phi_j <- optimizer step with the sum over clients, weighted by n_i / n.                   (Eq. 6)

Departures from the paper: With mini-batches, the posterior is the one at the round's start. Newcomers
take one E-step from equal weights.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import by_loss, gradients
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    First,
    Key,
    Ledger,
    MethodReport,
    Metrics,
    Mixture,
    Params,
    Prediction,
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem
from pfljax.settings.method import method


@method(
    name="federico_centralized",
    keeps="its weights over all models",
    travels="all K models down, K gradients up",
)
@dataclasses.dataclass(frozen=True)
class FedeRiCoCentralized:
    """FedeRiCo with a server (Eq. 3-6): each client weighs all clients' models.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedeRiCoCentralized()
        FedeRiCoCentralized()
    """

    def build(self, problem: Problem) -> Algorithm:
        num_clients = problem.num_clients

        # ---- The client. Its row is log Pi_i, (K,).

        def first_row(key: Key, client: Array, start: Start) -> First:
            return First(jnp.full((num_clients,), -jnp.log(num_clients), jnp.float32))

        def client_update(
            context: ClientContext, models: Params, log_prior: Array, data: ClientData
        ) -> ClientOutput:
            split = data.train

            def e_step(totals: Array) -> Array:
                """log w_i, where w_ij ~ Pi_ij exp(-sum_s l(phi_j; x_s, y_s))  (Eq. 3)."""
                return jax.nn.log_softmax(log_prior - totals)

            # Pi_i <- w_i (Eq. 4), and w_ij grad_phi_j sum_s l(phi_j; x_s, y_s) for each j (Eq. 5).
            weighed = gradients.after_e_step(
                problem, context, models, split, log_prior, e_step=e_step, weights=jnp.exp
            )

            # log p(D_i; Theta) of Eq. 1, in the round's first exchange.
            log_likelihood = jax.nn.logsumexp(log_prior - weighed.totals)
            log_likelihood = jnp.where(context.step == 0, log_likelihood, 0.0)
            weights = jnp.exp(weighed.row)
            return ClientOutput(
                row=weighed.row,
                upload=Upload(weighed.gradients),
                report=ClientReport(
                    loss=weights @ weighed.losses,
                    entries={"log_likelihood": log_likelihood, "size": split.size},
                ),
                sent=gradients.takes_step(problem, context, split),
            )

        # ---- The server.

        def start(key: Key, clients: ClientData) -> Start:
            models = problem.init_models(key, num_clients, common=False)
            return Start((), models, gradients.init_optimizers(problem, models))

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            # phi_j <- optimizer step with the sum over clients, weighted by n_i / n (Eq. 6).
            report = aggregate.report.entries
            total_size = jnp.maximum(report["size"].sum(), 1)
            sizes = jnp.broadcast_to(total_size, (num_clients,))
            state = gradients.apply(problem, state, aggregate, sizes, Topology.SHARED)

            # -f of Eq. 1.
            negative_log_likelihood = -report["log_likelihood"].sum() / total_size
            return state, {"negative_log_likelihood": negative_log_likelihood}

        # ---- What a client predicts with.

        def select_models(context: ClientContext, log_prior: Array, size: Array) -> Mixture:
            return Mixture(jnp.arange(num_clients, dtype=jnp.int32), jnp.exp(log_prior))

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers take one E-step from equal weights."""
            return by_loss.posterior(problem, models, data, num_clients)

        return Algorithm(
            topology=Topology.SHARED,
            start=start,
            first_row=first_row,
            client_update=client_update,
            server_update=server_update,
            select_models=select_models,
            adapt=adapt,
            exchanges=problem.solver.max_steps(problem.n_max),
            ledger=Ledger(gradients=num_clients, unaccounted=BY_LOSS),
            report=MethodReport(scored="each client's mixture of all models"),
        )
