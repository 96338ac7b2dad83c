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

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import beside
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Ledger, Predictor, Report
from pfljax.local.problem import Problem


def mixture(alpha, own, shared):
    """alpha own + (1 - alpha) shared."""
    return jax.tree.map(lambda v, w: tree.per_row(alpha, v) * v + (1 - tree.per_row(alpha, v)) * w, own, shared)


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
            v, w = models["own"], models["global"]
            w_slope = of_batch(w, batch(0).of_model(0))[1]
            loss, slope = of_batch(mixture(alpha, v, w), batch(0).of_model(1))
            difference, of_parameters = problem.solver.trained(tree.subtract(v, w), slope)
            moved = alpha - self.rate * tree.inner(difference, of_parameters)  # Eq. 10
            memory = jnp.where(number == 0, jnp.clip(moved, 0, 1), alpha), number + 1
            return loss, {"own": tree.scale(slope, alpha), "global": w_slope}, memory

        def rows(key, models, clients):
            own = problem.init_models(key, problem.ids(clients))
            alpha = jnp.full((tree.num_rows(clients),), self.alpha, jnp.float32)
            return beside.rows(problem, own, models) | {"alpha": alpha}

        def train(context, models, row, data):
            memory = row["alpha"], jnp.zeros((), jnp.int32)
            models, row, loss, (alpha, _) = beside.descend(problem, context, models, row, data.train, step, memory)
            return models, row | {"alpha": alpha}, loss[None]

        def predictor(key, state, clients):
            return Predictor.own(mixture(state.clients["alpha"], state.clients["own"], state.models))

        def adapt(key, state, clients):
            mixed = lambda v, w: mixture(jnp.float32(self.alpha), v, w)
            objective = lambda v, batch, w: problem.solver.mean_loss(mixed(v, w), batch)
            rounds = problem.rounds
            own = problem.train_alone(key, state.models, clients, own=False, rounds=rounds, objective=objective)
            return Predictor.own(mixed(own, state.models))

        ledger = Ledger(gradients=2)
        report = Report(scored="each client's mixture of its own and the global parameters")
        return averaging(
            problem, train=train, rows=rows, predictor=predictor, adapt=adapt, ledger=ledger, report=report
        )
