"""FedAvg: one global model.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-efficient learning of deep networks
from decentralized data" (AISTATS 2017).

    A round: every client of the cohort receives theta, trains it on D_k for E epochs to theta_k;
    theta <- sum_k n_k theta_k / sum_k n_k.

Departures from the paper: none. The clients' optimizer is reset in every round, except for counts
of steps, unless `Problem.keep_optimizer` is set.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common.global_model import averaging
from pfljax.contract.types import Algorithm
from pfljax.local.problem import Problem
from pfljax.settings.method import method


@method(keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedAvg:
    """FedAvg (McMahan et al., 2017): one global model, the mean of the clients' trained copies.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.FedAvg()
        FedAvg()
    """

    def build(self, problem: Problem) -> Algorithm:
        return averaging(problem)
