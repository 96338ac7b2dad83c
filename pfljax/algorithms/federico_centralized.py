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
from pfljax.contract.method import method
from pfljax.contract.types import Algorithm, ClientOutput, First, Ledger, Mixture, Report, Start
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem


@method(name="federico_centralized", keeps="its weights over all models", travels="all K models down, K gradients up")
@dataclasses.dataclass(frozen=True)
class FedeRiCoCentralized:
    """FedeRiCo with a server (Eq. 3-6): each client weighs all clients' models."""

    def build(self, problem: Problem) -> Algorithm:
        num = problem.num_clients

        def start(key, clients):
            models = problem.init_models(key, num, common=False)
            return Start((), models, problem.init_optimizers(models))

        def client_update(context, models, prior, data):
            split = data.train
            e_step = lambda totals: jax.nn.log_softmax(prior - totals)  # Eq. 3
            out = gradients.after_e_step(problem, context, models, split, prior, e_step, jnp.exp)
            weights = jnp.exp(out.row)
            log_likelihood = jax.nn.logsumexp(prior - out.totals)  # log p(D_i; Theta) of Eq. 1
            report = {
                "loss": weights @ out.losses,
                "log_likelihood": jnp.where(context.step == 0, log_likelihood, 0.0),
                "size": split.size,
            }
            return ClientOutput(out.row, out.upload, report, gradients.takes_step(problem, context, split))

        def server_update(key, state, aggregate):
            total = jnp.maximum(aggregate.report["size"].sum(), 1)
            sizes = jnp.broadcast_to(total, aggregate.count.shape)
            metrics = {"negative_log_likelihood": -aggregate.report["log_likelihood"].sum() / total}  # -f of Eq. 1
            return gradients.apply(problem, state, aggregate, sizes, "shared"), metrics  # Eq. 6

        return Algorithm(
            start=start,
            first_row=lambda key, client, start: First(jnp.full((num,), -jnp.log(num), jnp.float32)),  # log Pi_i
            client_update=client_update,
            server_update=server_update,
            whom=lambda context, prior, size: Mixture(jnp.arange(num, dtype=jnp.int32), jnp.exp(prior)),
            adapt=lambda context, models, data: by_loss.posterior(problem, models, data, num),
            topology="shared",
            exchanges=problem.solver.max_steps(problem.n_max),
            ledger=Ledger(gradients=num, unaccounted=BY_LOSS),
            report=Report(scored="each client's mixture of all models"),
        )
