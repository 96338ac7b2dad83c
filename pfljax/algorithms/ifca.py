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
paper, C is the true number of clusters; here it is 3 unless you set it, tune it, or use `tell_groups`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import aggregation, by_loss, gradients
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    ClientReport,
    First,
    Key,
    Ledger,
    MethodReport,
    Metrics,
    Params,
    Prediction,
    PyTree,
    Start,
    State,
    Topology,
    Upload,
)
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method

CLUSTERS_HELP = "C, number of models; 1 is FedAvg"
REPORT = MethodReport(scored="the model that fits each client's training data best")


@method(keeps="nothing", travels="C models down, the chosen one up")
@dataclasses.dataclass(frozen=True)
class IFCA:
    """IFCA (Ghosh et al., 2020): C models; each client trains the one that fits its data best.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.IFCA(clusters=4)
        IFCA(clusters=4, shared_layers=0, draws=1, averaging='models')
    """

    clusters: int = hyperparameter(
        3, at_least=1, grid=(2, 3, 4, 5), groups=True, help=CLUSTERS_HELP
    )
    shared_layers: int = hyperparameter(
        0, at_least=0, help="number of first layers that all clusters share"
    )
    draws: int = hyperparameter(
        1,
        at_least=1,
        help="number of starts drawn; the one that spreads clients most evenly is kept",
    )
    averaging: Literal["models", "gradients"] = hyperparameter(
        "models", help="what the server averages: trained models, or gradients (Option I)"
    )

    def build(self, problem: Problem) -> Algorithm:
        num_layers = len(problem.model.layers)
        if self.shared_layers > num_layers:
            accepted = f"accepted: 0 to {num_layers}, the number of layers"
            raise ArgumentError("shared_layers", accepted, self.shared_layers)
        if self.shared_layers and self.averaging == "gradients":
            text = "must be 0 with averaging=gradients"
            raise ArgumentError("shared_layers", text, self.shared_layers)
        if self.averaging == "gradients":
            return by_gradients(problem, num_clusters=self.clusters, draws=self.draws)
        return by_models(
            problem,
            num_clusters=self.clusters,
            num_shared=self.shared_layers,
            draws=self.draws,
        )


@method(keeps="nothing", travels="C models down, the chosen one up")
@dataclasses.dataclass(frozen=True)
class HypCluster:
    """HypCluster (Mansour et al., 2020): C models; each client trains the one that fits its data best.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.HypCluster(clusters=4)
        HypCluster(clusters=4)
    """

    clusters: int = hyperparameter(
        3, at_least=1, grid=(2, 3, 4, 5), groups=True, help=CLUSTERS_HELP
    )

    def build(self, problem: Problem) -> Algorithm:
        return by_models(problem, num_clusters=self.clusters, num_shared=0, draws=1)


# ---- The server averages models.


def by_models(problem: Problem, num_clusters: int, num_shared: int, draws: int) -> Algorithm:
    """C models, each the mean of its clients' trained copies.

    Args:
        problem: The problem of the method.
        num_clusters: C.
        num_shared: Number of first layers that all clusters share.
        draws: Number of starts, see `initial_models`.
    """

    # ---- The client.

    def client_update(
        context: ClientContext, models: Params, row: PyTree, data: ClientData
    ) -> ClientOutput:
        """The client receives all C models (C, ...)."""
        # j_k = argmin_j l_k(theta_j)
        chosen = by_loss.best_of(problem, models, data)

        # Train theta_{j_k} to theta', with an optimizer that follows the client to another model.
        received = tree.take(models, chosen[None])
        trained = problem.fit(context, received, data.train)
        update = tree.subtract(trained.models, received)

        # n_k for model j_k; 0 for the others, to which nothing is sent
        weight = jnp.where(jnp.arange(num_clusters) == chosen, data.train.size, 0)
        return ClientOutput(
            row=(),
            upload=Upload(
                update=tree.repeat(update, num_clusters),
                weight=weight.astype(jnp.float32),
            ),
            report=ClientReport(trained.losses[0]),
            opt_state=trained.opt_state,
        )

    # ---- The server.

    def start(key: Key, clients: ClientData) -> Start:
        models = initial_models(problem, key, clients, num_clusters, draws)
        # The shared layers are those of the first model.
        weight = jnp.eye(num_clusters)[0]
        return Start(models=with_mean_layers(problem, models, num_shared, weight))

    def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
        weight = aggregate.upload.weight  # (C,) sum_{k: j_k = j} n_k
        assert weight is not None

        # theta_j <- sum_{k: j_k = j} n_k theta'_k / sum n_k; a model that no client chose stays.
        models = aggregation.average(state.models, aggregate)

        # Shared layers become the mean over all clients, if some client sent something.
        with_shared = with_mean_layers(problem, models, num_shared, weight)
        models = tree.where(weight.sum() > 0, with_shared, models)
        return state.with_models(models), {"clusters_chosen": (weight > 0).sum()}

    return Algorithm(
        start=start,
        client_update=client_update,
        server_update=server_update,
        predict=predict_with_best_fit(problem),
        topology=Topology.SHARED,
        averages=True,
        ledger=Ledger(gradients=1, unaccounted=BY_LOSS),
        report=REPORT,
    )


