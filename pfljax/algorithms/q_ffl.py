"""q-FFL: clients with larger losses get larger weights.

Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning" (ICLR 2020, Algorithm 2, q-FedAvg).

    A round: client k receives w, with F_k = l_k(w), and trains it to w_k; L d_k, with d_k = w - w_k, is its gradient;
    w <- w - sum_k F_k^q L d_k / sum_k (q F_k^(q-1) |L d_k|^2 + L F_k^q).

Departures from the paper: Clients are drawn uniformly, not in proportion to n_k, and weighted equally. L is 1 / eta, as
in the paper, unless the knob sets it: Adam's steps have no such scale. If a schedule lowers eta, L stays the same.
Batch statistics do not count in the norm; they are averaged with the weights F_k^q.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pfljax.algorithms.common import by_loss
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, ClientOutput, Ledger
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem

LEAST = 1e-10  # smallest loss, so that its powers stay finite


@method(name="q_ffl", keeps="nothing", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class QFFL:
    """q-FFL (Li et al., 2020): clients with larger losses get larger weights."""

    q: float = knob(
        1.0,
        at_least=0,
        grid=(0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0),
        help="exponent of the loss in a client's weight; 0 weights all clients equally",
    )
    lipschitz: float | None = knob(
        None, above=0, help="L, scale of the clients' updates; not given: 1 / learning rate, as in the paper"
    )

    def build(self, problem: Problem) -> Algorithm:
        lipschitz, solver = self._lipschitz(problem), problem.solver

        def client_update(context, models, kept, data):
            loss = by_loss.at_start(problem, models, data) + LEAST
            trained, kept, losses = problem.fit(context, models, kept, data.train)
            moved = tree.scale(tree.subtract(models, trained), lipschitz)
            counts = loss**self.q
            square = tree.inner(*solver.trained(moved, moved))
            step = self.q * loss ** (self.q - 1) * square + lipschitz * counts
            upload = {"moved": tree.scale(moved, counts), "step": step[None]}
            if solver.statistics is not None:
                upload["weight"] = lipschitz * counts[None]
            return ClientOutput(kept, upload, {"loss": losses[0]}, (data.train.size > 0)[None])

        def server_update(key, state, aggregate):
            over = lambda total: tree.scale(aggregate.upload["moved"], 1 / jnp.where(total > 0, total, 1))
            moved = over(aggregate.upload["step"])
            if solver.statistics is not None:  # these are averaged, and do not count in the norm
                moved = tree.combine(solver.trained(moved)[0], over(aggregate.upload["weight"]))
            return state._replace(models=tree.subtract(state.models, moved)), {}

        functions = {"client_update": client_update, "server_update": server_update, "averages": False}
        return averaging(problem, **functions, ledger=Ledger(gradients=1, unaccounted=BY_LOSS))

    def _lipschitz(self, problem: Problem) -> Array | float:
        if self.lipschitz is not None:
            return self.lipschitz
        if problem.learning_rate is None:
            text = "accepted: a number above 0; required here, since the clients' learning rate is unknown"
            raise ArgumentError("lipschitz", text)
        return 1 / problem.learning_rate
