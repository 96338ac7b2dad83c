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
    First,
    Key,
    Ledger,
    Metrics,
    Params,
    Prediction,
    PyTree,
    Report,
    Start,
    State,
    Told,
    Topology,
    Upload,
)
from pfljax.local.privacy import BY_LOSS
from pfljax.local.problem import Problem
from pfljax.settings.method import knob, method

CLUSTERS = "C, number of models; 1 is FedAvg"
SCORED = Report(scored="the model that fits each client's training data best")


@method(keeps="nothing", travels="C models down, the chosen one up")
@dataclasses.dataclass(frozen=True)
class IFCA:
    """IFCA (Ghosh et al., 2020): C models; each client trains the one that fits its data best."""

    clusters: int = knob(3, at_least=1, grid=(2, 3, 4, 5), groups=True, help=CLUSTERS)
    shared_layers: int = knob(0, at_least=0, help="number of first layers that all clusters share")
    draws: int = knob(
        1,
        at_least=1,
        help="number of starts drawn; the one that spreads clients most evenly is kept",
    )
    averaging: Literal["models", "gradients"] = knob(
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
            return by_gradients(problem, self.clusters, self.draws)
        return by_models(problem, self.clusters, self.shared_layers, self.draws)


@method(keeps="nothing", travels="C models down, the chosen one up")
@dataclasses.dataclass(frozen=True)
class HypCluster:
    """HypCluster (Mansour et al., 2020): C models; each client trains the one that fits its data best."""

    clusters: int = knob(3, at_least=1, grid=(2, 3, 4, 5), groups=True, help=CLUSTERS)

    def build(self, problem: Problem) -> Algorithm:
        return by_models(problem, self.clusters)


def by_models(problem: Problem, num: int, num_shared: int = 0, draws: int = 1) -> Algorithm:
    """C = `num` models, each the mean of its clients' trained copies; the first layers may be shared."""

    def with_shared_layers(models: Params, weight: Array) -> Params:
        """Replaces shared layers by their mean over clusters, weighted by `weight` (C,); other layers stay."""
        if not num_shared:
            return models
        own_layers = problem.model.mask(models, len(problem.model.layers) - num_shared)
        share = weight / jnp.maximum(weight.sum(), 1e-12)

        def mean_unless(is_own: bool, leaf: Array) -> Array:
            if is_own:
                return leaf
            return jnp.broadcast_to(jnp.tensordot(share, leaf, axes=1), leaf.shape)

        return jax.tree.map(mean_unless, own_layers, models)

    # ---- The client.

    def client_update(
        context: ClientContext, models: Params, row: PyTree, data: ClientData
    ) -> ClientOutput:
        # j_k = argmin_j l_k(theta_j)
        chosen = by_loss.best_of(problem, models, data)
        # Train theta_{j_k} to theta'.
        received = tree.take(models, chosen[None])
        trained = problem.fit(context, received, data.train)
        update = tree.subtract(trained.models, received)
        weight = jnp.where(jnp.arange(num) == chosen, data.train.size, 0)
        return ClientOutput(
            row=(),
            upload=Upload(tree.repeat(update, num), weight.astype(jnp.float32)),
            told=Told(trained.losses[0]),
            opt_state=trained.opt_state,
        )

    # ---- The server.

    def start(key: Key, clients: ClientData) -> Start:
        models = initial_models(problem, key, clients, num, draws)
        return Start(models=with_shared_layers(models, jnp.eye(num)[0]))

    def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
        weight = aggregate.upload.weight
        assert weight is not None
        # theta_j <- sum_{k: j_k = j} n_k theta'_k / sum n_k
        models = aggregation.average(state.models, aggregate)
        # Shared layers become the mean over all clients, if some client sent something.
        shared = with_shared_layers(models, weight)
        models = tree.where(weight.sum() > 0, shared, models)
        return state.with_models(models), {"clusters_chosen": (weight > 0).sum()}

    return Algorithm(
        start=start,
        client_update=client_update,
        server_update=server_update,
        predict=predict_with_best_fit(problem),
        topology=Topology.SHARED,
        averages=True,
        ledger=Ledger(gradients=1, unaccounted=BY_LOSS),
        report=SCORED,
    )


def by_gradients(problem: Problem, num: int, draws: int) -> Algorithm:
    """C = `num` models that step along their clients' gradients (Option I)."""

    # ---- The client.

    def first_row(key: Key, client: Array, start: Start) -> First:
        """j_k. A client's row is the model that it has chosen in this round."""
        return First(jnp.zeros((), jnp.int32))

    def client_update(
        context: ClientContext, models: Params, chosen: Array, data: ClientData
    ) -> ClientOutput:
        def choose() -> Array:
            """j_k = argmin_j l_k(theta_j)."""
            return by_loss.best_of(problem, models, data)

        if not context.later:
            chosen = jax.lax.cond(context.step == 0, choose, lambda: chosen)

        # n_k g_k, of a mini-batch at theta_{j_k}
        received = tree.take(models, chosen[None])
        losses, gradient = gradients.of_batch(problem, context, received, data.train)
        is_chosen = jnp.arange(num) == chosen
        takes_step = gradients.takes_step(problem, context, data.train)
        gradient = tree.scale(tree.repeat(gradient, num), is_chosen * data.train.size)
        return ClientOutput(
            row=chosen,
            upload=Upload(gradient),
            told=Told(losses[0], entries={"size": data.train.size}),
            sent=is_chosen & takes_step,
        )

    # ---- The server.

    def start(key: Key, clients: ClientData) -> Start:
        models = initial_models(problem, key, clients, num, draws)
        return Start(models=models, opt_state=gradients.init_optimizers(problem, models))

    def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
        # theta_j <- theta_j - eta sum_{k: j_k = j} n_k g_k / sum_{all k} n_k
        total_size = jnp.maximum(aggregate.told.entries["size"].sum(), 1)
        sizes = jnp.broadcast_to(total_size, (num,))
        state = gradients.apply(problem, state, aggregate, sizes, Topology.SHARED)
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
        report=SCORED,
    )


def initial_models(problem: Problem, key: Key, clients: ClientData, num: int, draws: int) -> Params:
    """C models: the draw, out of several, over which the clients' choices spread most evenly."""
    different = problem._replace(common_init=False)
    if draws == 1:
        return different.init_models(key, num)

    def draw(key: Key) -> tuple[Params, Array]:
        """A start, and the entropy of the models' shares of all examples."""
        models = different.init_models(key, num)
        chosen = by_loss.losses_of_all(problem, models, clients.train).argmin(axis=1)
        total_size = jnp.maximum(clients.train.size.sum(), 1)
        share = clients.train.size @ jax.nn.one_hot(chosen, num) / total_size
        return models, jax.scipy.special.entr(share).sum()

    def keep_better(number: Array, best: tuple[Params, Array]) -> tuple[Params, Array]:
        _, best_entropy = best
        new = draw(jax.random.fold_in(key, num + number))
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
