"""Build your own method from a surrogate: pFedMe (Dinh, Tran, Nguyen, NeurIPS 2020) in thirty lines.

    python examples/own_surrogate.py

f_k(w) = min_theta l_k(theta) + mu / 2 |theta - w|^2. Its partial first-order surrogate near w has v = theta:
local training with a proximal term minimizes over v, and local steps on u = w minimize mu / 2 |theta - w|^2. The
client predicts with theta. `surrogates.client_server` turns this into an `Algorithm`; so would
`surrogates.decentralized`.
"""

from __future__ import annotations

import dataclasses

import optax

import pfljax as pfl
from pfljax.algorithms.common import surrogates


@pfl.author.method(keeps="its model", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class Moreau:
    """pFedMe as a surrogate: a personal model for each client, near the global model."""

    mu: float = pfl.author.hyperparameter(
        2.0, above=0, help="lambda, pull of the personal model toward the global one"
    )

    def build(self, problem: pfl.author.Problem) -> pfl.author.Algorithm:
        return surrogates.client_server(problem, self.surrogate(problem))

    def surrogate(self, problem: pfl.author.Problem) -> surrogates.Surrogate:
        solver = problem.solver

        def minimize(context, u, v, split):
            """theta, the minimum over v: local training near w with a new optimizer."""
            w = pfl.author.tree.first(u)

            def near(params, batch):
                distance = solver.squared_distance(params, w)
                return solver.mean_loss(params, batch) + self.mu / 2 * distance

            start = solver.begin(w)
            state, _ = solver.fit(context.key, start, split, near, round_number=context.round)
            theta = state.whole
            return theta, pfl.author.tree.stack_one(theta), {}

        def loss(w, batch, theta):
            return self.mu / 2 * solver.squared_distance(w, theta)

        return surrogates.Surrogate(
            num_models=1,
            init=pfl.author.tree.first,
            minimize=minimize,
            loss=loss,
            predict=pfl.author.Prediction.single,
            scored="each client's theta",
        )


def main(rounds: int = 40) -> pfl.Result:
    """Trains on digits with 16 clients of 15 examples, and prints the result."""
    clients = pfl.data.digits(num_clients=16, train_examples=15)
    result = pfl.Run(
        Moreau(), clients, pfl.models.MLP(), pfl.LocalTraining(optax.sgd(0.2), epochs=10)
    ).train(rounds)
    print(result)
    return result


if __name__ == "__main__":
    main()
