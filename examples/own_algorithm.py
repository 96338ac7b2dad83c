"""Write a method from scratch: gossip, in which clients average their models with random other clients' models.

    python examples/own_algorithm.py
    pfljax compare --methods=local,examples/own_algorithm.py:Gossip --seeds=0,1

Boyd, Ghosh, Prabhakar, Shah, "Randomized gossip algorithms" (2006), with local training:

    A round: client k receives the model phi_j of a random client j;
    phi_k <- (phi_k + phi_j) / 2, trained on D_k.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

import pfljax as pfl


@pfl.author.method(keeps="its model", travels="one other client's model")
@dataclasses.dataclass(frozen=True)
class Gossip:
    """Gossip (Boyd et al., 2006): clients average their models with random other clients' models."""

    share: float = pfl.author.hyperparameter(
        0.5, at_least=0, at_most=1, help="weight of the other model; 0: Local"
    )

    def build(self, problem: pfl.author.Problem) -> pfl.author.Algorithm:
        # ---- The client.

        def first_row(key, client, start) -> pfl.author.First:
            """A client owns a model, which others may download. Its row is its optimizer's state."""
            own = problem.init_personal(key, client)
            return pfl.author.First(row=own.opt_state, model=own.params)

        def download(context, row, cohort):
            """(2,): its own model and that of a random client of the round's cohort."""
            other = cohort.ids[jax.random.randint(context.key, (), 0, len(cohort.ids))]
            return jnp.stack([context.client, other])

        def client_update(context, models, opt_state, data) -> pfl.author.ClientOutput:
            # phi_k <- (phi_k + phi_j) / 2
            weights = jnp.array([1 - self.share, self.share])
            mixed = pfl.author.tree.mix(weights, models)

            # trained on D_k
            trained, loss = problem.fit_personal(
                context, pfl.author.Personal(mixed, opt_state), data.train
            )

            # The first of the two models is its own. It sends the change of that one, to itself.
            own = pfl.author.tree.first(models)
            change = pfl.author.tree.subtract(trained.params, own)
            upload = pfl.author.Upload(update=pfl.author.tree.stack_one(change))
            return pfl.author.ClientOutput(
                row=trained.opt_state, upload=upload, report=pfl.author.ClientReport(loss)
            )

        # ---- The owners of the models: here, the clients.

        def server_update(key, state, aggregate):
            models = pfl.author.tree.add(state.models, aggregate.upload.update)
            return state.with_models(models), {}

        # ---- What a client predicts with: its own model. A newcomer trains one alone.

        def select_models(context, row, size) -> pfl.author.Mixture:
            return pfl.author.Mixture(context.client[None], jnp.ones((1,)))

        def adapt(context, models, data) -> pfl.author.Prediction:
            return pfl.author.Prediction.single(problem.train_newcomer(context, data))

        return pfl.author.Algorithm(
            topology=pfl.author.Topology.PEERS,
            first_row=first_row,
            download=download,
            client_update=client_update,
            server_update=server_update,
            select_models=select_models,
            adapt=adapt,
            ledger=pfl.author.Ledger(gradients=1),
            report=pfl.author.MethodReport(scored="each client's own model"),
        )


def main() -> pfl.Table:
    """Compares gossip with local training on digits and prints the table."""
    clients = pfl.data.digits(train_examples=15)
    local = pfl.LocalTraining(optax.adam(1e-2))
    methods = [pfl.Local(), Gossip()]
    table = pfl.compare(
        methods, clients, pfl.models.MLP(hidden=(64,)), local, seeds=(0, 1), rounds=60
    )
    print(table)
    return table


if __name__ == "__main__":
    main()
