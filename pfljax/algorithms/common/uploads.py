"""A server's record of clients' uploads, and means of models over clusters of clients.

FedFomo's code (Zhang et al., 2021) uses such means. Its clusters come from scikit-learn's SpectralClustering, with
labels by the rotation of Yu and Shi, "Multiclass spectral clustering" (ICCV 2003).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import Array, ClientContext, ClientData, ClientOutput, Key, Metrics, Params
from pfljax.exchange.rounds import draw_cohort
from pfljax.local.problem import Problem

ROTATIONS = 20  # alternations between labels and rotation; a few are enough


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


def spectral_clusters(affinity: Array, num: int) -> Array:
    """(K,) labels below `num`, from symmetric, positive affinities (K, K); the diagonal does not count.

    Normalized cuts: takes the eigenvectors of D^-1/2 A D^-1/2 with the largest eigenvalues, normalizes their rows, and
    rotates them as close to cluster indicators as possible. Computes all eigenvectors, O(K^3) per round.
    """
    affinity = affinity * (1 - jnp.eye(len(affinity)))
    scale = 1 / jnp.sqrt(jnp.maximum(affinity.sum(axis=1), 1e-12))
    _, vectors = jnp.linalg.eigh(affinity * scale[:, None] * scale[None, :])
    rows = vectors[:, -num:]
    rows = rows / jnp.maximum(jnp.linalg.norm(rows, axis=1, keepdims=True), 1e-12)

    def add_axis(number, carry):
        axes, near = carry
        near = near + jnp.abs(rows @ axes[number - 1])
        return axes.at[number].set(rows[jnp.argmin(near)]), near

    def turn(_, axes):
        chosen = jax.nn.one_hot(jnp.argmax(rows @ axes.T, axis=1), num)
        left, _, right = jnp.linalg.svd(chosen.T @ rows)
        return left @ right

    start: Any = (jnp.zeros((num, num)).at[0].set(rows[0]), jnp.zeros(len(rows)))
    axes, _ = jax.lax.fori_loop(1, num, add_axis, start)
    axes = jax.lax.fori_loop(0, ROTATIONS, turn, axes)
    return jnp.argmax(rows @ axes.T, axis=1)
