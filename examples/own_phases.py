"""A method that trains parts of a model in phases: a shared body first, then personal heads on it.

    python examples/own_phases.py
    pfljax compare --methods=fedrep,examples/own_phases.py:BodyFirst --seeds=0,1

FedRep trains the head first. Here a client's head trains on the body that the client has just trained:

    A round: client k receives the body theta; it trains theta for `body_epochs` epochs, its head phi_k fixed; then
    phi_k for `head_epochs` epochs, theta fixed; phi_k stays; theta <- sum_k n_k theta_k / sum_k n_k.
"""

from __future__ import annotations

import dataclasses

import optax

import pfljax as pfl
from pfljax.algorithms.common import Phase, sharing_layers


@pfl.author.method(keeps="its head", travels="the body, both ways")
@dataclasses.dataclass(frozen=True)
class BodyFirst:
    """Body first: a shared body and personal heads, trained in turn."""

    body_epochs: int = pfl.author.hyperparameter(
        1, at_least=1, help="number of epochs for the body, with the head fixed"
    )
    head_epochs: int = pfl.author.hyperparameter(
        5, at_least=1, help="number of epochs for the head, with the body fixed"
    )

    def build(self, problem: pfl.author.Problem) -> pfl.author.Algorithm:
        def head(params):
            return problem.model.mask(params, 1)  # the last layer

        def body(params):
            return pfl.author.tree.complement(head(params))

        phases = [Phase(body, self.body_epochs), Phase(head, self.head_epochs)]
        report = pfl.author.MethodReport(scored="each client's own head on the shared body")
        return sharing_layers(problem, body, phases=phases, report=report)


def main() -> pfl.Table:
    """Compares it with FedRep on digits with five label groups."""
    clients = pfl.data.digits(
        num_clients=10, partition=pfl.partitions.LabelGroups(groups=5), train_examples=20
    )
    local = pfl.LocalTraining(optax.sgd(0.1), batch_size=10)
    methods = [pfl.FedRep(head_epochs=5), BodyFirst()]
    table = pfl.compare(methods, clients, pfl.models.MLP(hidden=(64,)), local, rounds=20)
    print(table)
    return table


if __name__ == "__main__":
    main()
