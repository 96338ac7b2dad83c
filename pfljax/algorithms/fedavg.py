"""FedAvg and FedAvg+: one global model, fine-tuned by each client in FedAvg+.

FedAvg: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-efficient learning of deep networks from
decentralized data" (AISTATS 2017). FedAvg+: Jiang, Konecny, Rush, Kannan, "Improving federated learning
personalization via model agnostic meta learning" (2019), as FedEM and FedeRiCo compare with it.

    A round: every client of the cohort receives theta, trains it on D_k for E epochs to theta_k;
    theta <- sum_k n_k theta_k / sum_k n_k.
    FedAvg+, before evaluation: client k trains theta for `tune_epochs` epochs on D_k.

Departures from the paper: none. The clients' optimizer is reset in every round, unless `Problem.keep_optimizer` is set.
Tuning always starts with a fresh optimizer and the initial learning rate, whatever the schedule: at a hundredth of that
rate, which a schedule may end at, tuning would change almost nothing.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Ledger, Prediction, Report
from pfljax.local.problem import Problem


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedAvg:
    """FedAvg (McMahan et al., 2017): one global model, the mean of the clients' trained copies."""

    def build(self, problem: Problem) -> Algorithm:
        return averaging(problem)


@method(name="fedavg_plus", keeps="its tuned copy", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedAvgPlus:
    """FedAvg with local tuning (Jiang et al., 2019): every client fine-tunes the global model before it predicts."""

    tune_epochs: int = knob(
        1, at_least=0, grid=(1, 2, 5, 10), help="number of epochs of each client's tuning before evaluation"
    )

    def build(self, problem: Problem) -> Algorithm:
        tuning = problem.with_epochs(self.tune_epochs)

        def predict(context, models, row, data):
            return Prediction(tree.stack_one(tuning.alone(context, tree.first(models), data)))

        ledger = Ledger(gradients=1, unaccounted="the tuning")
        report = Report(scored="the global model, tuned by each client on its training data")
        return averaging(problem, predict=predict, ledger=ledger, report=report)
