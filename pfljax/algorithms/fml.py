"""FML: each client trains its own model and a shared one, the meme model, by deep mutual learning.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu, "Federated mutual learning" (2020).

    A round: client k receives the meme w; with p_v and p_w the two models' predictions, on each mini-batch
    v_k <- v_k - eta grad (alpha CE(p_v, y) + (1 - alpha) KL(p_w || p_v)), w_k fixed, and
    w_k <- w_k - eta grad (beta CE(p_w, y) + (1 - beta) KL(p_v || p_w)), v_k fixed, both from the same models;
    w <- sum_k n_k w_k / sum_k n_k.  Client k predicts with v_k.

Departures from the paper: Clients' own models have the meme's architecture. The mean is weighted by n_k. Steps are
those of the solver's optimizer, one for each model; the optimizer of v_k persists across rounds. Newcomers train a
model of their own as in a round, with the final meme fixed, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses

import jax

from pfljax.algorithms.common import beside, classes, distillation
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Ledger
from pfljax.local.problem import Problem


@method(keeps="its model", travels="the meme model, both ways")
@dataclasses.dataclass(frozen=True)
class FML:
    """FML (Shen et al., 2020): each client's own model and a shared one learn from each other."""

    alpha: float = knob(
        0.5, at_least=0, at_most=1, grid=(0.1, 0.5, 0.9), help="weight of the labels in its own model's loss; 1: Local"
    )
    beta: float = knob(
        0.5, at_least=0, at_most=1, grid=(0.1, 0.5, 0.9), help="weight of the labels in the meme's loss; 1: FedAvg"
    )

    def build(self, problem: Problem) -> Algorithm:
        classes.required(problem, "fml")
        solver = problem.solver

        def mutual(teacher, weight):
            """The mean loss of a model that learns from the labels, with this weight, and from a fixed teacher."""

            def loss(params, x, y, *key):
                apart = distillation.divergence(problem, teacher, params, x, y, *key)
                return weight * solver.loss(params, x, y, *key) + (1 - weight) * apart

            return solver.with_loss(loss).mean_loss

        def train(context, models, row, data):
            def gradient(pair, memory, batch):
                loss, slope = jax.value_and_grad(mutual(pair.shared, self.alpha))(pair.own, batch(0).of_model(1))
                of_meme = jax.grad(mutual(pair.own, self.beta))(pair.shared, batch(0).of_model(0))
                return loss, beside.Pair(of_meme, slope), memory

            models, row, loss, _ = beside.descend(problem, context, models, row, data.train, gradient)
            return models, row, loss[None]

        def adapt(context, models, data):
            return problem.newcomer(context, models, data, mutual(tree.first(models), self.alpha))

        return averaging(
            problem,
            train=train,
            row=beside.first_row(problem),
            own=lambda row: row.own.model,
            adapt=adapt,
            ledger=Ledger(gradients=2),
        )
