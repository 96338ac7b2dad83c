"""q-FFL: clients with larger losses get larger weights.

Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning" (ICLR 2020, Algorithm 2, q-FedAvg).

    A round: client k receives w, with F_k = l_k(w), and trains it to w_k; L d_k, with d_k = w - w_k, is its gradient;
    w <- w - sum_k F_k^q L d_k / sum_k (q F_k^(q-1) |L d_k|^2 + L F_k^q).

Departures from the paper: Clients are drawn uniformly, not in proportion to n_k, and weighted equally. L is 1 / eta, as
in the paper, unless the hyperparameter sets it: Adam's steps have no such scale. If a schedule lowers eta, L stays
the same. Batch statistics do not count in the norm; they are averaged with the weights F_k^q.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pfljax.algorithms.common import by_loss
from pfljax.algorithms.common.global_model import Received, ServerStep, averaging
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Ledger,
    Params,
    PyTree,
    Trained,
)
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method

LEAST = 1e-10  # smallest loss, so that its powers stay finite


@method(name="q_ffl", keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class QFFL:
    """q-FFL (Li et al., 2020): clients with larger losses get larger weights.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.QFFL(q=0.1)
        QFFL(q=0.1, lipschitz=None)
    """

    q: float = hyperparameter(
        1.0,
        at_least=0,
        grid=(0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0),
        help="exponent of the loss in a client's weight; 0 weights all clients equally",
    )
    lipschitz: float | None = hyperparameter(
        None,
        above=0,
        help="L, scale of the clients' updates. Default: 1 / learning rate, as in the paper",
    )

    def build(self, problem: Problem) -> Algorithm:
        lipschitz = self.lipschitz_constant(problem)

        def train(context: ClientContext, models: Params, row: PyTree, data: ClientData) -> Trained:
            # F_k = l_k(w), of w as received.
            loss = by_loss.loss_at_start(problem, context, models, data) + LEAST
            # -L d_k, with d_k = w - w_k
            trained = problem.fit(context, models, data.train)
            update = tree.scale(tree.subtract(trained.models, models), lipschitz)
            # F_k^q, and  q F_k^(q-1) |L d_k|^2 + L F_k^q
            weight = loss**self.q
            square = tree.inner(update, update)
            step = self.q * loss ** (self.q - 1) * square + lipschitz * weight

            has_examples = data.train.size > 0
            return trained._replace(
                models=update,
                weight=jnp.where(has_examples, weight, 0),
                sums={"step": jnp.where(has_examples, step, 0)},
            )

        def server_step(received: Received, server: PyTree) -> ServerStep:
            # w <- w - sum_k F_k^q L d_k / sum_k (q F_k^(q-1) |L d_k|^2 + L F_k^q)
            step = received.sums["step"]
            share = received.weight / jnp.where(step > 0, step, 1)
            return ServerStep(tree.scale(received.update, share))

        algorithm = averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=1, unaccounted=BY_LOSS),
            server_step=server_step,
            uploads="updates",
        )
        # The sum of updates is not divided by the sum of their weights.
        return dataclasses.replace(algorithm, averages=False)

    def lipschitz_constant(self, problem: Problem) -> Array | float:
        """L."""
        if self.lipschitz is not None:
            return self.lipschitz
        if problem.learning_rate is None:
            text = "accepted: a number above 0; required here"
            raise ArgumentError("lipschitz", f"{text}, since the clients' learning rate is unknown")
        return 1 / problem.learning_rate
