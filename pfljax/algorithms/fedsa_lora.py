"""FedSA-LoRA: clients share A and keep B.

Guo, Zeng, Wang, Fan, Wang, Qu, "Selective aggregation for low-rank adaptation in federated
learning" (ICLR 2025).

    A round: client k receives A, trains it together with its own B_k on D_k; B_k stays;
    A <- sum_k n_k A_k / sum_k n_k.

Departures from the paper: The mean is weighted by n_k (the paper weights clients equally). As in
the authors' code, the classifier stays with its client, and so does whatever else is trained.
Newcomers train their own B with A fixed, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common import low_rank
from pfljax.algorithms.common.layers import sharing_layers
from pfljax.contract.types import Algorithm, MethodReport, Params, PyTree
from pfljax.local.problem import Problem
from pfljax.settings.method import method


@method(name="fedsa_lora", keeps="B and its head", travels="A, both ways")
@dataclasses.dataclass(frozen=True)
class FedSALoRA:
    """FedSA-LoRA (Guo et al., 2025): clients share A and keep B.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedSALoRA()
        FedSALoRA()
    """

    def build(self, problem: Problem) -> Algorithm:
        low_rank.required(problem, "fedsa_lora")

        def is_a(params: Params) -> PyTree:
            return problem.model.named(params, low_rank.A)

        report = MethodReport(scored="each client's own B and head with the shared A")
        return sharing_layers(problem, is_a, report=report)
