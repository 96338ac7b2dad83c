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
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import by_loss
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    Cohort,
    Key,
    Ledger,
    MethodReport,
    Metrics,
    Mixture,
    Params,
    Prediction,
    PyTree,
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method

LEAST_NOISE = 0.5  # the least estimate of gamma


class Server(NamedTuple):
    """What the server keeps beside the models.

    Attributes:
        label: (K,) int32, each client's cluster: the id of its first client.
        unit: () unit of eps1 and eps2 if they are relative; 0 before the first round.
    """

    label: Array
    unit: Array


@method(name="clustered", keeps="nothing", travels="its cluster's model, both ways")
@dataclasses.dataclass(frozen=True)
class ClusteredFL:
    """Clustered FL (Sattler et al., 2020): clusters of clients split where their updates disagree.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.ClusteredFL(eps1=0.4, eps2=0.6)
        ClusteredFL(eps1=0.4, eps2=0.6, relative=True, gamma=None, linkage='single', warmup=0)
    """

    eps1: float = hyperparameter(
        0.5,
        at_least=0,
        grid=(0.3, 0.4, 0.5, 0.6),
        help="a cluster may split while the norm of its mean update is below this",
    )
    eps2: float = hyperparameter(
        0.4,
        at_least=0,
        grid=(0.2, 0.3, 0.4, 0.6, 0.8),
        help="a cluster may split while the largest norm of its updates is above this",
    )
    relative: bool = hyperparameter(
        True, help="measure eps1 and eps2 in units of the first round's largest update norm"
    )
    gamma: float | None = hyperparameter(
        None,
        at_least=0,
        at_most=1,
        help="gamma_max, the clients' noise: a cluster splits if the largest cosine across its parts is below "
        "1 - 2 gamma^2; 0: always. Default: estimated",
    )
    linkage: Literal["single", "complete"] = hyperparameter(
        "single",
        help="similarity of two parts: the largest between their clients (single, the paper's) or the least",
    )
    warmup: int = hyperparameter(0, at_least=0, help="number of initial rounds without splits")

    def build(self, problem: Problem) -> Algorithm:
        num_clients = problem.num_clients
        solver = problem.solver

        # ---- The client.

        def download(context: ClientContext, row: PyTree, cohort: Cohort) -> Array:
            """The server has a model for each client; these are equal within a cluster."""
            return context.client[None]

        def client_update(
            context: ClientContext, models: Params, row: PyTree, data: ClientData
        ) -> ClientOutput:
            trained = problem.fit(context, models, data.train)
            # dtheta_k, and n_k: each model gets one update, so that none is weighted here.
            update = tree.subtract(trained.models, models)
            num_examples = jnp.float32(data.train.size)[None]
            return ClientOutput(
                row=(),
                upload=Upload(update, sums={"num_examples": num_examples}),
                report=ClientReport(trained.losses[0]),
                opt_state=trained.opt_state,
                sent=num_examples > 0,
            )

        # ---- The server.

        def start(key: Key, clients: ClientData) -> Start:
            model = problem.init_models(key, 1)
            server = Server(jnp.zeros((num_clients,), jnp.int32), jnp.zeros(()))
            return Start(server, tree.repeat(model, num_clients))

        def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
            label, unit = state.server.state
            updates = aggregate.upload.update
            num_examples = aggregate.upload.sums["num_examples"]
            params_updates, _ = solver.without_statistics(updates)
            products = problem.plan.gram(params_updates)

            # The first round's largest update norm is the unit.
            largest = jnp.sqrt(jnp.diagonal(products).max())
            unit = jnp.where(unit > 0, unit, largest)

            # Clusters split.
            def split() -> Array:
                unit_of_thresholds = unit if self.relative else 1.0
                return split_clusters(label, products, num_examples, self, unit_of_thresholds)

            may_split = state.round >= self.warmup
            label = jax.lax.cond(may_split, split, lambda: label).astype(jnp.int32)

            # theta_c <- theta_c + sum_{k in c} n_k dtheta_k / sum_{k in c} n_k
            def sum_in_cluster(rows: Array) -> Array:
                return jnp.zeros_like(rows).at[label].add(rows)[label]

            weighted = tree.scale(updates, num_examples)
            total = jnp.maximum(sum_in_cluster(num_examples), 1)
            mean = tree.scale(jax.tree.map(sum_in_cluster, weighted), 1 / total)
            models = tree.add(state.models, mean)

            metrics = {"clusters": (label == jnp.arange(num_clients)).sum()}
            return state.with_models(models).with_server(Server(label, unit)), metrics

        # ---- What a client predicts with.

        def select_models(context: ClientContext, row: PyTree, size: Array) -> Mixture:
            return Mixture(context.client[None], jnp.ones((1,)))

        def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
            """Newcomers take the cluster model with the least loss on their training data."""
            return by_loss.best_fit(problem, models, data)

        def collaboration(context: ClientContext, row: PyTree) -> Mapping[str, Array]:
            label = context.server.label[context.client]
            return {"index": label[None], "weights": jnp.ones((1,)), "cluster": label}

        return Algorithm(
            start=start,
            download=download,
            client_update=client_update,
            server_update=server_update,
            select_models=select_models,
            adapt=adapt,
            topology=Topology.SHARED,
            ledger=Ledger(gradients=1),
            report=MethodReport(
                scored="the model of each client's cluster",
                collaboration=collaboration,
                topology=Topology.PEERS,
            ),
        )


