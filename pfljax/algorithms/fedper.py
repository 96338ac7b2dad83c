"""FedPer: shared base layers, the last ones personal.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization layers" (2019).

    A round: client k receives the base layers theta, trains them together with its own last layers phi_k on D_k;
    phi_k stays; theta <- sum_k n_k theta_k / sum_k n_k.

Departures from the paper: none. Newcomers train last layers of their own on the shared base, for as many rounds as a
run has.
"""

from __future__ import annotations

import dataclasses

import jax

from pfljax.algorithms.common.averaging import sharing_layers
from pfljax.core.types import Algorithm, UsageError
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class FedPerConfig:
    """FedPer's knob.

    Attributes:
        personal_layers: how many of the model's last layers are personal; 0 is FedAvg
    """

    personal_layers: int = 1


def fedper(problem: Problem, config: FedPerConfig) -> Algorithm:
    """FedPer."""
    num_layers = len(problem.model.layers)
    if not 0 <= config.personal_layers <= num_layers:
        raise UsageError(
            f"--fedper.personal_layers={config.personal_layers}: accepted: 0 to {num_layers}, the layers of the model"
        )

    def shared(params):
        return jax.tree.map(lambda personal: not personal, problem.model.mask(params, config.personal_layers))

    algorithm = sharing_layers(problem, shared, scored="each client's own last layers on the shared ones")
    return algorithm._replace(facts=(("shared layers", num_layers - config.personal_layers),))
