"""MOON: FedAvg with a contrastive loss that pulls features to the global model's and away from the previous model's.

Li, He, Song, "Model-contrastive federated learning" (CVPR 2021).

    A round: client k receives theta and takes local steps on  l_k(theta_k) + mu l_con,  where for each example
        l_con = -log(exp(sim(z, z_glob) / tau) / (exp(sim(z, z_glob) / tau) + exp(sim(z, z_prev) / tau)))    (Eq. 3)
    with features z under theta_k, z_glob under theta and z_prev under the client's last trained model (the first time:
    theta, so that l_con has no gradient); sim is the cosine;
    theta <- sum_k n_k theta_k / sum_k n_k.

Departures from the paper: z is the input of the model's last layer, while the paper adds a projection head of two
layers. Features are inference features, without dropout and with running statistics. For a sequence, l_con is the mean
over its positions.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common.global_model import averaging
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
    PyTree,
    Trained,
)
from pfljax.local.problem import Problem
from pfljax.local.solver import joined
from pfljax.settings.method import hyperparameter, method

EPSILON = 1e-16  # least norm of features, so that features of zero have a gradient


class Row(NamedTuple):
    """What a client keeps.

    Attributes:
        previous: Its last trained model.
        has_trained: () bool: whether there is one; otherwise `previous` is zeros, and means nothing.
    """

    previous: Params
    has_trained: Array


@method(keeps="its last model", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class MOON:
    """MOON (Li et al., 2021): FedAvg with a contrastive loss that pulls features to the global model's.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.MOON(mu=5.0)
        MOON(mu=5.0, temperature=0.5)
    """

    mu: float = hyperparameter(
        1.0,
        at_least=0,
        grid=(0.1, 1.0, 5.0, 10.0),
        help="weight of the contrastive loss; 0 is FedAvg",
    )
    temperature: float = hyperparameter(
        0.5,
        above=0,
        grid=(0.1, 0.5, 1.0),
        help="tau, temperature of the similarities",
        former="tau",
    )

    def build(self, problem: Problem) -> Algorithm:
        model = problem.model
        solver = problem.solver

        def first_row(key: Key, client: Array) -> Row:
            shapes = model.network.shapes
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            return Row(zeros, jnp.zeros((), bool))

        def train(context: ClientContext, models: Params, row: Row, data: ClientData) -> Trained:
            _, whole = problem.whole(context, models)
            global_model = tree.first(whole)
            previous = tree.where(row.has_trained, row.previous, global_model)

            # In the loss of each example, so that private training clips this gradient, too.
            def loss(params: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
                """l_k(theta_k) + mu l_con  (Eq. 3)."""
                z = model.features(params, x)
                z_glob = model.features(global_model, x)
                z_prev = model.features(previous, x)
                closer = (cosine(z, z_glob) - cosine(z, z_prev)) / self.temperature
                contrast = model.mean_over_positions(jax.nn.softplus(-closer), y)
                return solver.loss(params, x, y, mode) + self.mu * contrast

            trained = problem.with_loss(loss).fit(context, models, data.train)
            new_model = tree.first(joined(trained.models, trained.statistics))
            has_trained = row.has_trained | (data.train.size > 0)
            return trained._replace(row=Row(new_model, has_trained))

        return averaging(problem, train=train, ledger=Ledger(gradients=1), first_row=first_row)


def cosine(a: Array, b: Array) -> Array:
    """sim, the cosine of features (..., F)."""
    return optax.losses.cosine_similarity(a, b, epsilon=EPSILON)
