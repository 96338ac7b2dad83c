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
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common.averaging import averaging
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, Ledger, Params, PyTree
from pfljax.local.problem import Problem

cosine = functools.partial(optax.losses.cosine_similarity, epsilon=1e-16)  # zero features have a gradient


class Row(NamedTuple):
    """The client's last trained model, whether there is one, and its optimizer, if it is kept."""

    previous: Params
    trained: Array
    optimizer: PyTree


@method(keeps="its last model", travels="the global model, both ways")
@dataclasses.dataclass(frozen=True)
class MOON:
    """MOON (Li et al., 2021): FedAvg with a contrastive loss that pulls features to the global model's."""

    mu: float = knob(1.0, at_least=0, grid=(0.1, 1.0, 5.0, 10.0), help="strength of the contrastive loss; 0 is FedAvg")
    tau: float = knob(0.5, above=0, grid=(0.1, 0.5, 1.0), help="temperature of the similarities")

    def build(self, problem: Problem) -> Algorithm:
        model, solver = problem.model, problem.solver

        def contrasting(received, previous):
            """Adds the contrast to the loss of each example, so that private training clips its gradient too."""

            def loss(params, x, y, *key):
                z, z_glob, z_prev = (model.features(params, x) for params in (params, received, previous))
                closer = (cosine(z, z_glob) - cosine(z, z_prev)) / self.tau
                contrast = model.over_places(jax.nn.softplus(-closer), y)  # Eq. 3
                return solver.loss(params, x, y, *key) + self.mu * contrast

            return problem.with_loss(loss)

        def row(key, client, models):
            zeros = jax.tree.map(jnp.zeros_like, tree.first(models))
            return Row(zeros, jnp.zeros((), bool), problem.kept_optimizers(models))

        def train(context, models, row, data):
            received = tree.first(models)
            previous = jax.tree.map(lambda a, b: jnp.where(row.trained, a, b), row.previous, received)
            contrast = contrasting(received, previous)
            models, optimizer, losses = contrast.fit(context, models, row.optimizer, data.train)
            return models, Row(tree.first(models), row.trained | (data.train.size > 0), optimizer), losses

        return averaging(problem, train=train, row=row, ledger=Ledger(gradients=1))
