"""A method that trains parts of a model in phases: FedRep, a shared body and personal heads.

    python examples/own_phases.py
    pfljax compare --algorithms=fedavg,fedper,examples/own_phases.py:FedRep --seeds=0,1

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting shared representations for personalized federated learning" (2021):

    A round: client k receives the body theta; it trains its head phi_k for `head_epochs` epochs, theta fixed; then
    theta for `body_epochs` epochs, phi_k fixed; phi_k stays; theta <- sum_k n_k theta_k / sum_k n_k.
"""

from __future__ import annotations

import dataclasses

import optax

import pfljax as pfl
from pfljax.algorithms.common import Phase, sharing_layers
from pfljax.core import tree


@pfl.method(keeps="its head", travels="the body, both ways")
@dataclasses.dataclass(frozen=True)
class FedRep:
    """FedRep (Collins et al., 2021): a shared body and personal heads, trained one after the other."""

    head_epochs: int = pfl.knob(5, at_least=1, help="epochs in which the head is trained, the body fixed")
    body_epochs: int = pfl.knob(1, at_least=1, help="epochs in which the body is trained, the head fixed")

    def build(self, problem: pfl.Problem) -> pfl.Algorithm:
        head = lambda params: problem.model.mask(params, 1)  # the last layer
        body = lambda params: tree.complement(head(params))
        phases = [Phase(head, self.head_epochs), Phase(body, self.body_epochs)]
        report = pfl.Report(scored="each client's own head on the shared body")
        return sharing_layers(problem, body, phases=phases, report=report)


def main() -> pfl.Table:
    """Compares FedRep with FedPer on digits, five label groups."""
    clients = pfl.data.digits(num_clients=10, partition=pfl.partitions.LabelGroups(groups=5), train_examples=20)
    local = pfl.LocalTraining(optax.sgd(0.1), batch_size=10)
    table = pfl.compare([pfl.FedPer(), FedRep()], clients, pfl.models.MLP(hidden=(64,)), local, rounds=20)
    print(table)
    return table


if __name__ == "__main__":
    main()
