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
from pfljax.algorithms.common import aggregation


@pfl.method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedClip:
    """FedAvg with clipped updates (Sun et al., 2019): no client moves the global model farther than `norm`."""

    norm: float = pfl.knob(0.5, above=0, help="norm to which client updates are clipped")  # the flag --fedclip.norm

    def build(self, problem: pfl.Problem) -> pfl.Algorithm:
        def start(key, clients):  # the server begins with one global model
            return pfl.Start(models=problem.init_models(key, 1))

        def first_row(key, client, start):  # what one client keeps: its optimizer state, if the run says so
            return pfl.First(problem.kept_optimizers(start.models))

        def client_update(context, models, row, data):  # one client, with the stack of models it received
            trained, row, losses = problem.fit(context, models, row, data.train)
            update = pfl.tree.subtract(trained, models)
            length = jnp.sqrt(pfl.tree.inner(update, update))
            update = pfl.tree.scale(update, jnp.minimum(1, self.norm / jnp.maximum(length, 1e-12)))
            upload, sent = aggregation.weighted(update, data.train.size)  # n_k d_k and n_k; the engine sums them
            return pfl.ClientOutput(row, upload, {"loss": losses[0], "cut": length > self.norm}, sent)

        def server_update(key, state, aggregate):
            models = aggregation.average(state.models, aggregate)  # theta + sum_k n_k d_k / sum_k n_k
            return state._replace(models=models), {"clients_cut": aggregate.report["cut"].mean()}

        return pfl.Algorithm(
            start=start,
            first_row=first_row,
            client_update=client_update,
            server_update=server_update,
            topology="shared",  # all clients receive the server's models, and predict with them
            ledger=pfl.Ledger(gradients=1),  # per mini-batch, for the accounting of differential privacy
        )


def main() -> pfl.Table:
    """Compares FedClip with FedAvg on digits and prints the table."""
    clients = pfl.data.digits(train_examples=15)
    local = pfl.LocalTraining(optax.adam(1e-2))
    methods = [pfl.FedAvg(), FedClip(norm=0.3)]
    table = pfl.compare(methods, clients, pfl.models.MLP(hidden=(64,)), local, seeds=(0, 1), rounds=60)
    print(table)
    return table


if __name__ == "__main__":
    main()
