"""A server's record of clients' uploads, and means of models over clusters of clients.

FedFomo's code (Zhang et al., 2021) uses such means. Its clusters come from spectral clustering.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common.clusters import spectral_clusters
from pfljax.contract import tree
from pfljax.contract.types import Array, ClientContext, ClientData, ClientOutput, Key, Metrics, Params
from pfljax.exchange.rounds import draw_cohort
from pfljax.local.problem import Problem


class Uploads(NamedTuple):
    """The server's knowledge of K clients; it never leaves the server.

    Attributes:
        last: (K,) int32, number of the round in which a client last uploaded, from 1; 0 for uploads before the first
            round, -1 for none.
        size: (K,) int32, n_k.
        affinity: (K, K), how much each client gained from each model.
    """

    last: Array
    size: Array
    affinity: Array

    @property
    def newest(self) -> Array:
        """(K,) bool: the clients that uploaded last."""
        return self.last == self.last.max()

    def noted(self, report: Metrics, number: Array) -> Uploads:
        """The record after round `number`, given the reports "index" (S, J), own model first, and "gains" (S, J)."""
        index, own = report["index"], report["index"][:, :1]
        # An index of K or more is not a client.
        affinity = jnp.asarray(self.affinity).at[own, index].add(report["gains"], mode="drop")
        return self._replace(last=jnp.asarray(self.last).at[own[:, 0]].set(number + 1), affinity=affinity)


def first_epoch(problem: Problem, key: Key, models: Params, clients: ClientData) -> tuple[Params, Array]:
    """All clients' models (K, ...) after one epoch, and `Uploads.last` for the first uploaders."""
    train_key, cohort_key = jax.random.split(key)
    once = problem.with_epochs(1)

    def client(models, _, data):
        number, own = data
        now = jnp.zeros((), jnp.int32)
        context = ClientContext(jax.random.fold_in(train_key, number), now, now, number[None], client=number)
        return ClientOutput((), tree.stack_one(once.alone(context, tree.first(models), own)), {})

    ids = jnp.arange(problem.num_clients, dtype=jnp.int32)
    trained = problem.plan.exchange(client, models, ids[:, None], (), (ids, clients), topology="own")[1].upload
    first = draw_cohort(cohort_key, problem.num_clients, problem.cohort_size).ids
    return trained, jnp.full(problem.num_clients, -1, jnp.int32).at[first].set(0)


def with_cluster_means(models: Params, uploads: Uploads, num: int) -> Params:
    """K models, then the means of `num` clusters and, if there are several clusters, the mean of those means.

    The affinities determine the clusters. A cluster's mean is over those of its clients that uploaded last, weighted by
    n_k; an empty cluster gets the mean of all models.
    """
    share = jax.nn.softmax(uploads.affinity, axis=1)
    label = spectral_clusters((share + share.T) / 2, num)
    member = label == jnp.arange(num)[:, None]
    last = jnp.where(member, uploads.last, -1).max(axis=1, keepdims=True)
    weight = (member & (uploads.last == last)) * uploads.size.astype(jnp.float32)
    weight = jnp.where(weight.sum(axis=1, keepdims=True) > 0, weight, 1.0)
    weight = weight / weight.sum(axis=1, keepdims=True)
    weight = weight if num == 1 else jnp.concatenate([weight, weight.mean(axis=0, keepdims=True)])
    return jax.tree.map(lambda leaf, mean: jnp.concatenate([leaf, mean]), models, tree.mix(weight, models))
