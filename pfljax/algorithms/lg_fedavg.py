"""LG-FedAvg: local lower layers, which see the client's own data, and shared upper layers.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think locally, act globally: federated learning with
local and global representations" (2020).

    A round: client k receives the upper layers theta, trains them together with its own lower layers phi_k on D_k;
    phi_k stays; theta <- sum_k n_k theta_k / sum_k n_k.

Departures from the paper: The authors' runs start from a trained FedAvg model, ours from scratch. Newcomers train their
own lower layers under the shared upper ones, which stay fixed, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common.layers import sharing_layers
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Algorithm, MethodReport, Params, PyTree
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


@method(name="lg_fedavg", keeps="its lower layers", travels="the upper layers, both ways")
@dataclasses.dataclass(frozen=True)
class LGFedAvg:
    """LG-FedAvg (Liang et al., 2020): local lower layers and shared upper layers.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.LGFedAvg(shared_layers=2)
        LGFedAvg(shared_layers=2)
    """

    shared_layers: int = hyperparameter(
        0,
        at_least=0,
        grid=(1, 2),
        help="number of shared last layers; 0: half of the layers, at least one",
    )

    def build(self, problem: Problem) -> Algorithm:
        num_layers = len(problem.model.layers)
        if self.shared_layers > num_layers:
            accepted = f"accepted: 1 to {num_layers}, the number of layers, or 0 for half of them"
            raise ArgumentError("shared_layers", accepted, self.shared_layers)
        num_shared = self.shared_layers or max(1, num_layers // 2)

        def shared(params: Params) -> PyTree:
            """theta: the last layers."""
            return problem.model.mask(params, num_shared)

        report = MethodReport(scored="the shared upper layers on each client's own lower ones")
        return sharing_layers(problem, shared, report=report)
