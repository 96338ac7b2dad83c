"""MOCHA: multi-task learning of linear models, or last layers, whose relationship is learned along with them.

Smith, Chiang, Sanjabi, Talwalkar, "Federated multi-task learning" (NeurIPS 2017), with the relationship of Zhang and
Yeung, "A convex formulation for learning task relationships in multi-task learning" (UAI 2010), which it takes over:

    min over W, Omega of  sum_k l_k(w_k) + strength / 2 tr(W' Omega^-1 W),   Omega positive, tr Omega = 1.

    A round: client k receives u_k = sum_{j != k} (Omega^-1)_kj w_j and (Omega^-1)_kk, takes local steps on
        l_k(w_k) + strength / 2 ((Omega^-1)_kk |w_k|^2 + 2 w_k . u_k), the objective with the others' w_j held;
        and sends w_k;
    the server: Omega <- (W W')^(1/2) / tr (W W')^(1/2), which minimizes the objective in Omega.      (Zhang & Yeung)

W is the whole of a linear model; of a network the last layer, as FedFomo compares with it: the layers below stay with
their client.

Departures from the paper: local steps are the solver's on the model's own loss, not dual coordinate ascent on a hinge
loss, a mean over its examples where the paper has a sum; `ridge` is added to Omega before it is inverted. Newcomers
train alone.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pfljax.core import tree
from pfljax.core.types import Algorithm, Array, ClientOutput, Params, Predictor, State, UsageError
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class MochaConfig:
    """MOCHA's knobs.

    Attributes:
        strength: of the regularization by the relationship; 0 is Local
        ridge: added to the relationship matrix, whose trace is 1, times 1 / K before it is inverted
    """

    strength: float = 0.001
    ridge: float = 0.1

    def __post_init__(self):
        if self.strength < 0:
            raise UsageError(f"--mocha.strength={self.strength}: accepted: 0 or more")
        if not self.ridge > 0:
            raise UsageError(f"--mocha.ridge={self.ridge}: accepted: above 0")


def relationship(weights: Params) -> Array:
    """(K, K) Omega = (W W')^(1/2) / tr (W W')^(1/2) of K stacked models W."""
    values, vectors = jnp.linalg.eigh(tree.gram(weights))
    roots = jnp.sqrt(jnp.maximum(values, 0))
    return (vectors * roots / jnp.maximum(roots.sum(), jnp.finfo(jnp.float32).tiny)) @ vectors.T


def mocha(problem: Problem, config: MochaConfig) -> Algorithm:
    """MOCHA."""
    num = problem.num_clients

    def split(models):
        """(last layer, the others)."""
        return tree.partition(models, problem.model.mask(models, 1))

    def pulls(weights, omega):
        """What the clients receive: u_k and (Omega^-1)_kk."""
        precision = jnp.linalg.inv(omega + config.ridge / num * jnp.eye(num))
        others = precision * (1 - jnp.eye(num))
        return {"others": tree.mix(others, weights), "own": jnp.diagonal(precision)}

    def init(key, clients):
        rows = problem.own_rows(key, num)
        weights, omega = split(rows["model"])[0], jnp.eye(num) / num
        return State({"weights": weights, "omega": omega}, pulls(weights, omega), (), rows)

    def download(key, state, cohort):
        return cohort.ids[:, None]

    def work(turn, models, row, shard):
        pull = jax.tree.map(lambda leaf: leaf[0], models)

        def objective(params, batch):
            weights = split(params)[0]
            penalty = pull["own"] * tree.inner(weights, weights) + 2 * tree.inner(weights, pull["others"])
            return problem.solver.mean_loss(params, batch) + config.strength / 2 * penalty

        row, loss = problem.fit_own(turn, row, shard.train, objective)
        return ClientOutput(row, tree.stack_one(split(row["model"])[0]), {"loss": loss})

    def update(key, state, returned):
        weights = tree.where(returned.count > 0, returned.upload, state.server["weights"])
        omega = relationship(weights)
        return state._replace(server={"weights": weights, "omega": omega}, models=pulls(weights, omega)), {}

    def predictor(key, state, clients):
        return Predictor.own(state.clients["model"])

    def adapt(key, state, clients):
        return problem.newcomers_alone(key, clients)

    return Algorithm(init, download, work, update, predictor, adapt, "shared", "each client's own model")
