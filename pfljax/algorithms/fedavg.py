"""FedAvg and FedAvg+: one global model, and the same tuned by each client.

FedAvg: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-efficient learning of deep networks from
decentralized data" (AISTATS 2017). FedAvg+: Jiang, Konecny, Rush, Kannan, "Improving federated learning
personalization via model agnostic meta learning" (2019), as FedEM and FedeRiCo compare with it.

    A round: every client of the cohort receives theta, trains it on D_k for E epochs to theta_k;
    theta <- sum_k n_k theta_k / sum_k n_k.
    FedAvg+ then, before it is evaluated: client k trains theta for `tune_epochs` epochs on D_k.

Departures from the paper: none. The clients' optimizer starts afresh in every round, unless it is to be kept
(`Problem.keep_optimizer`). Tuning always starts afresh and at the rate of the first round, whatever the schedule: at
the hundredth of it that a schedule may leave, a pass would change next to nothing.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common.averaging import averaging
from pfljax.core.method import knob, method
from pfljax.core.types import Algorithm, Ledger, Predictor, Report
from pfljax.local.problem import Problem


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedAvg:
    """FedAvg (McMahan et al., 2017): one global model, the mean of what clients train it to."""

    def build(self, problem: Problem) -> Algorithm:
        return averaging(problem)


@method(name="fedavg_plus", keeps="its tuned copy", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedAvgPlus:
    """FedAvg with local tuning (Jiang et al., 2019): every client tunes the global model before it predicts."""

    tune_epochs: int = knob(
        1, at_least=0, grid=(1, 2, 5, 10), help="epochs that each client tunes the global model before evaluation"
    )

    def build(self, problem: Problem) -> Algorithm:
        tuning = problem._replace(solver=problem.solver._replace(epochs=self.tune_epochs, steps=0))

        def predictor(key, state, clients):
            return Predictor.own(tuning.train_alone(key, state.models, clients, own=False))

        ledger = Ledger(gradients=1, unaccounted="the tuning")
        report = Report(scored="the global model, tuned by each client on its training data")
        return averaging(problem, predictor=predictor, ledger=ledger, report=report)
