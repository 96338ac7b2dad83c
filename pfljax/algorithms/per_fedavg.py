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
    MethodReport,
    Params,
    Prediction,
    PyTree,
    Trained,
)
from pfljax.local.problem import Problem, SlopeFunction
from pfljax.local.solver import Slope, joined
from pfljax.settings.method import hyperparameter, method


@method(
    name="per_fedavg",
    keeps="a gradient step from the global model",
    travels="the global model, both ways",
)
@dataclasses.dataclass(frozen=True)
class PerFedAvg:
    """Per-FedAvg (Fallah et al., 2020): a global model that one gradient step turns into a good personal model.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.PerFedAvg(personal_learning_rate=0.01, form="hessian_free")
        PerFedAvg(personal_learning_rate=0.01, form='hessian_free', delta=0.001, adapt_steps=1)
    """

    personal_learning_rate: float = hyperparameter(
        0.03,
        at_least=0,
        grid=(0.003, 0.01, 0.03, 0.1),
        help="alpha, learning rate of the personalizing step; 0 is FedAvg",
        former="alpha",
    )
    form: Literal["first_order", "hessian_free"] = hyperparameter(
        "first_order",
        help="meta-gradient without second derivatives, or approximating them by gradient differences",
    )
    delta: float = hyperparameter(0.001, above=0, help="step size of these differences")
    adapt_steps: int = hyperparameter(
        1, at_least=0, help="number of steps at this rate before a client predicts"
    )

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver
        hessian_free = self.form == "hessian_free"

        def meta_slope(
            slope_at: SlopeFunction, theta: Params, memory: PyTree
        ) -> tuple[Slope, PyTree]:
            """(I - alpha H) grad f_k(theta~; D'), along which the optimizer steps at rate beta.

            The mini-batches D', D and D'' are `ahead` by 0, 1 and 2. A `number` of its own gives
            each gradient dropout and noise of its own.
            """
            # theta~ <- theta - alpha grad f_k(theta; D)
            inner = slope_at(theta, ahead=1, number=3)
            theta_tilde = subtract_scaled(theta, inner.gradient, self.personal_learning_rate)
            # grad f_k(theta~; D'), whose forward pass writes the batch statistics
            outer = slope_at(theta_tilde, ahead=0, number=0)
            # first_order:  H = 0
            if not hessian_free:
                return outer, memory

            # H v = (grad f_k(theta + delta v; D'') - grad f_k(theta - delta v; D'')) / (2 delta)
            v = outer.gradient
            theta_plus = subtract_scaled(theta, v, -self.delta)
            slope_plus = slope_at(theta_plus, ahead=2, number=1)
            theta_minus = subtract_scaled(theta, v, self.delta)
            slope_minus = slope_at(theta_minus, ahead=2, number=2)
            difference = tree.subtract(slope_plus.gradient, slope_minus.gradient)
            hessian_v = tree.scale(difference, 1 / (2 * self.delta))
            # (I - alpha H) v
            gradient = subtract_scaled(v, hessian_v, self.personal_learning_rate)
            return outer._replace(gradient=gradient), memory

        def train(context: ClientContext, models: Params, row: PyTree, data: ClientData) -> Trained:
            # theta <- theta - beta (I - alpha H) grad f_k(theta~; D')
            trained, _ = problem.descend(context, models, data.train, meta_slope)
            return trained

        def predict(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> Prediction:
            """Gradient steps of rate alpha on all training examples; batch statistics stay."""
            theta, statistics = solver.without_statistics(tree.first(models))

            def adapt_step(number: Array, theta: Params) -> Params:
                """theta - alpha grad f_k(theta)."""
                model = joined(theta, statistics)
                _, model_gradient = solver.loss_and_gradient(model, data.train)
                gradient, _ = solver.without_statistics(model_gradient)
                return subtract_scaled(theta, gradient, self.personal_learning_rate)

            adapted = jax.lax.fori_loop(0, self.adapt_steps, adapt_step, theta)
            return Prediction.single(joined(adapted, statistics))

        # Each mini-batch serves as D', as D and, with hessian_free, twice as D''.
        num_gradients = 4 if hessian_free else 2
        scored = (
            f"the global model after {self.adapt_steps} steps at rate alpha"
            " on each client's training data"
        )
        # theta <- sum_k n_k theta_k / sum_k n_k
        return averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=num_gradients),
            predict=predict,
            report=MethodReport(scored),
        )


def subtract_scaled(a: Params, b: Params, factor: float) -> Params:
    """Leafwise a - factor b."""
    return jax.tree.map(lambda x, y: x - factor * y, a, b)
