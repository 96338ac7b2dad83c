"""FedAvg and FedAvg+: one global model, and the same tuned by each client.

FedAvg: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-efficient learning of deep networks from
decentralized data" (AISTATS 2017). FedAvg+: Jiang, Konecny, Rush, Kannan, "Improving federated learning
personalization via model agnostic meta learning" (2019), as FedEM and FedeRiCo compare with it.

    A round: every client of the cohort receives theta, trains it on D_k for E epochs to theta_k;
    theta <- sum_k n_k theta_k / sum_k n_k.
    FedAvg+ then, before it is evaluated: client k trains theta for `tune_epochs` epochs on D_k.

Departures from the paper: none. The clients' optimizer starts afresh in every round, unless it is to be kept
(`Problem.keep_optimizer`). Tuning always starts afresh, and with the rate of the first round whatever the schedule: a
pass at the hundredth of it that a schedule may leave would change next to nothing.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common.averaging import averaging
from pfljax.core.types import Algorithm, Predictor, UsageError
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class FedAvgConfig:
    """FedAvg has no knobs of its own."""


@dataclasses.dataclass(frozen=True)
class FedAvgPlusConfig:
    """FedAvg+'s knobs.

    Attributes:
        tune_epochs: epochs that each client tunes the global model before it is evaluated
    """

    tune_epochs: int = 1

    def __post_init__(self):
        if self.tune_epochs < 0:
            raise UsageError(f"--fedavg_plus.tune_epochs={self.tune_epochs}: accepted: 0 or more")


def fedavg(problem: Problem, config: FedAvgConfig) -> Algorithm:
    """FedAvg."""
    del config
    return averaging(problem)


def fedavg_plus(problem: Problem, config: FedAvgPlusConfig) -> Algorithm:
    """FedAvg with local tuning before evaluation."""
    tuning = problem._replace(solver=problem.solver._replace(epochs=config.tune_epochs, steps=0))

    def predictor(key, state, clients):
        return Predictor.own(tuning.train_alone(key, state.models, clients, own=False))

    scored = "the global model, tuned by each client on its training data"
    return averaging(problem, predictor=predictor, scored=scored)._replace(unaccounted="the tuning")
