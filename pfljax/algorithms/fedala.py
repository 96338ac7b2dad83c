"""FedALA: each client learns, parameter by parameter, how much of the global model to adopt.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: adaptive local aggregation for personalized federated learning" (AAAI
2023). Client k keeps theta_k and weights W_k in [0, 1], with the shape of the last p layers.

    A round: client k receives theta; start(W) is theta_k + (theta - theta_k) * W in the last p layers and theta below;
    on a random share s of D_k:
        W_k <- clip(W_k - eta grad l_k(start(W_k)) * (theta - theta_k), 0, 1)
    for one pass (`first_passes` in the first round with weights); theta_k <- local training from start(W_k) on D_k;
    theta <- sum_k n_k theta_k / sum_k n_k.  Client k predicts with theta_k.

Departures from the paper: In the first round with weights, which is a client's second, the weights take a fixed number
of passes, while the paper waits until they converge. A client's first round starts from theta, also under sampling,
since its own model is not trained yet. W_k does not change while a client is absent. The paper does not say which model
is scored; we score the one after local training: with p = 0 the global model is FedAvg's, and clients predict with the
model they trained from it. The authors' code scores before local training: `scored="before"` takes the next round's
steps of W_k for the score, on a share of the examples drawn anew, and keeps nothing. Batch statistics are always those
of theta. Newcomers play a first round: they train theta. The ledger charges every round as the most expensive one.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common.adoption import Adoption
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, Ledger, Params, Prediction, PyTree, Report
from pfljax.local.batches import random_share
from pfljax.local.problem import Problem

OF_WEIGHTS = 2  # folded into a client's key for a round: the examples and mini-batches for W


class Row(NamedTuple):
    """The client's model, its weights W_k, the number () of its rounds, and its optimizer, if it is kept."""

    model: Params
    weights: PyTree
    rounds: Array
    optimizer: PyTree


@method(keeps="its model, weights of its last layers", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedALA:
    """FedALA (Zhang et al., 2023): each client learns how much of the global model to adopt, per parameter."""

    layers: int = knob(
        1, at_least=0, grid=(1, 2, 3), help="p, number of last layers mixed; with 0 the global model is FedAvg's"
    )
    rate: float = knob(
        1.0, at_least=0, grid=(0.1, 1.0, 10.0), help="eta, learning rate of the weights; 0 keeps them at 1"
    )
    share: float = knob(
        0.8, above=0, at_most=1, grid=(0.05, 0.2, 0.4, 0.6, 0.8, 1.0), help="s, share of the examples used to learn W"
    )
    first_passes: int = knob(10, at_least=1, help="passes over that share in the first round with weights")
    scored: Literal["after", "before"] = knob(
        "after",
        help="predict with the model after local training, or with what the next one would start from (authors)",
    )

    def build(self, problem: Problem) -> Algorithm:
        num_layers = len(problem.model.layers)
        if self.layers > num_layers:
            raise ArgumentError("layers", f"accepted: 0 to {num_layers}, the number of layers", self.layers)

        adoption = Adoption(problem, self.layers, self.rate, self.first_passes)

        def learn(context, row, theta, split):
            """W_k after this round's steps; a client's first round has none."""
            key, share_key = jax.random.split(jax.random.fold_in(context.key, OF_WEIGHTS))
            part = random_share(share_key, split, self.share)
            passes = jnp.where(row.rounds == 1, self.first_passes, jnp.minimum(row.rounds, 1))
            return adoption.learn(context._replace(key=key), row.weights, row.model, theta, part, passes)

        def row(key, client, models):
            model = tree.first(models)
            weights = jax.tree.map(jnp.ones_like, adoption.part(model))
            return Row(model, weights, jnp.zeros((), jnp.int32), problem.kept_optimizers(models))

        def begin(context, row, theta, split):
            """The model from which a client trains, and W_k."""
            weights = learn(context, row, theta, split) if self.layers else row.weights
            own = adoption.mix(weights, row.model, theta)
            return jax.tree.map(lambda own, shared: jnp.where(row.rounds > 0, own, shared), own, theta), weights

        def train(context, models, row, data):
            model, weights = begin(context, row, tree.first(models), data.train)
            trained, optimizer, losses = problem.fit(context, tree.stack_one(model), row.optimizer, data.train)
            return trained, Row(tree.first(trained), weights, row.rounds + 1, optimizer), losses

        def predict(context, models, row, data):
            after = self.scored == "after"
            return Prediction.one(row.model if after else begin(context, row, tree.first(models), data.train)[0])

        def adapt(context, models, data):
            return Prediction.one(problem.alone(context, tree.first(models), data))

        return averaging(
            problem,
            train=train,
            row=row,
            predict=predict,
            adapt=adapt,
            ledger=Ledger(gradients=1, passes=1 + problem.passes(self.first_passes if self.layers else 0)),
            report=Report(
                scored=f"each client's model {self.scored} local training", facts=(("mixed layers", self.layers),)
            ),
        )
