"""IFCA and HypCluster: C models; each client trains the one that fits its data best.

IFCA: Ghosh, Chung, Yin, Ramchandran, "An efficient framework for clustered federated learning" (NeurIPS 2020, Algorithm
1). HypCluster: Mansour, Mohri, Ro, Suresh, "Three approaches for personalization with applications to federated
learning" (2020, Section 4), the same choice by loss without IFCA's options.

    A round: every client receives all C models; j_k = argmin_j l_k(theta_j) on its training data;
    it trains theta_{j_k} to theta'; theta_j <- sum_{k: j_k = j} n_k theta'_k / sum n_k, and layers that all clusters
    share become the mean over all clients. A model that no client chose stays.
    `averaging=gradients` (Option I): theta_j <- theta_j - eta sum_{k: j_k = j} n_k g_k / sum_{all k} n_k, where g_k is
    the gradient of a mini-batch at theta_{j_k}; one such step for each mini-batch.

Departures from the paper: The mean is weighted by n_k. The models start from different random parameters. The authors'
code restarts when a start turns out bad. Here `draws` starts are drawn, and we keep the one under which the clients
spread most evenly over the models (largest entropy of the models' shares of all examples): in a bad start, several
distributions choose one model. If clients keep their optimizers, a client's optimizer follows it from one model to
another. Under Option I clients choose once per round, and eta is the solver's optimizer, one for each model. In the
paper, C is the true number of clusters; here it is 3 unless it is given, tuned or told (`tell_groups`).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import aggregation, by_loss, gradients
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, ClientData, ClientOutput, First, Key, Ledger, Params, Report, Start
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem

CLUSTERS = "C, number of models; 1 is FedAvg"


@method(keeps="nothing", travels="C models down, the chosen one up")
@dataclasses.dataclass(frozen=True)
class IFCA:
    """IFCA (Ghosh et al., 2020): C models; each client trains the one that fits its data best."""

    clusters: int = knob(3, at_least=1, grid=(2, 3, 4, 5), groups=True, help=CLUSTERS)
    shared_layers: int = knob(0, at_least=0, help="number of first layers that all clusters share")
    draws: int = knob(1, at_least=1, help="number of starts drawn; the one that spreads clients most evenly is kept")
    averaging: Literal["models", "gradients"] = knob(
        "models", help="what the server averages: trained models, or gradients (Option I)"
    )

    def build(self, problem: Problem) -> Algorithm:
        num_layers = len(problem.model.layers)
        if self.shared_layers > num_layers:
            accepted = f"accepted: 0 to {num_layers}, the number of layers"
            raise ArgumentError("shared_layers", accepted, self.shared_layers)
        if self.shared_layers and self.averaging == "gradients":
            raise ArgumentError("shared_layers", "must be 0 with averaging=gradients", self.shared_layers)
        if self.averaging == "gradients":
            return by_gradients(problem, self.clusters, self.draws)
        return by_models(problem, self.clusters, self.shared_layers, self.draws)


@method(keeps="nothing", travels="C models down, the chosen one up")
@dataclasses.dataclass(frozen=True)
class HypCluster:
    """HypCluster (Mansour et al., 2020): C models; each client trains the one that fits its data best."""

    clusters: int = knob(3, at_least=1, grid=(2, 3, 4, 5), groups=True, help=CLUSTERS)

    def build(self, problem: Problem) -> Algorithm:
        return by_models(problem, self.clusters)


def initial_models(problem: Problem, key: Key, clients: ClientData, num: int, draws: int) -> Params:
    """C models: the draw, out of several, over which the clients' choices spread most evenly."""
    apart = problem._replace(common_init=False)

    def scored(key):
        models = apart.init_models(key, num)
        chosen = jax.nn.one_hot(by_loss.losses_of_all(problem, models, clients.train).argmin(axis=1), num)
        share = clients.train.size @ chosen / jnp.maximum(clients.train.size.sum(), 1)
        return models, jax.scipy.special.entr(share).sum()

    def better(number, best):
        new = scored(jax.random.fold_in(key, num + number))
        return jax.tree.map(lambda a, b: jnp.where(new[1] > best[1], a, b), new, best)

    return apart.init_models(key, num) if draws == 1 else jax.lax.fori_loop(1, draws, better, scored(key))[0]


