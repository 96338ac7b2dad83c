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
as in FedAvg and alpha = 0 is exactly FedAvg. beta is the solver's optimizer. The mean is weighted by n_k. Batch
statistics are written at theta~, on D'. The steps before predicting use all of a client's training examples at once,
never test examples, and keep the batch statistics.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Ledger,
    Params,
    Prediction,
    PyTree,
    Report,
    Trained,
)
from pfljax.local.problem import Problem, SlopeFunction
from pfljax.local.solver import Slope, joined
from pfljax.settings.method import knob, method


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
        solver = problem.solver
        hessian_free = self.form == "hessian_free"

        def meta_slope(
            slope_at: SlopeFunction, theta: Params, memory: PyTree
        ) -> tuple[Slope, PyTree]:
            # theta~ <- theta - alpha grad f_k(theta; D)
            inner = slope_at(theta, ahead=1, number=3)
            adapted = step(theta, inner.gradient, self.alpha)
            # grad f_k(theta~; D')
            outer = slope_at(adapted)
            if not hessian_free:
                return outer, memory

            # (I - alpha H) v, with v the outer gradient
            v = outer.gradient
            above = slope_at(step(theta, v, -self.delta), ahead=2, number=1)
            below = slope_at(step(theta, v, self.delta), ahead=2, number=2)
            difference = tree.subtract(above.gradient, below.gradient)
            curvature = tree.scale(difference, 1 / (2 * self.delta))
            return outer._replace(gradient=step(v, curvature, self.alpha)), memory

        def train(context: ClientContext, models: Params, row: PyTree, data: ClientData) -> Trained:
            trained, _ = problem.descend(context, models, data.train, meta_slope)
            return trained

        def predict(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> Prediction:
            """Gradient steps of rate alpha on all training examples."""
            theta, statistics = solver.without_statistics(tree.first(models))

            def adapt_step(_: Array, theta: Params) -> Params:
                _, gradient = solver.loss_and_gradient(joined(theta, statistics), data.train)
                of_params, _ = solver.without_statistics(gradient)
                return step(theta, of_params, self.alpha)

            adapted = jax.lax.fori_loop(0, self.adapt_steps, adapt_step, theta)
            return Prediction.one(joined(adapted, statistics))

        # Each mini-batch serves as D', as D and, with hessian_free, twice as D''.
        num_gradients = 4 if hessian_free else 2
        scored = f"the global model after {self.adapt_steps} steps at rate alpha on each client's training data"
        return averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=num_gradients),
            predict=predict,
            report=Report(scored),
        )


def step(params: Params, direction: Params, rate: float) -> Params:
    """params - rate direction."""
    return jax.tree.map(lambda p, d: p - rate * d, params, direction)
