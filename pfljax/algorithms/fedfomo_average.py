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
from pfljax.contract.types import Algorithm, Array, Params, PyTree, Split, Topology
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method


@method(
    name="fedfomo_average",
    keeps="the model it trains from, its affinities",
    travels="the mean and M + 1 leave-one-out means down, its model up",
    validates=True,
)
@dataclasses.dataclass(frozen=True)
class FedFomoAverage(first_order.Hyperparameters):
    """FedFomo on averages of models (Eq. 14): weighs each model by what the mean of all models loses without it.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedFomoAverage(neighbors=9)
        FedFomoAverage(neighbors=9, epsilon=0.3, epsilon_decay=0.05, scaled=False,
            fallback='start')
    """

    fallback: Literal["start", "mean"] = hyperparameter(
        "start",
        help="where a client continues from if no weight is positive: its previous start, or the mean",
    )

    def build(self, problem: Problem) -> Algorithm:
        solver = problem.solver
        num_clients = problem.num_clients

        def with_mean(models: Params, server: PyTree) -> Params:
            """The K models, followed by their mean."""

            def append_mean(leaf: Array) -> Array:
                return jnp.concatenate([leaf, leaf.mean(axis=0, keepdims=True)])

            return jax.tree.map(append_mean, models)

        def served(ids: Array) -> Array:
            """A client's own model, the mean, and the others' models."""
            client = ids[:1]
            mean = jnp.full_like(client, num_clients)
            return jnp.concatenate([client, mean, ids[1:]])

        def weigh(models: Params, start: Params, split: Split, index: Array) -> first_order.Weighed:
            """w_n <- L_i(mean of all but theta_n) - L_i(mean of all)  (Eq. 14)."""
            mean = jax.tree.map(lambda leaf: leaf[1], models)
            positions = jnp.array([0, *range(2, len(index))])
            models = tree.take(models, positions)

            def loss_without(model: Params) -> Array:
                def leave_out(mean: Array, leaf: Array) -> Array:
                    return (num_clients * mean - leaf) / max(num_clients - 1, 1)

                return solver.total_loss(jax.tree.map(leave_out, mean, model), split)

            losses = problem.plan.over_models(loss_without, models)
            gains = losses - solver.total_loss(mean, split)
            return first_order.Weighed(
                index=index[positions],
                models=models,
                weights=gains / jnp.maximum(split.size, 1),
                start=mean if self.fallback == "mean" else start,
            )

        form = first_order.Form(
            topology=Topology.SHARED, weigh=weigh, stack=with_mean, served=served
        )
        return first_order.rounds(problem, self, form)