def by_models(problem: Problem, num: int, num_shared: int = 0, draws: int = 1) -> Algorithm:
    """C = `num` models, each the mean of its clients' trained copies; the first layers may be shared."""

    def share(models, weight):
        """Replaces shared layers by their mean over clusters, weighted by `weight` (C,); other layers stay."""
        own = problem.model.mask(models, len(problem.model.layers) - num_shared)
        part = weight / jnp.maximum(weight.sum(), 1e-12)
        mean = jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.tensordot(part, leaf, axes=1), leaf.shape), models)
        return jax.tree.map(lambda m, leaf, all: leaf if m else all, own, models, mean) if num_shared else models

    def start(key, clients):
        return Start((), share(initial_models(problem, key, clients, num, draws), jnp.eye(num)[0]))

    def first_row(key, client, start):
        return First(problem.kept_optimizers(jax.tree.map(lambda leaf: leaf[:1], start.models)))

    def client_update(context, models, kept, data):
        chosen = by_loss.best_of(problem, models, data)
        received = tree.take(models, chosen[None])
        trained, kept, losses = problem.fit(context, received, kept, data.train)
        size = jnp.where(jnp.arange(num) == chosen, data.train.size, 0)
        update = tree.subtract(trained, received)
        upload, sent = aggregation.weighted(tree.repeat(update, num), size, num)
        return ClientOutput(kept, upload, {"loss": losses[0]}, sent)

    def server_update(key, state, aggregate):
        models = aggregation.average(state.models, aggregate)
        weight = aggregate.upload["weight"]
        models = jax.tree.map(lambda new, old: jnp.where(weight.sum() > 0, new, old), share(models, weight), models)
        return state._replace(models=models), {"clusters_chosen": (weight > 0).sum()}

    return Algorithm(
        start=start,
        first_row=first_row,
        client_update=client_update,
        server_update=server_update,
        predict=lambda context, models, row, data: by_loss.best_fit(problem, models, data),
        topology="shared",
        averages=True,
        ledger=Ledger(gradients=1, unaccounted=BY_LOSS),
        report=Report(scored="the model that fits each client's training data best"),
    )


def by_gradients(problem: Problem, num: int, draws: int) -> Algorithm:
    """C = `num` models that step along their clients' gradients (Option I)."""

    def start(key, clients):
        models = initial_models(problem, key, clients, num, draws)
        return Start((), models, problem.init_optimizers(models))

    def client_update(context, models, chosen, data):
        choose = lambda: by_loss.best_of(problem, models, data)
        if not context.later:
            chosen = jax.lax.cond(context.step == 0, choose, lambda: chosen)
        losses, grads = gradients.of_batch(problem, context, tree.take(models, chosen[None]), data.train)
        mine = jnp.arange(num) == chosen
        upload = tree.scale(tree.repeat(grads, num), mine * data.train.size)
        report = {"loss": losses[0], "size": data.train.size}
        return ClientOutput(chosen, upload, report, mine & gradients.takes_step(problem, context, data.train))

    def server_update(key, state, aggregate):
        sizes = jnp.broadcast_to(jnp.maximum(aggregate.report["size"].sum(), 1), (num,))
        metrics = {"clusters_chosen": (aggregate.count > 0).sum()}
        return gradients.apply(problem, state, aggregate, sizes, "shared"), metrics

    return dataclasses.replace(
        by_models(problem, num),
        start=start,
        first_row=lambda key, client, start: First(jnp.zeros((), jnp.int32)),
        client_update=client_update,
        server_update=server_update,
        averages=False,
        exchanges=problem.solver.max_steps(problem.n_max),
    )
