"""Per-FedAvg: a global model that one gradient step turns into a good personal model.

Fallah, Mokhtari, Ozdaglar, "Personalized federated learning with theoretical guarantees: a model-agnostic
meta-learning approach" (NeurIPS 2020). It minimizes sum_k F_k(theta), F_k(theta) = f_k(theta - alpha grad f_k(theta)).

    A local step on mini-batches D, D', D'':                                                       (Algorithm 1)
        theta~ <- theta - alpha grad f_k(theta; D)
        theta  <- theta - beta (I - alpha H) grad f_k(theta~; D'),
        first_order:   H = 0
        hessian_free:  H v = (grad f_k(theta + delta v; D'') - grad f_k(theta - delta v; D'')) / (2 delta)
    theta <- sum_k n_k theta_k / sum_k n_k;  a client predicts after gradient steps of rate alpha on its training data.

Departures from the paper: D', D and D'' are a step's mini-batch and the next two, so that a round passes over the data
as in FedAvg and alpha = 0 is exactly FedAvg. beta is the solver's optimizer. The mean is weighted by n_k. The steps
before predicting use all of a client's training examples at once, never test examples.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Ledger, Prediction, Report
from pfljax.local.problem import Problem


@method(
    name="per_fedavg",
    keeps="a gradient step from the global model",
    travels="the global model, both ways",
)
@dataclasses.dataclass(frozen=True)
class PerFedAvg:
    """Per-FedAvg (Fallah et al., 2020): a global model that one gradient step turns into a good personal model."""

    alpha: float = knob(
        0.03,
        at_least=0,
        grid=(0.003, 0.01, 0.03, 0.1),
        help="learning rate of the personalizing step; 0 is FedAvg",
    )
    form: Literal["first_order", "hessian_free"] = knob(
        "first_order",
        help="meta-gradient without second derivatives, or approximating them by gradient differences",
    )
    delta: float = knob(0.001, above=0, help="step size of these differences")
    adapt_steps: int = knob(
        1, at_least=0, help="number of steps at rate alpha before a client predicts"
    )

    def build(self, problem: Problem) -> Algorithm:
        solver, hessian_free = problem.solver, self.form == "hessian_free"
        of_batch = jax.value_and_grad(lambda params, batch: solver.mean_loss(params, batch))

        def moved(params, direction, rate):
            return jax.tree.map(lambda p, g: p - rate * g, params, direction)

        def meta_gradient(params, memory, batch):
            inner = moved(params, of_batch(params, batch(1).of_model(3))[1], self.alpha)
            loss, outer = of_batch(inner, batch(0).of_model(0))
            if hessian_free:
                third, steps = batch(2), ((1, self.delta), (2, -self.delta))
                ahead, behind = (
                    of_batch(moved(params, outer, -d), third.of_model(n))[1] for n, d in steps
                )
                curvature = tree.scale(
                    tree.subtract(ahead, behind), 1 / (2 * self.delta)
                )  # H times the outer gradient
                outer = moved(outer, curvature, self.alpha)
            return loss, outer, memory

        def train(context, models, kept, data):
            return problem.descend(context, models, kept, data.train, meta_gradient)[:3]

        def predict(context, models, row, data):
            step = lambda _, params: moved(
                params, solver.loss_and_gradient(params, data.train)[1], self.alpha
            )
            return Prediction.one(jax.lax.fori_loop(0, self.adapt_steps, step, tree.first(models)))

        # Each mini-batch serves as D', as D and, with hessian_free, twice as D''.
        ledger = Ledger(gradients=4 if hessian_free else 2)
        scored = f"the global model after {self.adapt_steps} steps at rate alpha on each client's training data"
        return averaging(
            problem, train=train, predict=predict, ledger=ledger, report=Report(scored)
        )
