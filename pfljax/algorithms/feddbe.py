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

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import aggregation, beside, classes
from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, ClientOutput, Ledger, Prediction, Report
from pfljax.local.problem import OwnModel, Problem


class Consensus(NamedTuple):
    """c (F,), the mean of all clients' features, and whether there is one, () float32."""

    mean: Array
    known: Array


@method(keeps="a vector that is added to its features", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class FedDBE:
    """FedDBE (Zhang et al., 2023): FedAvg whose clients keep the bias of their features in a vector of their own."""

    kappa: float = knob(
        50.0, at_least=0, grid=(1.0, 10.0, 50.0, 100.0), help="pull of mean features toward those of all clients"
    )
    mu: float = knob(1.0, above=0, at_most=1, grid=(0.1, 0.5, 1.0), help="weight of a mini-batch in the mean features")

    def build(self, problem: Problem) -> Algorithm:
        model, solver, num_classes = problem.model, problem.solver, classes.required(problem, "feddbe", places=False)
        none = jnp.zeros(classes.num_features(problem))
        shift = lambda params, own: model.head(params, own[None]) - model.head(params, none[None])  # h(z + b) - h(z)

        def loss(pair, x, y, *key):
            return solver.loss(pair.shared, x, y, *key, shift=shift(pair.shared, pair.own))

        def objective(pair, batch, mean, consensus):
            mode = solver.mode(batch)
            z = model.features(pair.shared, batch.x, mode)
            mean = (1 - self.mu) * mean + self.mu * batch.mask @ z / jnp.maximum(batch.mask.sum(), 1)
            pull = self.kappa / 2 * jnp.square(mean - consensus.mean).mean()
            return solver.with_loss(loss).mean_loss(pair, batch) + consensus.known * pull, mean

        def client_update(context, models, row, data):
            def gradient(pair, mean, batch):
                of_pair = jax.value_and_grad(objective, has_aux=True)
                (value, mean), slope = of_pair(beside.Pair(*pair), batch(0).of_model(0), mean, context.server)
                return value, slope._replace(own=context.server.known * slope.own), mean

            trained, row, value, _ = beside.descend(problem, context, models, row, data.train, gradient, none)
            upload, sent = aggregation.weighted(tree.subtract(trained, models), data.train.size)
            found = classes.feature_sums(problem, tree.first(trained), data.train, num_classes)["sums"]
            return ClientOutput(row, upload | {"features": found.sum(axis=0)[None]}, {"loss": value}, sent)

        def server_update(key, state, aggregate):
            weight, known = aggregate.upload["weight"][0], state.server.known
            mean = aggregate.upload["features"][0] / jnp.maximum(weight, 1)
            kept = jnp.where(known > 0, state.server.mean, mean)
            server = Consensus(kept, jnp.maximum(known, weight > 0))
            return state._replace(server=server, models=aggregation.average(state.models, aggregate)), {}

        def adapt(context, models, data):
            alone = solver.with_loss(lambda own, *example: loss(beside.Pair(tree.first(models), own), *example))
            own = problem.alone(context, none, data, rounds=problem.rounds, objective=alone.mean_loss)
            return Prediction(inputs=own)

        def apply(models, own, x):
            params = tree.first(models)
            return model.apply(params, x) + shift(params, own)

        def row(key, client, models):
            return beside.Row(OwnModel(none, solver.optimizer.init(none)), problem.kept_optimizers(models))

        return averaging(
            problem,
            row=row,
            beside=lambda models, clients: Consensus(none, jnp.zeros(())),
            client_update=client_update,
            server_update=server_update,
            predict=lambda context, models, row, data: Prediction(inputs=row.own.model),
            apply=apply,
            adapt=adapt,
            ledger=Ledger(gradients=1, unaccounted="the mean features, in the loss and sent without noise"),
            sends="sums",  # of features, next to the models
            report=Report("the global model with each client's own vector added to the features"),
        )
