"""FedProx: FedAvg whose clients stay near the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous networks" (MLSys 2020).

    A round: client k receives theta and takes local steps on l_k(theta_k) + mu / 2 |theta_k - theta|^2    (Eq. 2)
    theta <- sum_k n_k theta_k / sum_k n_k.

Departures from the paper: the mean is weighted by n_k, with cohorts drawn uniformly (the paper draws clients in
proportion to n_k and weights them alike); every client does the same number of epochs.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common.averaging import averaging
from pfljax.core.types import Algorithm, UsageError
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class FedProxConfig:
    """FedProx's knob.

    Attributes:
        mu: strength of the proximal term; 0 is FedAvg
    """

    mu: float = 0.1

    def __post_init__(self):
        if self.mu < 0:
            raise UsageError(f"--fedprox.mu={self.mu}: accepted: 0 or more")


def fedprox(problem: Problem, config: FedProxConfig) -> Algorithm:
    """FedProx."""

    def train(turn, models, kept, shard):
        objective = lambda params, batch, anchor: problem.solver.proximal(anchor, config.mu)(params, batch)  # Eq. 2
        return problem.fit_models(turn, models, kept, shard.train, objective, aux=models)

    return averaging(problem, train=train)
