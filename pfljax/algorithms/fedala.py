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
model they trained from it. The authors' code scores before local training: `predict="before"` takes the next round's
steps of W_k for the score, on a share of the examples drawn anew, and keeps nothing. Batch statistics are always those
of theta. Newcomers play a first round: they train theta. The ledger charges every round as the most expensive one.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common.adoption import Adoption
from pfljax.algorithms.common.global_model import averaging, received_model
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
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
    PyTree,
    Split,
    Trained,
)
from pfljax.local.batches import random_share
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method

WEIGHTS = 2  # folded into a client's key for a round: the examples and mini-batches for W


class Row(NamedTuple):
    """What a client keeps.

    Attributes:
        model: theta_k.
        weights: W_k, like the last p layers, with None in place of the rest.
        num_rounds: () int32, number of rounds in which it has taken part.
    """

    model: Params
    weights: PyTree
    num_rounds: Array


@method(keeps="its model, weights of its last layers", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedALA:
    """FedALA (Zhang et al., 2023): each client learns how much of the global model to adopt, per parameter.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.FedALA(layers=2)
        FedALA(layers=2, weights_learning_rate=1.0, share=0.8, first_passes=10, predict='after')
    """

    layers: int = hyperparameter(
        1,
        at_least=0,
        grid=(1, 2, 3),
        help="p, number of last layers mixed; with 0 the global model is FedAvg's",
    )
    weights_learning_rate: float = hyperparameter(
        1.0,
        at_least=0,
        grid=(0.1, 1.0, 10.0),
        help="eta, learning rate of the weights; 0 keeps them at 1",
        former="rate",
    )
    share: float = hyperparameter(
        0.8,
        above=0,
        at_most=1,
        grid=(0.05, 0.2, 0.4, 0.6, 0.8, 1.0),
        help="s, share of the examples used to learn W",
    )
    first_passes: int = hyperparameter(
        10, at_least=1, help="passes over that share in the first round with weights"
    )
    predict: Literal["after", "before"] = hyperparameter(
        "after",
        help="predict with the model after local training, or with what the next one would start from (authors)",
        former="scored",
    )

    def build(self, problem: Problem) -> Algorithm:
        num_layers = len(problem.model.layers)
        if self.layers > num_layers:
            accepted = f"accepted: 0 to {num_layers}, the number of layers"
            raise ArgumentError("layers", accepted, self.layers)
        adoption = Adoption(problem, self.layers, self.weights_learning_rate, self.first_passes)

        # ---- The client.

        def first_row(key: Key, client: Array) -> Row:
            """theta_k = theta, W_k = 1, and no rounds yet."""
            model = problem.init_global(key)
            return Row(model, adoption.first_weights(model), jnp.zeros((), jnp.int32))

        def learn_weights(context: ClientContext, row: Row, theta: Params, split: Split) -> PyTree:
            """W_k after this round's steps: none in a client's first round, more in its second."""
            key = jax.random.fold_in(context.key, WEIGHTS)
            key, share_key = jax.random.split(key)
            share = random_share(share_key, split, self.share)
            is_second = row.num_rounds == 1
            num_passes = jnp.where(is_second, self.first_passes, jnp.minimum(row.num_rounds, 1))
            context = context._replace(key=key)
            return adoption.learn(context, row.weights, row.model, theta, share, num_passes)

        def begin(
            context: ClientContext, row: Row, theta: Params, split: Split
        ) -> tuple[Params, PyTree]:
            """start(W_k), the model from which a client trains, and W_k."""
            weights = row.weights
            if self.layers > 0:
                # W_k <- clip(W_k - eta grad l_k(start(W_k)) * (theta - theta_k), 0, 1)
                weights = learn_weights(context, row, theta, split)
            # theta_k + (theta - theta_k) * W in the last p layers and theta below; at first theta.
            mixed = adoption.mix(weights, row.model, theta)
            return tree.where(row.num_rounds > 0, mixed, theta), weights

        def train(context: ClientContext, models: Params, row: Row, data: ClientData) -> Trained:
            # theta_k <- local training from start(W_k) on D_k
            context, models = problem.whole(context, models)
            start, weights = begin(context, row, tree.first(models), data.train)
            trained = problem.fit(context, tree.stack_one(start), data.train)
            personal = tree.first(trained.models)
            return trained._replace(row=Row(personal, weights, row.num_rounds + 1))

        # ---- What a client predicts with.

        def predict(
            context: ClientContext, models: Params, row: Row, data: ClientData
        ) -> Prediction:
            """theta_k, or what its next round would start from."""
            if self.predict == "after":
                return Prediction.single(row.model)
            start, _ = begin(context, row, tree.first(models), data.train)
            return Prediction.single(start)

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers play a first round: they train theta."""
            theta = tree.first(models)
            return Prediction.single(problem.train_newcomer(context, data, start=theta, rounds=1))

        passes_of_weights = problem.passes(self.first_passes if self.layers > 0 else 0)
        return averaging(
            problem,
            train=train,
            ledger=Ledger(gradients=1, passes=1 + passes_of_weights),
            first_row=first_row,
            predict=predict,
            adapt=adapt,
            global_model=received_model if self.predict == "after" else None,
            report=MethodReport(
                scored=f"each client's model {self.predict} local training",
                facts=(("mixed layers", self.layers),),
            ),
        )
