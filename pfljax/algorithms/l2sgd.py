"""L2SGD: every client its own model, drawn toward the mean of all.

Hanzely, Richtarik, "Federated learning of a mixture of global and local models" (2020):
min 1/K sum_k l_k(x_k) + lambda / (2 K) sum_k |x_k - mean|^2.

    A round: x_k <- (1 - pull) x_k + pull mean, the mean as received, then local epochs on l_k; the mean of the x_k is
    sent back.  Client k predicts with x_k.

Departures from the paper: it tosses a coin for each step, a local one or, with probability p, one of pull = alpha
lambda / (K p) toward the mean; here a round is one of these and then as many local steps as the solver says. The mean
is weighted by n_k. Newcomers train from the mean for one round. The first mean is the common initial model, or the
first client's.
"""

from __future__ import annotations

import dataclasses

import jax

from pfljax.algorithms.common.averaging import averaging
from pfljax.core import tree
from pfljax.core.types import Algorithm, Predictor, UsageError
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class L2SGDConfig:
    """L2SGD's knob.

    Attributes:
        pull: share of the way to the mean that a client's model goes in a round; 0 is Local
    """

    pull: float = 0.5

    def __post_init__(self):
        if not 0 <= self.pull <= 1:
            raise UsageError(f"--l2sgd.pull={self.pull}: accepted: a share in [0, 1]")


def l2sgd(problem: Problem, config: L2SGDConfig) -> Algorithm:
    """L2SGD."""

    def rows(key, models, clients):
        return problem.own_rows(key, tree.num_rows(clients))

    def train(turn, models, row, shard):
        toward = lambda x, mean: (1 - config.pull) * x + config.pull * mean[0]
        start = jax.tree.map(toward, row["model"], models)
        row, loss = problem.fit_own(turn, row | {"model": start}, shard.train)
        return tree.stack_one(row["model"]), row, loss[None]

    def predictor(key, state, clients):
        return Predictor.own(state.clients["model"])

    def adapt(key, state, clients):
        return Predictor.own(problem.train_alone(key, state.models, clients, own=False))

    scored = "each client's own model"
    return averaging(problem, train=train, rows=rows, predictor=predictor, adapt=adapt, scored=scored)
