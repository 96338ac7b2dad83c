"""FedDBE: FedAvg whose clients keep the bias of their features in a vector of their own.

Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, "Eliminating domain bias for federated learning in representation space"
(NeurIPS 2023), with FedAvg.

    z = f(x; theta) are the body's features and h(z; theta) the head's logits.
    b_k starts at 0.
    The first round is FedAvg's; then c <- sum_k n_k c_k / sum_k n_k, where c_k is the mean of z over D_k. c stays.
    A later round: client k receives theta and c, sets m to 0, and takes steps in theta_k and its own b_k:
        m <- (1 - mu) m + mu mean of z over the mini-batch,
        a step on CE(h(z + b_k; theta_k), y) + kappa / 2 |m - c|^2 / F;
    theta <- sum_k n_k theta_k / sum_k n_k.  Client k predicts with h(z + b_k; theta).

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
    MethodReport,
    Mode,
    Params,
    Prediction,
    PyTree,
    Trained,
)
from pfljax.local.batches import Batch
from pfljax.local.problem import Pair, Personal, Problem
from pfljax.local.solver import joined
from pfljax.settings.method import hyperparameter, method


class Consensus(NamedTuple):
    """The server's mean features.

    Attributes:
        mean: c (F,), the mean features of the first round's clients; 0 before.
        known: () float32, 1 from the first round in which somebody sent features, else 0.
    """

    mean: Array
    known: Array


@method(keeps="a vector that is added to its features", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedDBE:
    """FedDBE (Zhang et al., 2023): FedAvg whose clients keep the bias of their features in a vector of their own.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedDBE(alignment=10.0)
        FedDBE(alignment=10.0, beta=1.0)
    """

    alignment: float = hyperparameter(
        50.0,
        at_least=0,
        grid=(1.0, 10.0, 50.0, 100.0),
        help="kappa, pull of mean features toward those of all clients",
        former="kappa",
    )
    beta: float = hyperparameter(
        1.0,
        above=0,
        at_most=1,
        grid=(0.1, 0.5, 1.0),
        help="mu, weight of a mini-batch in the mean features",
        former="mu",
    )

    def build(self, problem: Problem) -> Algorithm:
        model = problem.model
        solver = problem.solver
        num_classes = classes.required(problem, "feddbe", per_position=False)
        zeros = jnp.zeros(classes.num_features(problem))  # (F,), as are b_k, m and c

        def logit_shift(params: Params, bias: Array) -> Array:
            """(1, C) h(z + b) - h(z), which is h(b) - h(0) for all z, since h is affine."""
            return model.head(params, bias[None]) - model.head(params, zeros[None])

        def shifted_loss(
            params: Params, bias: Array, x: PyTree, y: Array, mode: Mode = None
        ) -> Array:
            """(B,) CE(h(z + b_k; theta_k), y), with h(z + b_k) as h(z) plus the shift."""
            shift = logit_shift(params, bias)
            return solver.loss(params, x, y, mode, shift=shift)

        # ---- The client.

        def first_row(key: Key, client: Array) -> Personal:
            """b_k = 0. A client's row is its vector and the optimizer's state."""
            return problem.personal(zeros)

        def train(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Trained:
            consensus: Consensus = context.server

            def pair_loss(pair: Pair, x: PyTree, y: Array, mode: Mode = None) -> Array:
                """(B,) the loss of the pair (theta_k, b_k)."""
                return shifted_loss(pair.shared, pair.personal, x, y, mode)

            pair_solver = solver.with_loss(pair_loss)

            def objective(pair: Pair, running_mean: Array, batch: Batch) -> tuple[Array, Array]:
                """What a step minimizes in (theta_k, b_k), and the next m."""
                # m <- (1 - mu) m + mu mean of z over the mini-batch
                z = model.features(pair.shared, batch.x, solver.mode(batch))
                batch_mean = batch.mask @ z / jnp.maximum(batch.mask.sum(), 1)
                running_mean = (1 - self.beta) * running_mean + self.beta * batch_mean

                # CE(h(z + b_k; theta_k), y) + kappa / 2 |m - c|^2 / F; the first round has no c.
                pull = self.alignment / 2 * jnp.square(running_mean - consensus.mean).mean()
                mean_loss = pair_solver.mean_loss(pair, batch)
                return mean_loss + consensus.known * pull, running_mean

            joint_direction = pairs.joint(objective)

            def direction(
                params: Pair, statistics: Pair, running_mean: Array, batch: Batch
            ) -> tuple[Pair, Array]:
                """The objective's gradients in theta_k and in b_k, which the first round leaves at 0."""
                slopes, running_mean = joint_direction(params, statistics, running_mean, batch)
                gradient = consensus.known * slopes.personal.gradient
                bias_slope = slopes.personal._replace(gradient=gradient)
                return Pair(shared=slopes.shared, personal=bias_slope), running_mean

            # Steps in theta_k and b_k, from m = 0.
            trained, _ = problem.descend_pair(
                context=context,
                models=models,
                personal=personal,
                split=data.train,
                direction=direction,
                memory=zeros,
            )

            # n_k c_k, the sum of z over D_k: over the examples of all classes.
            whole_models = joined(trained.models, trained.statistics)
            trained_model = tree.first(whole_models)
            class_statistics = classes.feature_sums(problem, trained_model, data.train, num_classes)
            features = class_statistics.sums.sum(axis=0)
            return trained._replace(sums={"features": features})

        # ---- The server.

        def first_server(key: Key, params: Params, clients: ClientData) -> Consensus:
            """No c yet."""
            return Consensus(mean=zeros, known=jnp.zeros(()))

        def server_step(received: Received, consensus: Consensus) -> ServerStep:
            """Sets c; without an update here, theta <- sum_k n_k theta_k / sum_k n_k."""
            # After the first round, c <- sum_k n_k c_k / sum_k n_k.
            round_mean = received.sums["features"] / jnp.maximum(received.weight, 1)
            # c stays.
            mean = jnp.where(consensus.known > 0, consensus.mean, round_mean)
            known = jnp.maximum(consensus.known, received.weight > 0)
            return ServerStep(server=Consensus(mean=mean, known=known))

        # ---- What a client predicts with: h(z + b_k; theta).

        def predict(
            context: ClientContext, models: Params, personal: Personal, data: ClientData
        ) -> Prediction:
            """theta as received, and b_k for `apply`."""
            return Prediction(inputs=personal.params)

        def apply(models: Params, bias: Array, x: PyTree) -> Array:
            """h(z + b_k; theta), (B, C)."""
            params = tree.first(models)
            return model.apply(params, x) + logit_shift(params, bias)

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers train b_k with theta fixed."""
            params = tree.first(models)

            def bias_loss(bias: Array, x: PyTree, y: Array, mode: Mode = None) -> Array:
                """(B,) the loss of b_k."""
                return shifted_loss(params, bias, x, y, mode)

            bias_solver = solver.with_loss(bias_loss)
            objective = bias_solver.mean_loss
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
            report=MethodReport(
                scored="the global model with each client's own vector added to the features"
            ),
            sends="sums",  # of features, next to the models
        )
