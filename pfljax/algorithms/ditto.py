"""Ditto: a global model and personal models regularized toward it.

Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through personalization" (ICML 2021, Algorithm 1).

    A round: client k receives w and trains it to w_k as in FedAvg;
    its own v_k takes local steps on l_k(v_k) + lambda / 2 |v_k - w|^2, w as received;
    w <- sum_k n_k w_k / sum_k n_k.  Client k predicts with v_k.

On adapters of a frozen model, this is PerAda (Xie et al., CVPR 2024, `perada`) without its server's distillation.

Departures from the paper: Both models see the data in the same order and for equally long. The mean is weighted by n_k.
Newcomers train a model from w, regularized toward it, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common.averaging import averaging
from pfljax.algorithms.common.beside import Row, first_row
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Ledger, Prediction
from pfljax.local.problem import Problem


@method(keeps="its model", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class Ditto:
    """Ditto (Li et al., 2021): a global model and personal models regularized toward it."""

    strength: float = knob(
        0.1,
        at_least=0,
        grid=(0.01, 0.1, 1.0, 2.0),
        help="lambda, pull of the personal model toward the global one; 0 is Local",
    )

    def build(self, problem: Problem) -> Algorithm:
        def near(w):
            return lambda params, batch: problem.solver.proximal(w, self.strength)(params, batch.of_model(1))

        def train(context, models, row, data):
            trained, optimizer, _ = problem.fit(context, models, row.optimizer, data.train)
            own, loss = row.own.fit(problem, context, data.train, near(tree.first(models)))
            return trained, Row(own, optimizer), loss[None]

        def adapt(context, models, data):
            w = tree.first(models)
            return Prediction.one(problem.alone(context, w, data, rounds=problem.rounds, objective=near(w)))

        return averaging(
            problem,
            train=train,
            row=first_row(problem),
            own=lambda row: row.own.model,
            adapt=adapt,
            ledger=Ledger(gradients=2),
        )
