"""Write your own method in its own file: FedAvg with clipped client updates, so that no client dominates.

    python examples/own_method.py
    pfljax compare --methods=fedavg,examples/own_method.py:FedClip --seeds=0,1 --fedclip.norm=0.3

Sun, Kairouz, Suresh, McMahan, "Can you really backdoor federated learning?" (2019):

    A round: client k receives theta, trains it to theta_k; d_k <- (theta_k - theta) min(1, norm / |theta_k - theta|);
    theta <- theta + sum_k n_k d_k / sum_k n_k.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import optax

import pfljax as pfl
from pfljax.algorithms.common import Received, ServerStep, averaging


@pfl.author.method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedClip:
    """FedAvg with clipped updates (Sun et al., 2019): no client moves the global model farther than `norm`."""

    # This is also the flag --fedclip.norm.
    norm: float = pfl.author.hyperparameter(
        0.5, above=0, help="norm to which client updates are clipped"
    )

    def build(self, problem: pfl.author.Problem) -> pfl.author.Algorithm:
        def train(context, models, row, data) -> pfl.author.Trained:
            """One client's work, with the stack (1, ...) of the one model that it received."""
            trained = problem.fit(context, models, data.train)

            # d_k <- (theta_k - theta) min(1, norm / |theta_k - theta|)
            update = pfl.author.tree.subtract(trained.models, models)
            length = jnp.sqrt(pfl.author.tree.inner(update, update))
            share = jnp.minimum(1, self.norm / jnp.maximum(length, 1e-12))
            clipped = pfl.author.tree.scale(update, share)
            return trained._replace(models=clipped, report={"cut": length > self.norm})

        def server_step(received: Received, server) -> ServerStep:
            """theta <- theta + sum_k n_k d_k / sum_k n_k is what `averaging` does; here is only a metric."""
            return ServerStep(metrics={"clients_cut": received.report["cut"].mean()})

        return averaging(
            problem,
            train=train,
            server_step=server_step,
            uploads="updates",  # `train` returns theta_k - theta, not theta_k
            ledger=pfl.author.Ledger(
                gradients=1
            ),  # per mini-batch, to account for differential privacy
        )


def main() -> pfl.Table:
    """Compares FedClip with FedAvg on digits and prints the table."""
    clients = pfl.data.digits(train_examples=15)
    local = pfl.LocalTraining(optax.adam(1e-2))
    methods = [pfl.FedAvg(), FedClip(norm=0.3)]
    table = pfl.compare(
        methods, clients, pfl.models.MLP(hidden=(64,)), local, seeds=(0, 1), rounds=60
    )
    print(table)
    return table


if __name__ == "__main__":
    main()
