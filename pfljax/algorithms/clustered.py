"""Clustered FL: FedAvg within clusters, which split where their clients' updates disagree.

Sattler, Mueller, Samek, "Clustered federated learning: model-agnostic distributed multitask optimization under privacy
constraints" (IEEE TNNLS 2020).

    A round: client k receives its cluster's model theta_c and sends dtheta_k, the change from local training;
    a cluster c with more than two clients in the cohort splits if it is stationary as a whole but its clients are not,
        |sum_{k in c} n_k dtheta_k / sum_{k in c} n_k| < eps1 and max_{k in c} |dtheta_k| > eps2:
        its bipartition with the least cross-similarity alpha (cosine of updates) becomes two clusters
        if gamma < sqrt((1 - alpha) / 2), where gamma is the clients' noise, |dtheta_k - E dtheta_k| / |E dtheta_k|
    theta_c <- theta_c + sum_{k in c} n_k dtheta_k / sum_{k in c} n_k.

Departures from the paper:
- By default, eps1 and eps2 are in units of the largest update norm of the first round, since how far clients move
  depends on the network, the learning rate and the number of steps. `relative=False` gives the paper's absolute
  thresholds; the authors' code uses 0.4 and 1.6 and no gamma, which is gamma=0.
- The paper leaves gamma to the user. Here it is estimated by default. Two updates from one distribution have a cosine
  of about 1 / (1 + gamma^2). For a cluster, we estimate this cosine by the median, over its clients, of each client's
  largest cosine. gamma is at least 1 / 2, so parts less than 60 degrees apart are never split.
- The bipartition is the paper's: it minimizes the largest similarity across the parts, which is single linkage.
  `linkage=complete` is what the authors' code does. As in that code, `warmup` delays the first split; here it is 0 by
  default.
- When a cluster splits, clients outside the cohort stay with the part that has more examples. Newcomers take the
  cluster model with the least loss on their training data.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import by_loss
from pfljax.algorithms.common.clusters import bipartition
from pfljax.algorithms.common.one_each import one_for_each
from pfljax.contract import tree
from pfljax.contract.method import knob, method
from pfljax.contract.types import Algorithm, Array, ClientOutput, First, Report, Start
from pfljax.local.problem import Problem

LEAST_NOISE = 0.5  # the least estimate of gamma


class Server(NamedTuple):
    """Labels (K,) int32, and () the unit of eps1 and eps2 if they are relative."""

    label: Array
    unit: Array


@method(name="clustered", keeps="nothing", travels="its cluster's model, both ways")
@dataclasses.dataclass(frozen=True)
class ClusteredFL:
    """Clustered FL (Sattler et al., 2020): clusters of clients split where their updates disagree."""

    eps1: float = knob(
        0.5,
        at_least=0,
        grid=(0.3, 0.4, 0.5, 0.6),
        help="a cluster may split while the norm of its mean update is below this",
    )
    eps2: float = knob(
        0.4,
        at_least=0,
        grid=(0.2, 0.3, 0.4, 0.6, 0.8),
        help="a cluster may split while the largest norm of its updates is above this",
    )
    relative: bool = knob(True, help="measure eps1 and eps2 in units of the first round's largest update norm")
    gamma: float | None = knob(
        None,
        at_least=0,
        at_most=1,
        help="gamma_max, the clients' noise: a cluster splits if the largest cosine across its parts is below "
        "1 - 2 gamma^2; 0: always; not given: estimated",
    )
    linkage: Literal["single", "complete"] = knob(
        "single", help="similarity of two parts: the largest between their clients (single, the paper's) or the least"
    )
    warmup: int = knob(0, at_least=0, help="number of initial rounds without splits")

    def build(self, problem: Problem) -> Algorithm:
        num = problem.num_clients

        def start(key, clients):  # one model per client, equal within a cluster
            server = Server(jnp.zeros((num,), jnp.int32), jnp.zeros(()))
            return Start(server, tree.repeat(problem.init_models(key, 1), num))

        def client_update(context, models, kept, data):
            trained, kept, losses = problem.fit(context, models, kept, data.train)
            size = data.train.size.astype(jnp.float32)
            upload = {"update": tree.subtract(trained, models), "size": size[None]}
            return ClientOutput(kept, upload, {"loss": losses[0]}, (size > 0)[None])

        def server_update(key, state, aggregate):
            updates, size, (label, unit) = aggregate.upload["update"], aggregate.upload["size"], state.server
            products = problem.plan.gram(*problem.solver.trained(updates))
            unit = jnp.where(unit > 0, unit, jnp.sqrt(jnp.diagonal(products).max()))  # by the first updates
            divide = lambda: split_clusters(label, products, size, self, unit if self.relative else 1.0)
            label = jax.lax.cond(state.round >= self.warmup, divide, lambda: label).astype(jnp.int32)
            total = lambda rows: jnp.zeros_like(rows).at[label].add(rows)[label]  # the sum over each client's cluster
            mean = tree.scale(jax.tree.map(total, tree.scale(updates, size)), 1 / jnp.maximum(total(size), 1))
            metrics = {"clusters": (label == jnp.arange(num)).sum()}
            return state._replace(server=Server(label, unit), models=tree.add(state.models, mean)), metrics

        def cluster(context, row):
            label = context.server.label[context.client]
            return {"index": label[None], "weights": jnp.ones((1,)), "cluster": label}

        return one_for_each(
            start=start,
            first_row=lambda key, client, start: First(problem.kept_optimizers(problem.init_models(key, 1))),
            client_update=client_update,
            server_update=server_update,
            adapt=lambda context, models, data: by_loss.best_fit(problem, models, data),
            report=Report("the model of each client's cluster", collaboration=cluster, topology="peers"),
        )


def noise(cosine: Array, member: Array) -> Array:
    """() gamma of a cluster, estimated from the cosine between each member's update and the one most similar to it."""
    others = member[:, None] & member[None, :] & ~jnp.eye(len(member), dtype=bool)
    nearest = jnp.where(others, cosine, -1).max(axis=1)
    median = jnp.nanmedian(jnp.where(member, nearest, jnp.nan))
    return jnp.maximum(jnp.sqrt(jnp.where(median > 0, 1 / median - 1, jnp.inf)), LEAST_NOISE)


