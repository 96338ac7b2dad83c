"""pFedMe: personal models near a global one, by Moreau envelopes.

Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes" (NeurIPS 2020).

    F_k(w) = min_theta f_k(theta) + lambda / 2 |theta - w|^2                                                  (Eq. 2)
    A local step on a mini-batch: theta <- `steps` steps toward that minimum; w <- w - eta lambda (w - theta)  (Eq. 8)
    w <- (1 - beta) w + beta sum_k n_k w_k / sum_k n_k;  client k predicts with its last theta.

Departures from the paper: the clients of the cohort train, not all of them; the mean is weighted by n_k; eta is the
solver's optimizer, which takes lambda (w - theta) for the gradient. theta starts at w, and its steps are gradient
steps on f_k and exact ones on the proximal term, theta <- (theta - rate (grad f_k(theta) - lambda w)) /
(1 + rate lambda), which have the same fixed point as plain gradient steps and stay stable for any lambda.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common.averaging import averaging
from pfljax.core import tree
from pfljax.core.types import Algorithm, Params, Predictor, UsageError
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class PFedMeConfig:
    """pFedMe's knobs.

    Attributes:
        strength: lambda, of the pull of the personal model to the global one
        steps: steps of the personal model on each mini-batch
        rate: their rate
        beta: share of the new mean in the global model
    """

    strength: float = 15.0
    steps: int = 5
    rate: float = 0.09
    beta: float = 1.0

    def __post_init__(self):
        for name, low in (("strength", self.strength), ("steps", self.steps), ("rate", self.rate), ("beta", self.beta)):
            if not low > 0:
                raise UsageError(f"--pfedme.{name}={low}: accepted: above 0")


def pfedme(problem: Problem, config: PFedMeConfig) -> Algorithm:
    """pFedMe."""

    def moreau(w: Params, gradient: Callable[[Params, jax.Array], tuple[jax.Array, Params]]):
        """theta after `steps` steps from w, each with its (loss, gradient) of f_k, and f_k(w)."""

        def toward(theta, slope, anchor):
            return (theta - config.rate * (slope - config.strength * anchor)) / (1 + config.rate * config.strength)

        def step(number, carry):
            theta, first = carry
            loss, slopes = gradient(theta, number)
            return jax.tree.map(toward, theta, slopes, w), jnp.where(number == 0, loss, first)

        return jax.lax.fori_loop(0, config.steps, step, (w, jnp.zeros(())))

    def local_step(w, theta, batch):
        of_batch = lambda theta, number: jax.value_and_grad(
            lambda theta: problem.solver.mean_loss(theta, batch(0).of_model(number))
        )(theta)
        theta, loss = moreau(w, of_batch)  # Eq. 2
        return loss, tree.scale(tree.subtract(w, theta), config.strength), theta  # Eq. 8

    def train(turn, models, row, shard):
        models, kept, losses, theta = problem.descend_model(
            turn, models, row["kept"], shard.train, local_step, row["theta"]
        )
        return models, {"kept": kept, "theta": theta}, losses

    def rows(key, models, clients):
        num = tree.num_rows(clients)
        return {"kept": problem.optimizer_rows(models, num), "theta": tree.repeat(models, num)}

    def predictor(key, state, clients):
        return Predictor.own(state.clients["theta"])

    def adapt(key, state, clients):
        def personal(_, w, shard):
            return moreau(w, lambda theta, _: problem.solver.loss_and_gradient(theta, shard.train))[0]

        return Predictor.own(problem.personalize(key, state.models, clients, personal))

    return averaging(
        problem,
        train=train,
        rows=rows,
        server=optax.sgd(config.beta),
        predictor=predictor,
        adapt=adapt,
        scored="each client's theta",
        gradients=config.steps,
    )
