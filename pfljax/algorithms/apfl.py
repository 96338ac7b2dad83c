"""APFL: each client mixes the global model with its own and learns the mixing weight.

Deng, Kamani, Mahdavi, "Adaptive personalized federated learning" (2020, Algorithm 1 and Eq. 10).

    A round: client k receives w; on each mini-batch w_k <- w_k - eta grad f(w_k) and, for the mixture
    m = alpha_k v_k + (1 - alpha_k) w_k,  v_k <- v_k - eta alpha_k grad f(m);
    on the first mini-batch alpha_k <- alpha_k - rate <v_k - w_k, grad f(m)>, clipped to [0, 1];
    w <- sum_k n_k w_k / sum_k n_k.  Client k predicts with alpha_k v_k + (1 - alpha_k) w.

Departures from the paper: The mean is weighted by n_k. Steps are those of the solver's optimizer, one for each model;
the optimizer of v_k persists across rounds. alpha moves once per round, as in the authors' code. Newcomers train v
through the mixture with the final w, at the initial alpha, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import beside
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, Ledger, Prediction, Report
from pfljax.local.problem import Problem


class Row(NamedTuple):
    """The client's models, side by side, and the weight () of its own in their mixture."""

    models: beside.Row
    alpha: Array


def mixture(alpha, own, shared):
    """alpha own + (1 - alpha) shared."""
    return jax.tree.map(lambda v, w: alpha * v + (1 - alpha) * w, own, shared)


@method(keeps="its model, its mixing weight", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class APFL:
    """APFL (Deng et al., 2020): each client mixes the global model with its own and learns the mixing weight."""

    alpha: float = knob(
        0.5,
        at_least=0,
        at_most=1,
        grid=(0.25, 0.5, 0.75),
        help="initial weight of a client's own model in its mixture; 0 is FedAvg, 1 is Local",
    )
    rate: float = knob(0.1, at_least=0, help="learning rate of alpha; 0 keeps alpha fixed")

    def build(self, problem: Problem) -> Algorithm:
        of_batch = jax.value_and_grad(lambda params, batch: problem.solver.mean_loss(params, batch))

        def step(models, memory, batch):
            alpha, number = memory
            w, v = models
            w_slope = of_batch(w, batch(0).of_model(0))[1]
            loss, slope = of_batch(mixture(alpha, v, w), batch(0).of_model(1))
            difference, of_parameters = problem.solver.trained(tree.subtract(v, w), slope)
            moved = alpha - self.rate * tree.inner(difference, of_parameters)  # Eq. 10
            memory = jnp.where(number == 0, jnp.clip(moved, 0, 1), alpha), number + 1
            return loss, beside.Pair(w_slope, tree.scale(slope, alpha)), memory

        def row(key, client, models):
            pair = beside.first_row(problem)(key, client, models)
            return Row(pair, jnp.asarray(self.alpha, jnp.float32))

        def train(context, models, row, data):
            memory = row.alpha, jnp.zeros((), jnp.int32)
            models, pair, loss, (alpha, _) = beside.descend(
                problem, context, models, row.models, data.train, step, memory
            )
            return models, Row(pair, alpha), loss[None]

        def predict(context, models, row, data):
            return Prediction.one(mixture(row.alpha, row.models.own.model, tree.first(models)))

        def adapt(context, models, data):
            w = tree.first(models)
            mixed = lambda v: mixture(jnp.asarray(self.alpha, jnp.float32), v, w)
            objective = lambda v, batch: problem.solver.mean_loss(mixed(v), batch)
            v = problem.alone(context, w, data, rounds=problem.rounds, objective=objective)
            return Prediction.one(mixed(v))

        ledger = Ledger(gradients=2)
        report = Report(scored="each client's mixture of its own and the global parameters")
        return averaging(problem, train=train, row=row, predict=predict, adapt=adapt, ledger=ledger, report=report)