def split_clusters(
    label: Array,
    products: Array,
    num_examples: Array,
    hyperparameters: ClusteredFL,
    unit: Array | float = 1.0,
) -> Array:
    """(K,) cluster labels after this round's splits; a cluster's label is the id of its first client.

    Args:
        label: (K,) int32.
        products: (K, K) inner products of the clients' updates.
        num_examples: (K,) n_k; 0 for clients that sent nothing.
        hyperparameters: The thresholds.
        unit: Unit of eps1 and eps2.
    """
    norm = jnp.sqrt(jnp.diagonal(products))
    smallest = jnp.finfo(jnp.float32).tiny
    cosine = products / jnp.maximum(norm[:, None] * norm[None, :], smallest)

    def split_one(cluster: Array, new_label: Array) -> Array:
        # The clusters are those at the round's start.
        in_cluster = label == cluster
        member = in_cluster & (num_examples > 0)
        member_examples = jnp.where(member, num_examples, 0)

        # |sum_{k in c} n_k dtheta_k / sum_{k in c} n_k| < eps1 and max_{k in c} |dtheta_k| > eps2
        share = member_examples / jnp.maximum(member_examples.sum(), 1)
        mean_norm = jnp.sqrt(jnp.maximum(share @ products @ share, 0))
        largest_norm = jnp.where(member, norm, 0).max()
        is_stationary = mean_norm < hyperparameters.eps1 * unit
        clients_are_not = largest_norm > hyperparameters.eps2 * unit

        def divide(new_label: Array) -> Array:
            # The bipartition with the least cross-similarity alpha
            leaves = bipartition(cosine, member, hyperparameters.linkage)
            across = leaves[:, None] & (member & ~leaves)[None, :]
            alpha = jnp.where(across, cosine, -1).max()

            # Absent clients stay with the part that has more examples.
            leaving_examples = jnp.where(leaves, num_examples, 0).sum()
            is_smaller = 2 * leaving_examples <= member_examples.sum()
            leaves = jnp.where(is_smaller, leaves, member & ~leaves)
            stays = in_cluster & ~leaves

            # It becomes two clusters if gamma < sqrt((1 - alpha) / 2).
            gamma = (
                noise(cosine, member) if hyperparameters.gamma is None else hyperparameters.gamma
            )
            is_apart = jnp.sqrt((1 - alpha) / 2) > gamma
            divided = jnp.where(stays, jnp.argmax(stays), new_label)
            divided = jnp.where(leaves, jnp.argmax(leaves), divided)
            return jnp.where(is_apart, divided, new_label)

        may_split = is_stationary & clients_are_not & (member.sum() > 2)
        return jax.lax.cond(may_split, divide, lambda unchanged: unchanged, new_label)

    return jax.lax.fori_loop(0, label.shape[0], split_one, label)


def noise(cosine: Array, member: Array) -> Array:
    """() gamma of a cluster, estimated from the cosine between each member's update and the one most similar to it."""
    is_other = member[:, None] & member[None, :] & ~jnp.eye(len(member), dtype=bool)
    nearest = jnp.where(is_other, cosine, -1).max(axis=1)
    median = jnp.nanmedian(jnp.where(member, nearest, jnp.nan))
    squared = jnp.where(median > 0, 1 / median - 1, jnp.inf)
    return jnp.maximum(jnp.sqrt(squared), LEAST_NOISE)


def bipartition(similarity: Array, member: Array, linkage: str = "single") -> Array:
    """(K,) bool: which members leave for a new cluster; the first member stays.

    Agglomerative clustering: merges the two most similar parts until two are left.

    Args:
        similarity: (K, K), symmetric.
        member: (K,) bool, at least two of them true.
        linkage: Similarity of two parts: the largest between their members (single) or the least (complete).
    """
    num = member.shape[0]
    is_pair = member[:, None] & member[None, :] & ~jnp.eye(num, dtype=bool)
    alike = jnp.where(is_pair, similarity, -jnp.inf)
    linked = jnp.maximum if linkage == "single" else jnp.minimum

    def merge(carry: tuple[jax.Array, Array, Array]) -> tuple[jax.Array, Array, Array]:
        alike, part, num_parts = carry
        row, column = jnp.divmod(jnp.argmax(alike), num)
        first = jnp.minimum(row, column)
        second = jnp.maximum(row, column)

        # The first part gets the second one's clients, whose row and column are then empty.
        merged = linked(alike[first], alike[second])
        merged = merged.at[jnp.array([first, second])].set(-jnp.inf)
        alike = alike.at[first].set(merged).at[:, first].set(merged)
        alike = alike.at[second].set(-jnp.inf).at[:, second].set(-jnp.inf)
        return alike, jnp.where(part == second, first, part), num_parts - 1

    def is_unfinished(carry: tuple[jax.Array, Array, Array]) -> Array:
        _, _, num_parts = carry
        return num_parts > 2

    start = (alike, jnp.arange(num), member.sum())
    _, part, _ = jax.lax.while_loop(is_unfinished, merge, start)
    return member & (part != part[jnp.argmax(member)])
