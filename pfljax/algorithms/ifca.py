"""IFCA and HypCluster: C models, each client trains the one that fits its data best.

IFCA: Ghosh, Chung, Yin, Ramchandran, "An efficient framework for clustered federated learning" (NeurIPS 2020, Algorithm
1 with model averaging). HypCluster: Mansour, Mohri, Ro, Suresh, "Three approaches for personalization with applications
to federated learning" (2020, Section 4), the same by the loss alone, without shared layers.

    A round: every client receives all C models; j_k = argmin_j l_k(theta_j) on its training data;
    it trains theta_{j_k} to theta'; theta_j <- sum_{k: j_k = j} n_k theta'_k / sum n_k, and of layers that all clusters
    share the mean over all clients. A model that nobody chose stays.

Departures from the paper: the mean is weighted by n_k. The models start from different random parameters. Where
clients keep their optimizers, that of a client follows it from one model to another.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import aggregation
from pfljax.core import tree
from pfljax.core.types import Algorithm, ClientOutput, Predictor, State, UsageError
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem


@dataclasses.dataclass(frozen=True)
class IFCAConfig:
    """IFCA's knobs.

    Attributes:
        clusters: C; 1 is FedAvg
        shared_layers: how many of the model's first layers all clusters share
    """

    clusters: int = 2
    shared_layers: int = 0


@dataclasses.dataclass(frozen=True)
class HypClusterConfig:
    """HypCluster's knob.

    Attributes:
        clusters: C; 1 is FedAvg
    """

    clusters: int = 2


def ifca(problem: Problem, config: IFCAConfig) -> Algorithm:
    """IFCA."""
    num_layers = len(problem.model.layers)
    if not 0 <= config.shared_layers <= num_layers:
        raise UsageError(
            f"--ifca.shared_layers={config.shared_layers}: accepted: 0 to {num_layers}, the layers of the model"
        )
    return clusters(problem, config.clusters, config.shared_layers, "--ifca.")


def hypcluster(problem: Problem, config: HypClusterConfig) -> Algorithm:
    """HypCluster."""
    return clusters(problem, config.clusters, 0, "--hypcluster.")


def clusters(problem: Problem, num: int, num_shared: int, prefix: str) -> Algorithm:
    """C models of which every client takes the one with the least training loss."""
    if num < 1:
        raise UsageError(f"{prefix}clusters={num}: accepted: 1 or more")

    def share(models, weight):
        """Layers of all clusters become their mean by `weight` (C,); the others stay."""
        own = problem.model.mask(models, len(problem.model.layers) - num_shared)
        part = weight / jnp.maximum(weight.sum(), 1e-12)
        mean = jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.tensordot(part, leaf, axes=1), leaf.shape), models)
        return jax.tree.map(lambda m, leaf, all: leaf if m else all, own, models, mean) if num_shared else models

    def init(key, clients):
        models = share(problem._replace(common_init=False).init_models(key, num), jnp.eye(num)[0])
        first = jax.tree.map(lambda leaf: leaf[:1], models)
        return State((), models, (), problem.optimizer_rows(first, tree.num_rows(clients)))

    def download(key, state, cohort):
        return aggregation.all_models(cohort.ids.shape[0], num)

    def work(turn, models, kept, shard):
        losses = problem.plan.over_models(lambda params: problem.solver.total_loss(params, shard.train), models)
        chosen = jnp.argmin(losses)
        start = jax.tree.map(lambda leaf: leaf[None], tree.take(models, chosen))
        trained, kept, losses = problem.fit_models(turn, start, kept, shard.train)
        size = jnp.where(jnp.arange(num) == chosen, shard.train.size, 0)
        upload, sent = aggregation.weighted(tree.repeat(trained, num), size, num)
        return ClientOutput(kept, upload, {"loss": losses[0]}, sent)

    def update(key, state, returned):
        models = aggregation.average(state.models, returned)
        weight = returned.upload["weight"]
        models = jax.tree.map(lambda new, old: jnp.where(weight.sum() > 0, new, old), share(models, weight), models)
        return state._replace(models=models), {"clusters_chosen": (weight > 0).sum()}

    def predictor(key, state, clients):
        best = problem.losses_of_all(state.models, clients.train).argmin(axis=1).astype(jnp.int32)
        return Predictor(state.models, best[:, None], jnp.ones((best.shape[0], 1)), "shared")

    scored = "the model that fits each client's training data best"
    return Algorithm(init, download, work, update, predictor, predictor, "shared", scored, unaccounted=BY_LOSS)
