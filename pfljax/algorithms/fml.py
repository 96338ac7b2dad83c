"""FML: each client trains its own model and a shared one, the meme model, by deep mutual learning.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu, "Federated mutual learning" (2020).

    A round: client k receives the meme w; with p_v and p_w the two models' predictions, on each mini-batch
    v_k <- v_k - eta grad (alpha CE(p_v, y) + (1 - alpha) KL(p_w || p_v)), w_k fixed, and
    w_k <- w_k - eta grad (beta CE(p_w, y) + (1 - beta) KL(p_v || p_w)), v_k fixed, both from the same models;
    w <- sum_k n_k w_k / sum_k n_k.  Client k predicts with v_k.

Departures from the paper: Clients' own models have the meme's architecture unless networks differ. The mean is weighted
by n_k. Steps are those of the solver's optimizer, one for each model; the optimizer of v_k persists across rounds.
Newcomers train a model of their own as in a round, with the final meme fixed, for as many rounds as the run has.
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
        meme = problem.of_server

        def mutual(own, other, teacher, weight):
            """The mean loss of a model that learns from the labels, with this weight, and from a fixed teacher."""

            def loss(params, x, y, *key):
                logits = other.model.apply(teacher, x, *key), own.model.apply(params, x, *key)
                apart = distillation.divergence(problem, *logits, y)
                return weight * own.solver.loss(params, x, y, *key) + (1 - weight) * apart

            return own.solver.with_loss(loss).mean_loss

        of_own = lambda shared: mutual(problem, meme, shared, self.alpha)
        of_meme = lambda own: mutual(meme, problem, own, self.beta)

        def train(context, models, row, data):
            def gradient(pair, memory, batch):
                loss, slope = jax.value_and_grad(of_own(pair.shared))(pair.own, batch(0).of_model(1))
                of_shared = jax.grad(of_meme(pair.own))(pair.shared, batch(0).of_model(0))
                return loss, beside.Pair(of_shared, slope), memory

            models, row, loss, _ = beside.descend(problem, context, models, row, data.train, gradient)
            return models, row, loss[None]

        def adapt(context, models, data):
            return problem.newcomer(context, models, data, of_own(tree.first(models)))

        return averaging(
            meme,
            train=train,
            row=beside.first_row(problem),
            own=lambda row: row.own.model,
            adapt=adapt,
            ledger=Ledger(gradients=2),
        )
