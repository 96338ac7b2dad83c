"""L2SGD: every client has its own model, pulled toward the mean of all models.

Hanzely, Richtarik, "Federated learning of a mixture of global and local models" (2020):
min 1/K sum_k l_k(x_k) + lambda / (2 K) sum_k |x_k - mean|^2.

    A round: x_k <- (1 - pull) x_k + pull mean, with the mean as received, then local epochs on l_k; the server averages
    the x_k.  Client k predicts with x_k.

Departures from the paper: The paper tosses a coin for each step: a local step or, with probability p, a step of pull =
alpha lambda / (K p) toward the mean. Here a round is one step toward the mean, then the solver's local steps. The mean
is weighted by n_k. Newcomers train from the mean for one round. The first mean is the common initial model, or the
first client's.
"""

from __future__ import annotations

import dataclasses

import jax

from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Ledger, Prediction
from pfljax.local.problem import Problem


@method(keeps="its model", travels="the mean down, its model up")
@dataclasses.dataclass(frozen=True)
class L2SGD:
    """L2SGD (Hanzely and Richtárik, 2020): every client has its own model, pulled toward the mean of all models."""

    pull: float = knob(
        0.5,
        at_least=0,
        at_most=1,
        grid=(0.1, 0.3, 0.5, 0.7, 0.9),
        help="fraction of the distance to the mean that a model moves; 0 is Local",
    )

    def build(self, problem: Problem) -> Algorithm:
        def train(context, models, row, data):
            toward = lambda x, mean: (1 - self.pull) * x + self.pull * mean[0]
            start = jax.tree.map(toward, row.model, models)
            row, loss = row._replace(model=start).fit(problem, context, data.train)
            return tree.stack_one(row.model), row, loss[None]

        def adapt(context, models, data):
            return Prediction.one(problem.alone(context, tree.first(models), data))

        return averaging(
            problem,
            train=train,
            row=lambda key, client, models: problem.own_model(key, client),
            own=lambda row: row.model,
            adapt=adapt,
            ledger=Ledger(gradients=1),
        )
