"""LG-FedAvg: local lower layers that see the client's own data, shared upper ones.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think locally, act globally: federated learning with
local and global representations" (2020).

    A round: client k receives the upper layers theta, trains them together with its own lower layers phi_k on D_k;
    phi_k stays; theta <- sum_k n_k theta_k / sum_k n_k.

Departures from the paper: the authors' runs start from a trained FedAvg model, these from scratch. Newcomers train
lower layers of their own under the shared upper ones, for as many rounds as a run has, and leave those as they are.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common.averaging import sharing_layers
from pfljax.core.types import Algorithm, UsageError
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class LGFedAvgConfig:
    """LG-FedAvg's knob.

    Attributes:
        shared_layers: how many of the model's last layers are shared; 0: half of them, one at least
    """

    shared_layers: int = 0


def lg_fedavg(problem: Problem, config: LGFedAvgConfig) -> Algorithm:
    """LG-FedAvg."""
    num_layers = len(problem.model.layers)
    if not 0 <= config.shared_layers <= num_layers:
        raise UsageError(
            f"--lg_fedavg.shared_layers={config.shared_layers}: accepted: 1 to {num_layers}, the layers of the model, "
            "and 0 for half of them"
        )
    num_shared = config.shared_layers or max(1, num_layers // 2)
    shared = lambda params: problem.model.mask(params, num_shared)
    return sharing_layers(problem, shared, scored="the shared upper layers on each client's own lower ones")
