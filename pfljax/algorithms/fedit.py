"""FedIT: FedAvg of LoRA's matrices.

Zhang, Vahidian, Kuo, Li, Zhang, Yu, Wang, Chen, "Towards building the federated GPT: federated
instruction tuning" (ICASSP 2024, Algorithm 1).

    A round: client k receives A and B, beside frozen weights; it trains both to A_k and B_k;
    A <- sum_k n_k A_k / sum_k n_k and B <- sum_k n_k B_k / sum_k n_k.

Departures from the paper: none. The mean of A times the mean of B is not the mean of the products
(see FlexLoRA).
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common import low_rank
from pfljax.algorithms.common.global_model import averaging
from pfljax.contract.types import Algorithm
from pfljax.local.problem import Problem
from pfljax.settings.method import method


@method(name="fedit", keeps="nothing", travels="A and B, both ways")
@dataclasses.dataclass(frozen=True)
class FedIT:
    """FedIT (Zhang et al., 2024): FedAvg of LoRA's matrices.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedIT()
        FedIT()
    """

    def build(self, problem: Problem) -> Algorithm:
        low_rank.required(problem, "fedit")
        return averaging(problem)
