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

from pfljax.algorithms.common import aggregation, by_loss
from pfljax.core import tree
from pfljax.core.errors import ArgumentError
from pfljax.core.method import knob, method
from pfljax.core.types import Algorithm, ClientOutput, Ledger, Report, State
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem


@method(keeps="nothing", travels="C models down, the chosen one up")
@dataclasses.dataclass(frozen=True)
class IFCA:
    """IFCA (Ghosh et al., 2020): C models, each client trains the one that fits its data best."""

    clusters: int = knob(2, at_least=1, help="C; 1 is FedAvg")
    shared_layers: int = knob(0, at_least=0, help="number of the model's first layers that all clusters share")

    def build(self, problem: Problem) -> Algorithm:
        num_layers = len(problem.model.layers)
        if self.shared_layers > num_layers:
            accepted = f"accepted: 0 to {num_layers}, the layers of the model"
            raise ArgumentError("shared_layers", accepted, self.shared_layers)
        return clusters(problem, self.clusters, self.shared_layers)


@method(keeps="nothing", travels="C models down, the chosen one up")
@dataclasses.dataclass(frozen=True)
class HypCluster:
    """HypCluster (Mansour et al., 2020): C models, each client trains the one that fits its data best."""

    clusters: int = knob(2, at_least=1, help="C; 1 is FedAvg")

    def build(self, problem: Problem) -> Algorithm:
        return clusters(problem, self.clusters, 0)


def clusters(problem: Problem, num: int, num_shared: int) -> Algorithm:
    """C = `num` models of which every client takes the one of least training loss; the first layers may be shared."""

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

    def client_update(context, models, kept, data):
        losses = problem.plan.over_models(lambda params: problem.solver.total_loss(params, data.train), models)
        chosen = jnp.argmin(losses)
        trained, kept, losses = problem.fit_models(context, tree.take(models, chosen[None]), kept, data.train)
        size = jnp.where(jnp.arange(num) == chosen, data.train.size, 0)
        upload, sent = aggregation.weighted(tree.repeat(trained, num), size, num)
        return ClientOutput(kept, upload, {"loss": losses[0]}, sent)

    def server_update(key, state, aggregate):
        models = aggregation.average(state.models, aggregate)
        weight = aggregate.upload["weight"]
        models = jax.tree.map(lambda new, old: jnp.where(weight.sum() > 0, new, old), share(models, weight), models)
        return state._replace(models=models), {"clusters_chosen": (weight > 0).sum()}

    return Algorithm(
        init=init,
        client_update=client_update,
        server_update=server_update,
        predictor=lambda key, state, clients: by_loss.best_fit(problem, state.models, clients),
        topology="shared",
        ledger=Ledger(gradients=1, unaccounted=BY_LOSS),
        report=Report(scored="the model that fits each client's training data best"),
    )
