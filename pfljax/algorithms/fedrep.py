"""FedRep: a shared body and personal heads, trained in turn.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting shared representations for personalized federated learning" (ICML
2021, Algorithm 1).

    A round: client k receives the body theta; it trains its head phi_k for `head_epochs` epochs, theta fixed; then
    theta to theta_k for `body_epochs` epochs, phi_k fixed; phi_k stays; theta <- sum_k n_k theta_k / sum_k n_k.

Departures from the paper: The mean is weighted by n_k (the paper weights clients equally). The head is trained for
whole epochs; the body for as many epochs or steps as in other methods, unless `body_epochs` is given. In the paper's
analysis the body takes one step. Each phase resets its optimizer unless optimizers are kept. Newcomers train their own
head on the shared body, for as many rounds of `head_epochs` epochs as the run has.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common.layers import Phase, base_layers, sharing_layers
from pfljax.contract import tree
from pfljax.contract.types import Algorithm, MethodReport, Params, PyTree
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


@method(keeps="its last layers", travels="the body, both ways")
@dataclasses.dataclass(frozen=True)
class FedRep:
    """FedRep (Collins et al., 2021): a shared body and personal heads, trained in turn.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.FedRep(head_epochs=5, personal_layers=2)
        FedRep(head_epochs=5, body_epochs=None, personal_layers=2)
    """

    head_epochs: int = hyperparameter(
        10,
        at_least=1,
        grid=(1, 5, 10),
        help="number of epochs for the last layers, with the body fixed",
    )
    body_epochs: int | None = hyperparameter(
        None,
        at_least=1,
        grid=(1, 5),
        help="number of epochs for the body. Default: as in local training",
    )
    personal_layers: int = hyperparameter(
        1,
        at_least=0,
        grid=(1, 2),
        help="number of personal last layers; 0 is FedAvg with body_epochs epochs",
    )

    def build(self, problem: Problem) -> Algorithm:
        body = base_layers(problem, self.personal_layers)

        def head(params: Params) -> PyTree:
            return tree.complement(body(params))

        # The head phi_k first, theta fixed; then theta, phi_k fixed.
        phases = [Phase(head, self.head_epochs), Phase(body, self.body_epochs)]

        facts = (("shared layers", len(problem.model.layers) - self.personal_layers),)
        report = MethodReport(
            scored="each client's own last layers on the shared body", facts=facts
        )
        return sharing_layers(problem, body, phases=phases, report=report)
