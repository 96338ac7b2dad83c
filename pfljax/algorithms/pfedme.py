"""pFedMe: personal models near a global model, by Moreau envelopes.

Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes" (NeurIPS 2020).

    F_k(w) = min_theta f_k(theta) + lambda / 2 |theta - w|^2                                                  (Eq. 2)
    A local step on a mini-batch:
        theta <- `personal_steps` steps toward that minimum; w <- w - eta lambda (w - theta)                  (Eq. 8)
    w <- (1 - beta) w + beta sum_k n_k w_k / sum_k n_k;  client k predicts with its last theta.

Departures from the paper: Only the cohort's clients train, not all clients. The mean is weighted by n_k. eta is the
solver's optimizer, with lambda (w - theta) as the gradient. theta starts at w. Its steps are gradient steps on f_k and
exact steps on the proximal term, theta <- (theta - rate (grad f_k(theta) - lambda w)) / (1 + rate lambda); they have
the same fixed point as plain gradient steps and are stable for any lambda. Batch statistics are written at w, once a
step; theta has those of w_k. We score theta; the authors' code scores the clients' w_k by mistake.
"""

from __future__ import annotations

import dataclasses

import jax
import optax

from pfljax.algorithms.common.global_model import averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    MethodReport,
    Params,
    Prediction,
    Trained,
)
from pfljax.local.problem import Problem, SlopeFunction
from pfljax.local.solver import Slope, joined
from pfljax.settings.method import hyperparameter, method


@method(keeps="its model", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class PFedMe:
    """pFedMe (Dinh et al., 2020): personal models near a global model, by Moreau envelopes.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.PFedMe(mu=10.0, personal_steps=3)
        PFedMe(mu=10.0, personal_steps=3, personal_learning_rate=0.1, beta=1.0)
    """

    mu: float = hyperparameter(
        15.0,
        above=0,
        grid=(5.0, 10.0, 15.0, 20.0, 30.0),
        help="lambda, pull of the personal model toward the global one",
        former="strength",
    )
    personal_steps: int = hyperparameter(
        5,
        at_least=1,
        grid=(3, 5, 7),
        help="number of personal-model steps per mini-batch",
        former="steps",
    )
    personal_learning_rate: float = hyperparameter(
        0.1, above=0, grid=(0.01, 0.03, 0.1), help="learning rate of these steps", former="rate"
    )
    beta: float = hyperparameter(
        1.0, above=0, grid=(1.0, 2.0, 4.0), help="weight of the new mean in the global model"
    )

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver

        def toward_minimum(theta: Params, gradient: Params, w: Params) -> Params:
            """(theta - rate (grad f_k(theta) - lambda w)) / (1 + rate lambda)."""

            def moved(theta: Array, gradient: Array, w: Array) -> Array:
                along = gradient - self.mu * w
                return (theta - self.personal_learning_rate * along) / (
                    1 + self.personal_learning_rate * self.mu
                )

            return jax.tree.map(moved, theta, gradient, w)

        def first_row(key: Key, client: Array) -> Params:
            """The first w. A client's row is its last theta."""
            return problem.init_global(key)

        def direction(
            slope_at: SlopeFunction, w: Params, last_theta: Params
        ) -> tuple[Slope, Params]:
            # theta <- `personal_steps` steps toward the minimum of Eq. 2, from w; each has its own dropout.
            at_w = slope_at(w)
            theta = toward_minimum(w, at_w.gradient, w)

            def step(number: Array, theta: Params) -> Params:
                gradient = slope_at(theta, number=number).gradient
                return toward_minimum(theta, gradient, w)

            theta = jax.lax.fori_loop(1, self.personal_steps, step, theta)

            # w <- w - eta lambda (w - theta)  (Eq. 8)
            gradient = tree.scale(tree.subtract(w, theta), self.mu)
            return at_w._replace(gradient=gradient), theta

        def train(
            context: ClientContext, models: Params, last_theta: Params, data: ClientData
        ) -> Trained:
            theta, _ = solver.without_statistics(last_theta)
            trained, theta = problem.descend(context, models, data.train, direction, theta)

            # theta has the batch statistics of w_k; a client without examples keeps what it has.
            theta = joined(theta, tree.first(trained.statistics))
            return trained._replace(row=tree.where(data.train.size > 0, theta, last_theta))

        def own_model(theta: Params) -> Params:
            return theta

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers take the steps from the final w on all of their examples."""
            w, statistics = solver.without_statistics(tree.first(models))

            def step(_: Array, theta: Params) -> Params:
                _, gradient = solver.loss_and_gradient(joined(theta, statistics), data.train)
                param_gradient, _ = solver.without_statistics(gradient)
                return toward_minimum(theta, param_gradient, w)

            theta = jax.lax.fori_loop(0, self.personal_steps, step, w)
            return Prediction.single(joined(theta, statistics))

        return averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=self.personal_steps),
            first_row=first_row,
            server_optimizer=optax.sgd(self.beta),
            own_model=own_model,
            adapt=adapt,
            report=MethodReport(scored="each client's theta"),
        )
