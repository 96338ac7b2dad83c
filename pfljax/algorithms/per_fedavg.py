"""Per-FedAvg: a global model from which one gradient step makes a good personal one.

Fallah, Mokhtari, Ozdaglar, "Personalized federated learning with theoretical guarantees: a model-agnostic
meta-learning approach" (NeurIPS 2020). It minimizes sum_k F_k(theta), F_k(theta) = f_k(theta - alpha grad f_k(theta)).

    A local step on mini-batches D, D', D'':                                                       (Algorithm 1)
        theta~ <- theta - alpha grad f_k(theta; D)
        theta  <- theta - beta (I - alpha H) grad f_k(theta~; D'),
        first_order:   H = 0
        hessian_free:  H v = (grad f_k(theta + delta v; D'') - grad f_k(theta - delta v; D'')) / (2 delta)
    theta <- sum_k n_k theta_k / sum_k n_k;  a client predicts after steps of rate alpha on its training data.

Departures from the paper: D', D and D'' are a step's mini-batch and the two after it, so that a round passes over the
data as FedAvg's does and alpha = 0 is FedAvg exactly; beta is the solver's optimizer; the mean is weighted by n_k; the
steps before predicting take all of a client's training examples at once, never test examples.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from pfljax.algorithms.common.averaging import averaging
from pfljax.core import tree
from pfljax.core.types import Algorithm, Predictor, UsageError
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class PerFedAvgConfig:
    """Per-FedAvg's knobs.

    Attributes:
        alpha: rate of the step that personalizes; 0 is FedAvg
        form: the meta-objective's gradient without second derivatives, or with differences of gradients in their place
        delta: how far apart the gradients of that difference are taken
        adapt_steps: steps of rate alpha that a client takes before it predicts
    """

    alpha: float = 0.03
    form: Literal["first_order", "hessian_free"] = "first_order"
    delta: float = 0.001
    adapt_steps: int = 1

    def __post_init__(self):
        if self.alpha < 0:
            raise UsageError(f"--per_fedavg.alpha={self.alpha}: accepted: 0 or more")
        if not self.delta > 0:
            raise UsageError(f"--per_fedavg.delta={self.delta}: accepted: above 0")
        if self.adapt_steps < 0:
            raise UsageError(f"--per_fedavg.adapt_steps={self.adapt_steps}: accepted: 0 or more")


def per_fedavg(problem: Problem, config: PerFedAvgConfig) -> Algorithm:
    """Per-FedAvg."""
    solver, hessian_free = problem.solver, config.form == "hessian_free"
    of_batch = jax.value_and_grad(lambda params, batch: solver.mean_loss(params, batch))

    def moved(params, direction, rate):
        return jax.tree.map(lambda p, g: p - rate * g, params, direction)

    def meta_gradient(params, memory, batch):
        inner = moved(params, of_batch(params, batch(1).of_model(3))[1], config.alpha)
        loss, outer = of_batch(inner, batch(0).of_model(0))
        if hessian_free:
            third = batch(2)
            ahead, behind = (
                of_batch(moved(params, outer, -step), third.of_model(number))[1]
                for number, step in ((1, config.delta), (2, -config.delta))
            )
            curvature = tree.scale(tree.subtract(ahead, behind), 1 / (2 * config.delta))  # H times the outer gradient
            outer = moved(outer, curvature, config.alpha)
        return loss, outer, memory

    def train(turn, models, kept, shard):
        return problem.descend_model(turn, models, kept, shard.train, meta_gradient)[:3]

    def predictor(key, state, clients):
        def personal(_, params, shard):
            step = lambda _, params: moved(params, solver.loss_and_gradient(params, shard.train)[1], config.alpha)
            return jax.lax.fori_loop(0, config.adapt_steps, step, params)

        return Predictor.own(problem.personalize(key, state.models, clients, personal))

    scored = (
        f"the global model after {config.adapt_steps} steps of rate {config.alpha:g} on each client's training data"
    )
    # A mini-batch serves as D', D and, without first_order, twice as D''.
    return averaging(problem, train=train, predictor=predictor, scored=scored, gradients=4 if hessian_free else 2)
