"""q-FFL: the worse a client fares, the more it counts.

Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning" (ICLR 2020, Algorithm 2, q-FedAvg).

    A round: client k receives w, with F_k = l_k(w), and trains it to w_k; d_k = w - w_k, which times L is its gradient;
    w <- w - sum_k F_k^q L d_k / sum_k (q F_k^(q-1) |L d_k|^2 + L F_k^q).

Departures from the paper: clients are drawn uniformly, not in proportion to n_k, and count alike. L is a knob, which
the paper sets to 1 / eta: local steps of Adam have no such scale.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pfljax.algorithms.common.averaging import averaging, loss_at_start
from pfljax.core import tree
from pfljax.core.types import Algorithm, ClientOutput, UsageError
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem

LEAST = 1e-10  # of a loss, so that its powers stay finite


@dataclasses.dataclass(frozen=True)
class QFFLConfig:
    """q-FFL's knobs.

    Attributes:
        q: how much the worse-off count more; 0 counts all clients alike
        lipschitz: L, of the clients' gradients; the paper takes 1 / learning rate
    """

    q: float = 1.0
    lipschitz: float = 1.0

    def __post_init__(self):
        if self.q < 0:
            raise UsageError(f"--q_ffl.q={self.q}: accepted: 0 or more")
        if not self.lipschitz > 0:
            raise UsageError(f"--q_ffl.lipschitz={self.lipschitz}: accepted: above 0")


def q_ffl(problem: Problem, config: QFFLConfig) -> Algorithm:
    """q-FFL."""

    def work(turn, models, kept, shard):
        loss = loss_at_start(problem, models, shard) + LEAST
        trained, kept, losses = problem.fit_models(turn, models, kept, shard.train)
        moved = tree.scale(tree.subtract(models, trained), config.lipschitz)
        counts = loss**config.q
        step = config.q * loss ** (config.q - 1) * tree.inner(moved, moved) + config.lipschitz * counts
        upload = {"moved": tree.scale(moved, counts), "step": step[None]}
        return ClientOutput(kept, upload, {"loss": losses[0]}, (shard.train.size > 0)[None])

    def update(key, state, returned):
        step = returned.upload["step"]
        moved = tree.scale(returned.upload["moved"], 1 / jnp.where(step > 0, step, 1))
        return state._replace(models=tree.subtract(state.models, moved)), {}

    return averaging(problem)._replace(work=work, update=update, unaccounted=BY_LOSS)