def split_clusters(label: Array, updates: Array, size: Array, knobs: ClusteredFL, unit: Array | float = 1.0) -> Array:
    """(K,) cluster labels after this round's splits; a cluster's label is the id of its first client.

    Args:
        label: (K,) int32.
        updates: (K, K) inner products of the clients' updates.
        size: (K,) n_k; 0 for clients that sent nothing.
        knobs: The thresholds.
        unit: Unit of eps1 and eps2.
    """
    norm = jnp.sqrt(jnp.diagonal(updates))
    cosine = updates / jnp.maximum(norm[:, None] * norm[None, :], jnp.finfo(jnp.float32).tiny)

    def one(cluster, new):
        member = (label == cluster) & (size > 0)  # by the clusters at the round's start
        share = jnp.where(member, size, 0) / jnp.maximum(jnp.where(member, size, 0).sum(), 1)
        mean = jnp.sqrt(jnp.maximum(share @ updates @ share, 0))
        largest = jnp.where(member, norm, 0).max()
        may_split = (mean < knobs.eps1 * unit) & (largest > knobs.eps2 * unit) & (member.sum() > 2)

        def divide(new):
            leaves = bipartition(cosine, member, knobs.linkage)
            across = jnp.where(leaves[:, None] & (member & ~leaves)[None, :], cosine, -1).max()
            smaller = 2 * jnp.where(leaves, size, 0).sum() <= jnp.where(member, size, 0).sum()
            leaves = jnp.where(smaller, leaves, member & ~leaves)
            stays = (label == cluster) & ~leaves  # absent members included
            gamma = noise(cosine, member) if knobs.gamma is None else knobs.gamma
            apart = jnp.sqrt((1 - across) / 2) > gamma
            divided = jnp.where(leaves, jnp.argmax(leaves), jnp.where(stays, jnp.argmax(stays), new))
            return jnp.where(apart, divided, new)

        return jax.lax.cond(may_split, divide, lambda new: new, new)

    return jax.lax.fori_loop(0, label.shape[0], one, label)
