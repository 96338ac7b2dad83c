"""FedPer: shared base layers, personal last layers.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization layers" (2019).

    A round: client k receives the base layers theta, trains them together with its own last layers phi_k on D_k;
    phi_k stays; theta <- sum_k n_k theta_k / sum_k n_k.

Departures from the paper: none. Newcomers train their own last layers on the shared base, for as many rounds as the run
has.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common.layers import base_layers, sharing_layers
from pfljax.contract.types import Algorithm, MethodReport
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


@method(keeps="its last layers", travels="the base layers, both ways")
@dataclasses.dataclass(frozen=True)
class FedPer:
    """FedPer (Arivazhagan et al., 2019): shared base layers, personal last layers.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.FedPer(personal_layers=2)
        FedPer(personal_layers=2)
    """

    personal_layers: int = hyperparameter(
        1, at_least=0, grid=(1, 2), help="number of personal last layers; 0 is FedAvg"
    )

    def build(self, problem: Problem) -> Algorithm:
        shared = base_layers(problem, self.personal_layers)
        facts = (("shared layers", len(problem.model.layers) - self.personal_layers),)
        report = MethodReport(
            scored="each client's own last layers on the shared ones", facts=facts
        )
        return sharing_layers(problem, shared, report=report)
