"""FedFomo on averages: clients see averages of all models instead of individual ones.

Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized federated learning with first order model optimization" (ICLR 2021),
Appendix A.4: a round is FedFomo's (algorithms/fedfomo.py), except for the weights

    w_n <- L_i(mean of all but theta_n) - L_i(mean of all).                                      (Eq. 14)

Departures from the paper: those of FedFomo. The client computes Eq. 14's leave-one-out averages from the mean and
theta_n; on the wire, these averages (its own included) would travel at the same size. They are averages over all
clients, even if only some are active; in the authors' code, over those that the client downloaded. If no w_n is
positive, a client continues from start_i, as in FedFomo; in the authors' code, from the mean (`fallback=mean`).
Newcomers compute weights by Eq. 3.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import first_order
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm
from pfljax.local.problem import Problem


@method(
    name="fedfomo_average",
    keeps="the model it trains from, its affinities",
    travels="the mean and M + 1 leave-one-out means down, its model up",
    validates=True,
)
@dataclasses.dataclass(frozen=True)
class FedFomoAverage(first_order.Knobs):
    """FedFomo on averages of models (Eq. 14): weighs each model by what the mean of all models loses without it."""

    fallback: Literal["start", "mean"] = knob(
        "start", help="where a client continues from if no weight is positive: its previous start, or the mean"
    )

    def build(self, problem: Problem) -> Algorithm:
        num = problem.num_clients

        def with_mean(models, server):
            """The K models, followed by their mean."""
            return jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf.mean(axis=0, keepdims=True)]), models)

        def served(ids):
            return jnp.concatenate([ids[:1], jnp.full_like(ids[:1], num), ids[1:]])

        def weigh(models, start, split, index):
            places = jnp.array([0, *range(2, len(index))])
            mean, models, index = jax.tree.map(lambda leaf: leaf[1], models), tree.take(models, places), index[places]

            def without(params):
                left = jax.tree.map(lambda average, leaf: (num * average - leaf) / max(num - 1, 1), mean, params)
                return problem.solver.total_loss(left, split)

            gain = problem.plan.over_models(without, models) - problem.solver.total_loss(mean, split)
            base = mean if self.fallback == "mean" else start
            return index, models, gain / jnp.maximum(split.size, 1), base  # Eq. 14

        return first_order.rounds(problem, self, first_order.Form("shared", weigh, with_mean, served))
