"""Build your own method from a surrogate: pFedMe (Dinh, Tran, Nguyen, NeurIPS 2020) in thirty lines.

    python examples/own_surrogate.py

f_k(w) = min_theta l_k(theta) + strength / 2 |theta - w|^2. Its partial first-order surrogate near w has v = theta:
local training with a proximal term minimizes over v, and local steps on u = w minimize strength / 2 |theta - w|^2. The
client predicts with theta. `surrogates.client_server` turns this into an `Algorithm`; so would
`surrogates.decentralized`.
"""

from __future__ import annotations

import dataclasses

import optax

import pfljax as pfl
from pfljax.algorithms.common import surrogates


@pfl.method(keeps="its model", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class Moreau:
    """pFedMe as a surrogate: a personal model for each client, near the global model."""

    strength: float = pfl.knob(2.0, above=0, help="lambda, pull of the personal model toward the global one")

    def build(self, problem: pfl.Problem) -> pfl.Algorithm:
        return surrogates.client_server(problem, self.surrogate(problem))

    def surrogate(self, problem: pfl.Problem) -> surrogates.Surrogate:
        solver = problem.solver

        def minimize(context, u, v, split):
            w = pfl.tree.first(u)
            near, start = solver.proximal(w, self.strength), solver.optimizer.init(w)
            theta, _, _ = solver.fit(context.key, w, start, split, round_number=context.round, objective=near)
            return theta, pfl.tree.stack_one(theta), {}

        return surrogates.Surrogate(
            num_models=1,
            init=pfl.tree.first,
            minimize=minimize,
            loss=lambda w, batch, theta: self.strength / 2 * solver.squared_distance(w, theta),
            predict=lambda theta: pfl.Prediction.one(theta),
            scored="each client's theta",
        )


def main(rounds: int = 40) -> pfl.Result:
    """Trains on digits with 16 clients of 15 examples, and prints the result."""
    clients = pfl.data.digits(num_clients=16, train_examples=15)
    result = pfl.Run(Moreau(), clients, pfl.models.MLP(), pfl.LocalTraining(optax.sgd(0.2), epochs=10)).train(rounds)
    print(result)
    return result


if __name__ == "__main__":
    main()
