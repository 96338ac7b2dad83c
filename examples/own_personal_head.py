"""A method of two known parts: FedAvg with server momentum, and a personal head that changes slowly.

python examples/own_personal_head.py
pfljax compare --methods=fedrep,examples/own_personal_head.py:PersonalHead --seeds=0,1

A round: client k receives the body theta and trains its head phi_k, theta fixed, on
    l_k(theta, phi_k) + mu / 2 |phi_k - start|^2, where start is phi_k before the round;
then theta to theta_k, phi_k fixed; phi_k stays;
v <- momentum v + theta - sum_k n_k theta_k / sum_k n_k;  theta <- theta - v.
"""

from __future__ import annotations

import dataclasses

import optax

import pfljax as pfl
from pfljax.algorithms.common import Phase, sharing_layers


@pfl.author.method(keeps="its head", travels="the body, both ways")
@dataclasses.dataclass(frozen=True)
class PersonalHead:
    """Personal head: a body averaged with server momentum, and proximal personal heads."""

    mu: float = pfl.author.hyperparameter(
        0.1, at_least=0, help="pull of a head toward its start in each round; 0: none"
    )
    momentum: float = pfl.author.hyperparameter(
        0.5, at_least=0, below=1, help="momentum of the server"
    )

    def build(self, problem: pfl.author.Problem) -> pfl.author.Algorithm:
        def head(params):
            return problem.model.mask(params, 1)  # the last layer

        def body(params):
            return pfl.author.tree.complement(head(params))

        def near_start(solver, params, start, batch):
            """l_k(theta, phi_k) + mu / 2 |phi_k - start|^2; the body is the same in both."""
            distance = solver.squared_distance(params, start)
            return solver.mean_loss(params, batch) + self.mu / 2 * distance

        return sharing_layers(
            problem,
            shared=body,
            phases=[Phase(head, objective=near_start), Phase(body)],
            server_optimizer=optax.sgd(1.0, self.momentum),
            report=pfl.author.MethodReport(scored="each client's own head on the shared body"),
        )


def main() -> pfl.Table:
    """Compares it with FedRep on digits with five label groups."""
    clients = pfl.data.digits(
        num_clients=10, partition=pfl.partitions.LabelGroups(groups=5), train_examples=20
    )
    local = pfl.LocalTraining(optax.sgd(0.1), batch_size=10)
    methods = [pfl.FedRep(head_epochs=1), PersonalHead()]
    table = pfl.compare(methods, clients, pfl.models.MLP(hidden=(64,)), local, rounds=20)
    print(table)
    return table


if __name__ == "__main__":
    main()
