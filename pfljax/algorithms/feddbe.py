"""FedDBE: FedAvg whose clients keep the bias of their features in a vector of their own.

Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, "Eliminating domain bias for federated learning in representation space"
(NeurIPS 2023), with FedAvg.

    z = f(x; theta) are the body's features and h(z; theta) the head's logits.
    The first round is FedAvg's; then c <- sum_k n_k c_k / sum_k n_k, where c_k is the mean of z over D_k. c stays.
    A later round: client k receives theta and c, sets m to 0, and takes steps in theta_k and its own b_k on
        CE(h(z + b_k; theta_k), y) + kappa / 2 |m - c|^2 / F,  m <- (1 - mu) m + mu mean of z over the mini-batch;
    theta <- sum_k n_k theta_k / sum_k n_k.  Client k predicts with h(z + b_k; theta); b_k starts at 0.

Departures from the paper: In the paper, all clients first train for an epoch that serves only to find c; here that is
the first round, so that c is the mean over its cohort. c_k is the mean of inference features under the trained model;
it is sent, and counted as traffic, in every round. The factor 1/2 is that of the authors' code. b_k is trained with the
solver's optimizer. Newcomers train b_k with theta fixed, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from pfljax.algorithms.common import classes, pairs
from pfljax.algorithms.common.global_model import Received, ServerStep, averaging
from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    Ledger,
    Mode,
    Params,
    Prediction,
    PyTree,
    Report,
    Trained,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Pair, Personal, Problem
from pfljax.local.solver import joined
from pfljax.settings.method import knob, method


class Consensus(NamedTuple):
    """The server's mean features.

    Attributes:
        mean: c (F,), the mean of all clients' features.
        known: () float32, 1 if there is one, else 0.
    """

    mean: Array
    known: Array


@method(keeps="a vector that is added to its features", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedDBE:
    """FedDBE (Zhang et al., 2023): FedAvg whose clients keep the bias of their features in a vector of their own."""

    kappa: float = knob(
        50.0,
        at_least=0,
        grid=(1.0, 10.0, 50.0, 100.0),
        help="pull of mean features toward those of all clients",
    )
    mu: float = knob(
        1.0,
        above=0,
        at_most=1,
        grid=(0.1, 0.5, 1.0),
        help="weight of a mini-batch in the mean features",
    )

    def build(self, problem: Problem) -> Algorithm:
        model = problem.model
        solver = problem.solver
        num_classes = classes.required(problem, "feddbe", places=False)
        zeros = jnp.zeros(classes.num_features(problem))

        def shift(params: Params, bias: Array) -> Array:
            """h(z + b) - h(z), which is the same for all z."""
            return model.head(params, bias[None]) - model.head(params, zeros[None])

        def shifted_loss(
            params: Params, bias: Array, x: PyTree, y: Array, mode: Mode = None
        ) -> Array:
            """CE(h(z + b_k; theta_k), y) of each example."""
            return solver.loss(params, x, y, mode, shift=shift(params, bias))

        # ---- The client.

        def first_row(key: Key, client: Array) -> Personal:
            """b_k = 0. A client's row is its vector."""
            return problem.personal(zeros)

        def train(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Trained:
            consensus: Consensus = context.server

            def loss(pair: Pair, x: PyTree, y: Array, mode: Mode = None) -> Array:
                return shifted_loss(pair.shared, pair.personal, x, y, mode)

            def objective(pair: Pair, mean: Array, batch: Batch) -> tuple[Array, Array]:
                # m <- (1 - mu) m + mu mean of z over the mini-batch
                z = model.features(pair.shared, batch.x, solver.mode(batch))
                batch_mean = batch.mask @ z / jnp.maximum(batch.mask.sum(), 1)
                mean = (1 - self.mu) * mean + self.mu * batch_mean
                # CE(h(z + b_k; theta_k), y) + kappa / 2 |m - c|^2 / F
                pull = self.kappa / 2 * jnp.square(mean - consensus.mean).mean()
                mean_loss = solver.with_loss(loss).mean_loss(pair, batch)
                return mean_loss + consensus.known * pull, mean

            joint_direction = pairs.joint(objective)

            def direction(
                params: Pair, statistics: Pair, mean: Array, batch: Batch
            ) -> tuple[Pair, Array]:
                """In the first round, which is FedAvg's, b_k stays at 0."""
                slopes, mean = joint_direction(params, statistics, mean, batch)
                gradient = consensus.known * slopes.personal.gradient
                return slopes._replace(personal=slopes.personal._replace(gradient=gradient)), mean

            trained, _ = problem.descend_pair(
                context, models, personal, data.train, direction, memory=zeros
            )

            # n_k c_k, the sum of z over D_k
            whole = tree.first(joined(trained.models, trained.statistics))
            of_classes = classes.feature_sums(problem, whole, data.train, num_classes)
            return trained._replace(sums={"features": of_classes["sums"].sum(axis=0)})

        # ---- The server.

        def first_server(key: Key, params: Params, clients: ClientData) -> Consensus:
            return Consensus(mean=zeros, known=jnp.zeros(()))

        def server_step(received: Received, consensus: Consensus) -> ServerStep:
            # After the first round c <- sum_k n_k c_k / sum_k n_k. c stays.
            mean = received.sums["features"] / jnp.maximum(received.weight, 1)
            mean = jnp.where(consensus.known > 0, consensus.mean, mean)
            known = jnp.maximum(consensus.known, received.weight > 0)
            return ServerStep(server=Consensus(mean, known))

        # ---- What a client predicts with: h(z + b_k; theta).

        def predict(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Prediction:
            return Prediction(inputs=personal.params)

        def apply(models: Params, bias: Array, x: PyTree) -> Array:
            params = tree.first(models)
            return model.apply(params, x) + shift(params, bias)

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train b_k with theta fixed."""
            params = tree.first(models)

            def loss(bias: Array, x: PyTree, y: Array, mode: Mode = None) -> Array:
                return shifted_loss(params, bias, x, y, mode)

            objective = solver.with_loss(loss).mean_loss
            bias = problem.train_newcomer(context, data, objective, start=zeros)
            return Prediction(inputs=bias)

        return averaging(
            problem,
            train=train,
            ledger=Ledger(
                gradients=1, unaccounted="the mean features, in the loss and sent without noise"
            ),
            first_row=first_row,
            first_server=first_server,
            server_step=server_step,
            predict=predict,
            apply=apply,
            adapt=adapt,
            report=Report("the global model with each client's own vector added to the features"),
            sends="sums",  # of features, next to the models
        )
