"""Ditto: a global model, and personal ones held near it.

Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through personalization" (ICML 2021, Algorithm 1).

    A round: client k receives w and trains it to w_k as in FedAvg;
    its own v_k takes local steps on l_k(v_k) + lambda / 2 |v_k - w|^2, w as received;
    w <- sum_k n_k w_k / sum_k n_k.  Client k predicts with v_k.

Departures from the paper: both models pass over the data in the same order, and for equally long; the mean is weighted
by n_k. Newcomers train a model from w, held near it, for as many rounds as a run has.
"""

from __future__ import annotations

import dataclasses

import jax

from pfljax.algorithms.common.averaging import averaging
from pfljax.core import tree
from pfljax.core.types import Algorithm, Predictor, UsageError
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class DittoConfig:
    """Ditto's knob.

    Attributes:
        strength: lambda, of the pull of the personal model to the global one; 0 is Local
    """

    strength: float = 0.1

    def __post_init__(self):
        if self.strength < 0:
            raise UsageError(f"--ditto.strength={self.strength}: accepted: 0 or more")


def ditto(problem: Problem, config: DittoConfig) -> Algorithm:
    """Ditto."""

    def near(w, params, batch):
        return problem.solver.proximal(w, config.strength)(params, batch.of_model(1))

    def rows(key, models, clients):
        num = tree.num_rows(clients)
        return {"personal": problem.own_rows(key, num), "optimizer": problem.optimizer_rows(models, num)}

    def train(turn, models, row, shard):
        w = jax.tree.map(lambda leaf: leaf[0], models)
        trained, optimizer, _ = problem.fit_models(turn, models, row["optimizer"], shard.train)
        personal, loss = problem.fit_own(
            turn, row["personal"], shard.train, lambda params, batch: near(w, params, batch)
        )
        return trained, {"personal": personal, "optimizer": optimizer}, loss[None]

    def predictor(key, state, clients):
        return Predictor.own(state.clients["personal"]["model"])

    def adapt(key, state, clients):
        objective = lambda params, batch, w: near(w, params, batch)
        models = problem.train_alone(key, state.models, clients, own=False, rounds=problem.rounds, objective=objective)
        return Predictor.own(models)

    scored = "each client's own model"
    return averaging(problem, train=train, rows=rows, predictor=predictor, adapt=adapt, scored=scored, gradients=2)
