"""FedAMP: each client is drawn to a cloud model of its own, a mixture of the models most like its own.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized cross-silo federated learning on non-IID data" (AAAI 2021), with
A(x) = 1 - exp(-x / sigma).

    A round: client k receives u_k and takes w_k near argmin l_k(w) + strength / 2 |w - u_k|^2;
    xi_kj = a exp(-|w_k - w_j|^2 / sigma) for j != k, xi_kk = 1 - sum_j xi_kj;  u_k <- sum_j xi_kj w_j.

Departures from the paper: its step alpha is given by `attention` = alpha (K - 1) / sigma, the most that all others
together can weigh, so a = attention / (K - 1); sigma is in units of the mean squared distance between clients' models,
which changes by orders of magnitude from network to network and over rounds; strength stands for lambda / alpha. Local
training starts from u_k. The clients' last models are kept at the server, which needs all of them, those of clients out
of the cohort too. Newcomers train from the mean of all models, held near it, for as many rounds as a run has.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pfljax.core import tree
from pfljax.core.types import Algorithm, Array, ClientOutput, Params, Predictor, State, UsageError
from pfljax.local.problem import Problem

SHOWN = 16  # clients of most weight that a run's files tell for each client


@dataclasses.dataclass(frozen=True)
class FedAMPConfig:
    """FedAMP's knobs.

    Attributes:
        attention: the most that all others' models together weigh in a client's cloud model; 0: none
        sigma: squared distance at which attention falls to 1 / e, in units of the mean one
        strength: of the pull of the client's model to its cloud model; with no attention 0 is Local
    """

    attention: float = 0.9
    sigma: float = 0.3
    strength: float = 0.1

    def __post_init__(self):
        if not 0 <= self.attention <= 1:
            raise UsageError(f"--fedamp.attention={self.attention}: accepted: a share in [0, 1]")
        if not self.sigma > 0:
            raise UsageError(f"--fedamp.sigma={self.sigma}: accepted: above 0")
        if self.strength < 0:
            raise UsageError(f"--fedamp.strength={self.strength}: accepted: 0 or more")


def attention(models: Params, config: FedAMPConfig) -> Array:
    """(K, K) xi of K stacked models, each row on the simplex."""
    # From their mean, since of models that are near one another large products would cancel.
    products = tree.gram(jax.tree.map(lambda leaf: leaf - leaf.mean(axis=0), models))
    num, size = products.shape[0], jnp.diagonal(products)
    others = 1 - jnp.eye(num)
    distance = jnp.maximum(size[:, None] + size[None, :] - 2 * products, 0) * others
    unit = distance.sum() / max(num * (num - 1), 1)
    near = jnp.exp(-distance / jnp.maximum(config.sigma * unit, jnp.finfo(jnp.float32).tiny))
    weights = config.attention / max(num - 1, 1) * near * others
    return weights + jnp.diag(1 - weights.sum(axis=1))


def fedamp(problem: Problem, config: FedAMPConfig) -> Algorithm:
    """FedAMP."""
    num = problem.num_clients

    def init(key, clients):
        personal = problem.own_rows(key, num)
        server = {"models": personal["model"], "xi": jnp.eye(num)}
        return State(server, personal["model"], (), {"optimizer": personal["optimizer"]})

    def download(key, state, cohort):
        return cohort.ids[:, None]

    def work(turn, models, row, shard):
        cloud = jax.tree.map(lambda leaf: leaf[0], models)
        near = problem.solver.proximal(cloud, config.strength)
        new, loss = problem.fit_own(turn, row | {"model": cloud}, shard.train, near)
        return ClientOutput({"optimizer": new["optimizer"]}, tree.stack_one(new["model"]), {"loss": loss})

    def update(key, state, returned):
        models = tree.where(returned.count > 0, returned.upload, state.server["models"])
        xi = attention(models, config)
        metrics = {"weight_of_others": 1 - jnp.diagonal(xi).mean()}
        return state._replace(server={"models": models, "xi": xi}, models=tree.mix(xi, models)), metrics

    def predictor(key, state, clients):
        return Predictor.own(state.server["models"])

    def adapt(key, state, clients):
        mean = tree.stack_one(jax.tree.map(lambda leaf: leaf.mean(axis=0), state.server["models"]))
        near = lambda params, batch, start: problem.solver.proximal(start, config.strength)(params, batch)
        models = problem.train_alone(key, mean, clients, own=False, rounds=problem.rounds, objective=near)
        return Predictor.own(models)

    def heaviest(state):
        weights, index = jax.lax.top_k(state.server["xi"], min(SHOWN, num))
        return {"index": index.astype(jnp.int32), "weights": weights / weights.sum(axis=1, keepdims=True)}

    algorithm = Algorithm(init, download, work, update, predictor, adapt, "shared", "each client's own model")
    return algorithm._replace(collaboration=("peers", heaviest), by_rows=False)
