"""FedeRiCo with a server: every client weighs all K models in every round.

"Find your friends: personalized federated learning with the right collaborators" (TMLR submission; arXiv 2210.06597),
Section 3.2. A round, with Pi_ij uniform at first:

    client i receives all models phi_j;  w_ij ~ Pi_ij exp(-sum_s l(phi_j; x_s, y_s));  Pi_i <- w_i             (Eq. 3-4)
    it sends w_ij / n_i * grad_phi_j sum_s l(phi_j; x_s, y_s) for each j                                       (Eq. 5)
    phi_j <- optimizer step with the sum over clients, weighted by n_i / n.                                    (Eq. 6)

Departures from the paper: With mini-batches, the posterior is the one at the round's start. Newcomers take one E-step
from equal weights.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import by_loss, gradients
from pfljax.contract import tree
from pfljax.contract.method import method
from pfljax.contract.types import Algorithm, ClientOutput, Ledger, Predictor, Report, State
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem


@method(name="federico_centralized", keeps="its weights over all models", travels="all K models down, K gradients up")
@dataclasses.dataclass(frozen=True)
class FedeRiCoCentralized:
    """FedeRiCo with a server (Eq. 3-6): each client weighs all clients' models."""

    def build(self, problem: Problem) -> Algorithm:
        def init(key, clients):
            num, ids = problem.num_clients, problem.ids(clients)
            models = problem.init_models(key, ids, common=False)
            rows = {"log_prior": jnp.full((len(ids), num), -jnp.log(num), jnp.float32)}
            return State((), models, problem.init_optimizers(models), rows)

        def client_update(context, models, row, data):
            split, prior = data.train, row["log_prior"]
            e_step = lambda totals: {"log_prior": jax.nn.log_softmax(prior - totals)}  # Eq. 3
            weights = lambda row: jnp.exp(row["log_prior"])
            out = gradients.after_e_step(problem, context, models, split, row, e_step, weights)
            upload = tree.scale(out.grads, weights(out.row) * split.size)  # n_i of Eq. 6; the server divides by n
            log_likelihood = jax.nn.logsumexp(prior - out.totals)  # log p(D_i; Theta) of Eq. 1
            report = {
                "loss": weights(out.row) @ out.losses,
                "log_likelihood": jnp.where(context.step == 0, log_likelihood, 0.0),
                "size": split.size,
            }
            return ClientOutput(out.row, upload, report, gradients.takes_step(problem, context, split))

        def server_update(key, state, aggregate):
            total = jnp.maximum(aggregate.report["size"].sum(), 1)
            sizes = jnp.broadcast_to(total, aggregate.count.shape)
            metrics = {"negative_log_likelihood": -aggregate.report["log_likelihood"].sum() / total}  # -f of Eq. 1
            return gradients.apply(problem, state, aggregate, sizes, "shared"), metrics  # Eq. 6

        def predictor(key, state, clients):
            weights = jnp.exp(state.clients["log_prior"])
            index = jnp.broadcast_to(jnp.arange(weights.shape[1], dtype=jnp.int32), weights.shape)
            return Predictor(state.models, index, weights, "shared")

        return Algorithm(
            init=init,
            client_update=client_update,
            server_update=server_update,
            predictor=predictor,
            adapt=lambda key, state, clients: by_loss.posterior(
                problem, state.models, clients, tree.num_rows(state.models)
            ),
            topology="shared",
            exchanges=problem.solver.max_steps(problem.n_max),
            ledger=Ledger(gradients=problem.num_clients, unaccounted=BY_LOSS),
            report=Report(scored="each client's mixture of all models"),
        )