def with_mean_layers(problem: Problem, models: Params, num_shared: int, weight: Array) -> Params:
    """Replaces the first `num_shared` layers of models (C, ...) by their mean, weighted by `weight` (C,)."""
    if not num_shared:
        return models
    num_others = len(problem.model.layers) - num_shared
    is_other = problem.model.mask(models, num_others)
    share = weight / jnp.maximum(weight.sum(), 1e-12)

    def replace(is_other: bool, leaf: Array) -> Array:
        if is_other:
            return leaf
        mean = jnp.tensordot(share, leaf, axes=1)
        return jnp.broadcast_to(mean, leaf.shape)

    return jax.tree.map(replace, is_other, models)


# ---- The server averages gradients (Option I).


def by_gradients(problem: Problem, num_clusters: int, draws: int) -> Algorithm:
    """C models that step along their clients' gradients, one step for each mini-batch of a round.

    Each step is an exchange, see `Algorithm.exchanges`.
    """

    # ---- The client.

    def first_row(key: Key, client: Array, start: Start) -> First:
        """A client's row is j_k, the model that it has chosen in this round."""
        return First(jnp.zeros((), jnp.int32))

    def client_update(
        context: ClientContext, models: Params, last_choice: Array, data: ClientData
    ) -> ClientOutput:
        """The client receives all C models (C, ...)."""

        def choose() -> Array:
            """j_k = argmin_j l_k(theta_j)."""
            return by_loss.best_of(problem, models, data)

        def keep_choice() -> Array:
            return last_choice

        # The choice is made in a round's first exchange.
        chosen = last_choice
        if not context.later:
            chosen = jax.lax.cond(context.step == 0, choose, keep_choice)

        # n_k g_k for model j_k, of a mini-batch at theta_{j_k}; 0 for the others
        received = tree.take(models, chosen[None])
        losses, gradient = gradients.batch_gradients(problem, context, received, data.train)
        is_chosen = jnp.arange(num_clusters) == chosen
        takes_step = gradients.takes_step(problem, context, data.train)
        copies = tree.repeat(gradient, num_clusters)
        weighted = tree.scale(copies, is_chosen * data.train.size)
        return ClientOutput(
            row=chosen,
            upload=Upload(weighted),
            report=ClientReport(losses[0], entries={"size": data.train.size}),
            sent=is_chosen & takes_step,
        )

    # ---- The server.

    def start(key: Key, clients: ClientData) -> Start:
        models = initial_models(problem, key, clients, num_clusters, draws)
        return Start(models=models, opt_state=gradients.init_optimizers(problem, models))

    def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
        # theta_j <- theta_j - eta sum_{k: j_k = j} n_k g_k / sum_{all k} n_k
        total_size = jnp.maximum(aggregate.report.entries["size"].sum(), 1)
        state = gradients.apply(
            problem,
            state,
            aggregate,
            sizes=jnp.broadcast_to(total_size, (num_clusters,)),
            topology=Topology.SHARED,
        )
        return state, {"clusters_chosen": (aggregate.num_sent > 0).sum()}

    return Algorithm(
        start=start,
        first_row=first_row,
        client_update=client_update,
        server_update=server_update,
        predict=predict_with_best_fit(problem),
        topology=Topology.SHARED,
        ledger=Ledger(gradients=1, unaccounted=BY_LOSS),
        exchanges=problem.solver.max_steps(problem.n_max),
        report=REPORT,
    )


# ---- Both: the models at first, and those that clients predict with.


def initial_models(
    problem: Problem, key: Key, clients: ClientData, num_clusters: int, draws: int
) -> Params:
    """C models: the start, out of several, under which clients spread most evenly over the models."""
    # The models of a start have different random parameters.
    different = problem._replace(common_init=False)
    if draws == 1:
        return different.init_models(key, num_clusters)

    def draw(key: Key) -> tuple[Params, Array]:
        """A start, and the entropy of the models' shares of all examples."""
        models = different.init_models(key, num_clusters)
        chosen = by_loss.losses_of_all(problem, models, clients.train).argmin(axis=1)
        total_size = jnp.maximum(clients.train.size.sum(), 1)
        sizes = clients.train.size @ jax.nn.one_hot(chosen, num_clusters)
        share = sizes / total_size
        return models, jax.scipy.special.entr(share).sum()

    def keep_better(number: Array, best: tuple[Params, Array]) -> tuple[Params, Array]:
        _, best_entropy = best
        # The first start's models have the numbers below C.
        new = draw(jax.random.fold_in(key, num_clusters + number))
        _, new_entropy = new
        return tree.where(new_entropy > best_entropy, new, best)

    models, _ = jax.lax.fori_loop(1, draws, keep_better, draw(key))
    return models


def predict_with_best_fit(
    problem: Problem,
) -> Callable[[ClientContext, Params, PyTree, ClientData], Prediction]:
    """`Algorithm.predict`: a client predicts with the model of least loss on its training data."""

    def predict(
        context: ClientContext, models: Params, row: PyTree, data: ClientData
    ) -> Prediction:
        return by_loss.best_fit(problem, models, data)

    return predict
