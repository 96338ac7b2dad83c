"""pFedMe: personal models near a global model, by Moreau envelopes.

Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes" (NeurIPS 2020).

    F_k(w) = min_theta f_k(theta) + lambda / 2 |theta - w|^2                                                  (Eq. 2)
    A local step on a mini-batch: theta <- `steps` steps toward that minimum; w <- w - eta lambda (w - theta)  (Eq. 8)
    w <- (1 - beta) w + beta sum_k n_k w_k / sum_k n_k;  client k predicts with its last theta.

Departures from the paper: Only the cohort's clients train, not all clients. The mean is weighted by n_k. eta is the
solver's optimizer, with lambda (w - theta) as the gradient. theta starts at w. Its steps are gradient steps on f_k and
exact steps on the proximal term, theta <- (theta - rate (grad f_k(theta) - lambda w)) / (1 + rate lambda); they have
the same fixed point as plain gradient steps and are stable for any lambda. We score theta; the authors' code scores the
clients' w_k by mistake.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Ledger, Params, Prediction, PyTree, Report
from pfljax.local.problem import Problem


class Row(NamedTuple):
    """The client's last theta, and its optimizer for w, if it is kept."""

    theta: Params
    optimizer: PyTree


@method(keeps="its model", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class PFedMe:
    """pFedMe (Dinh et al., 2020): personal models near a global model, by Moreau envelopes."""

    strength: float = knob(
        15.0,
        above=0,
        grid=(5.0, 10.0, 15.0, 20.0, 30.0),
        help="lambda, pull of the personal model toward the global one",
    )
    steps: int = knob(5, at_least=1, grid=(3, 5, 7), help="number of personal-model steps per mini-batch")
    rate: float = knob(0.1, above=0, grid=(0.01, 0.03, 0.1), help="learning rate of these steps")
    beta: float = knob(1.0, above=0, grid=(1.0, 2.0, 4.0), help="weight of the new mean in the global model")

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver

        def moreau(w, gradient):
            """Returns theta after `steps` steps from w, with gradient(theta, number) -> (loss, slopes), and f_k(w)."""

            def toward(theta, slope, anchor):
                return (theta - self.rate * (slope - self.strength * anchor)) / (1 + self.rate * self.strength)

            def step(number, carry):
                theta, first = carry
                loss, slopes = gradient(theta, number)
                return jax.tree.map(toward, theta, slopes, w), jnp.where(number == 0, loss, first)

            return jax.lax.fori_loop(0, self.steps, step, (w, jnp.zeros(())))

        def local_step(w, theta, batch):
            gradient = jax.value_and_grad(lambda theta, number: solver.mean_loss(theta, batch(0).of_model(number)))
            theta, loss = moreau(w, gradient)  # Eq. 2
            return loss, tree.scale(tree.subtract(w, theta), self.strength), theta  # Eq. 8

        def train(context, models, row, data):
            models, optimizer, losses, theta = problem.descend(
                context, models, row.optimizer, data.train, local_step, row.theta
            )
            return models, Row(theta, optimizer), losses

        def adapt(context, models, data):
            gradient = lambda theta, _: solver.loss_and_gradient(theta, data.train)
            return Prediction.one(moreau(tree.first(models), gradient)[0])

        return averaging(
            problem,
            train=train,
            row=lambda key, client, models: Row(tree.first(models), problem.kept_optimizers(models)),
            server=optax.sgd(self.beta),
            own=lambda row: row.theta,
            adapt=adapt,
            ledger=Ledger(gradients=self.steps),
            report=Report(scored="each client's theta"),
        )
