"""Clients that mix the models that do well on their validation data, for both forms of FedFomo.

Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized federated learning with first order model optimization" (ICLR 2021).
A round of client i, which holds start_i, the model its last model was trained from, and a row p_i of affinities:

    receives its own last model and M others                                            (`choose`, Section 3.1)
    w_n <- a weight for each of them, on its validation data                            (`Form.weigh`, Eq. 3 or 14)
    w*_n <- max(w_n, 0) / sum_n max(w_n, 0)                                             (`normalize`, Eq. 13)
    start_i <- start_i + sum_n w*_n (theta_n - start_i);  p_i <- p_i + w                (`moved`, Eq. 5)
    theta_i <- local training from start_i; uploaded.

Further behavior of the authors' code is optional: it scales w in p_i (`scaled`), downloads from the last uploaders
(`Form.uploaded`), and adds means of clusters to the candidates (`Form.clusters`). For both, the server keeps a record
of the clients' uploads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import neighbors
from pfljax.algorithms.common.by_loss import losses_of
from pfljax.algorithms.common.clusters import spectral_clusters
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    Cohort,
    First,
    Key,
    Ledger,
    Metrics,
    Mixture,
    Params,
    Prediction,
    PyTree,
    Report,
    Split,
    Start,
    State,
    Told,
    Topology,
    Traffic,
    Upload,
)
from pfljax.exchange.rounds import draw_cohort
from pfljax.local.problem import Problem
from pfljax.settings.method import knob

LARGEST_AFFINITY = 1000  # largest number of clients for which the K x K affinities are reported


@dataclasses.dataclass(frozen=True)
class Knobs:
    """Knobs of both forms."""

    neighbors: int = knob(
        4,
        at_least=0,
        grid=(4, 9),
        help="M, number of other clients' models downloaded per round; the paper's n is M + 1, with the client's own",
    )
    epsilon: float = knob(
        0.3,
        at_least=0,
        at_most=1,
        grid=(0.0, 0.1, 0.3, 0.5),
        help="probability, in the first round, of downloading a random model instead of the best",
    )
    decay: float = knob(0.05, at_least=0, help="decrease of epsilon per round, down to 0")
    scaled: bool = knob(
        False, help="increase affinities by w / |sum of w|, as in the authors' code, instead of w"
    )


class Row(NamedTuple):
    """What client i keeps.

    Attributes:
        start: start_i.
        affinity: (K,) p_i.
        index: (M + 1,) int32, whose models it mixed last.
        weights: (M + 1,) w*_n of these.
    """

    start: Params
    affinity: Array
    index: Array
    weights: Array


class Weighed(NamedTuple):
    """What a client can mix, and how well it does.

    Attributes:
        index: (J,) int32, whose models they are, the client's own first; K or more: a mean of models.
        models: Leaves (J, ...).
        weights: (J,) w_n of Eq. 3 or 14.
        start: The model that the client moves from.
    """

    index: Array
    models: Params
    weights: Array
    start: Params


class Mixed(NamedTuple):
    """The mixture that a client trains from.

    Attributes:
        start: start_i.
        index: (J,) int32, whose models it mixes, its own first.
        weights: (J,) w*_n of Eq. 13.
        gains: (J,) w_n of Eq. 3 or 14.
    """

    start: Params
    index: Array
    weights: Array
    gains: Array


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

    def after_round(self, number: Array, index: Array, gains: Array) -> Uploads:
        """The record after round `number`, in which clients gained `gains` (S, J) from models `index` (S, J)."""
        own = index[:, :1]
        # An index of K or more is no client.
        affinity = jnp.asarray(self.affinity).at[own, index].add(gains, mode="drop")
        last = jnp.asarray(self.last).at[own[:, 0]].set(number + 1)
        return self._replace(last=last, affinity=affinity)


def unchanged_models(models: Params, server: PyTree) -> Params:
    """`Form.stack` where only the clients' own models can be downloaded."""
    return models


def unchanged_index(index: Array) -> Array:
    """`Form.served` where only the clients' own models can be downloaded."""
    return index


class Form(NamedTuple):
    """What a form of FedFomo downloads, and how it computes the weights.

    Attributes:
        topology: Topology of the stack of models.
        weigh: (received models, start, validation data, index) -> Weighed.
        stack: (K models, the server's state) -> models that can be downloaded, the K models first.
        served: ids (M + 1,), the client's own first -> indices to download for them.
        norm: Norm of the distances for newcomers.
        clusters: Number of clusters whose means can be downloaded in addition to clients' models.
        uploaded: Whether the last uploaders' models can be downloaded instead of the cohort's; before the first round
            all clients train for an epoch, and a cohort uploads.
        traffic: As in `Algorithm`.
    """

    topology: Topology
    weigh: Callable[[Params, Params, Split, Array], Weighed]
    stack: Callable[[Params, PyTree], Params] = unchanged_models
    served: Callable[[Array], Array] = unchanged_index
    norm: str = "l2"
    clusters: int = 0
    uploaded: bool = False
    traffic: Callable[[Traffic], Traffic] | None = None

    @property
    def remembers(self) -> bool:
        """Whether the server keeps a record of `Uploads`."""
        return bool(self.clusters or self.uploaded)


def rounds(problem: Problem, knobs: Knobs, form: Form) -> Algorithm:
    """An algorithm whose clients mix models with a `Form`'s weights."""
    num_clients = problem.num_clients
    num_others = min(knobs.neighbors, problem.cohort_size - 1)
    num_mixed = num_others + 1
    if form.remembers:
        form = on_server(problem, form, num_others)
    between_clients = form.topology is Topology.PEERS

    # ---- The client.

    def first_row(key: Key, client: Array, start: Start) -> First:
        model = problem.init_model(key, client)
        row = Row(
            start=model,
            affinity=jax.nn.one_hot(client, num_clients),
            index=jnp.zeros(num_mixed, jnp.int32),
            weights=jnp.zeros(num_mixed),
        )
        return First(row, model if between_clients else ())

    def download(context: ClientContext, row: Row, cohort: Cohort) -> Array:
        """Its own model and M others, the highest in p_i or random ones (Section 3.1)."""
        epsilon = jnp.maximum(knobs.epsilon - knobs.decay * context.round, 0)
        if form.uploaded:
            is_eligible = context.server.newest
        else:
            is_eligible = jnp.zeros(num_clients, bool).at[cohort.ids].set(True)
        ids = choose(context, row.affinity, is_eligible, num_others, epsilon)
        return form.served(ids)

    def client_update(
        context: ClientContext, models: Params, row: Row, data: ClientData
    ) -> ClientOutput:
        # start_i <- start_i + sum_n w*_n (theta_n - start_i).
        mixed = personalize(form, context.index, models, row.start, data.validation)

        # theta_i <- local training from start_i.
        trained = problem.fit(context, tree.stack_one(mixed.start), data.train)

        # p_i <- p_i + w, with negative w, too.
        gains = mixed.gains
        if knobs.scaled:
            gains = gains / jnp.maximum(jnp.abs(gains.sum()), 1e-9)
        # An index of K or more is no client.
        affinity = jnp.asarray(row.affinity).at[mixed.index].add(gains, mode="drop")

        entries = {"stays": mixed.weights.sum() == 0}
        if form.remembers:
            entries |= {"index": mixed.index, "gains": gains}
        return ClientOutput(
            row=Row(
                start=mixed.start,
                affinity=affinity,
                index=mixed.index[:num_mixed],
                weights=mixed.weights[:num_mixed],
            ),
            upload=Upload(trained.models),
            told=Told(trained.losses[0], entries=entries),
            opt_state=trained.opt_state,
        )

    # ---- The server, or what stores the clients' models.

    def start(key: Key, clients: ClientData) -> Start:
        if not clients.validation.y.shape[1]:
            text = "FedFomo needs validation examples; accepted: above 0"
            raise ArgumentError("validation_fraction", text, 0)
        if between_clients:
            return Start()
        models = problem.init_models(key, num_clients)
        last = jnp.zeros(num_clients, jnp.int32)
        if form.uploaded:
            models, last = first_epoch(problem, key, models, clients)
        server = ()
        if form.remembers:
            server = Uploads(last, clients.train.size, affinity=jnp.eye(num_clients))
        return Start(server, form.stack(models, server))

    def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
        # A model that was uploaded replaces the last one of its client.
        told = aggregate.told.entries
        is_new = aggregate.num_sent > 0
        models = tree.where(is_new, aggregate.upload.update, state.models)
        if form.remembers:
            uploads = state.server.state
            state = state.with_server(
                uploads.after_round(state.round, told["index"], told["gains"])
            )
        if not between_clients:
            models = form.stack(leading(models, num_clients), state.server.state)
        return state.with_models(models), {"kept_previous_model": told["stays"].mean()}

    # ---- What a client predicts with.

    def whom(context: ClientContext, row: Row, size: Array) -> Mixture:
        """What the client would download next from all clients' newest models, without exploring."""
        everyone = jnp.ones(num_clients, bool)
        index = form.served(choose(context, row.affinity, everyone, num_others, epsilon=0.0))
        is_own = jnp.zeros(index.shape).at[0].set(1.0)
        return Mixture(index, is_own)

    def predict(context: ClientContext, models: Params, row: Row, data: ClientData) -> Prediction:
        """The start_i with which the next round would begin."""
        mixed = personalize(form, context.index, models, row.start, data.validation)
        return Prediction.one(mixed.start)

    def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
        return newcomer(problem, leading(models, num_clients), data, form.norm)

    return Algorithm(
        topology=form.topology,
        start=start,
        first_row=first_row,
        download=download,
        client_update=client_update,
        server_update=server_update,
        whom=whom,
        predict=predict,
        adapt=adapt,
        ledger=Ledger(
            gradients=1,
            unaccounted="the validation examples, which determine the mixtures that are sent",
        ),
        report=Report(
            scored="each client's mixture of the newest models, before training",
            collaboration=collaboration,
            topology=Topology.PEERS,
        ),
        via_server=True,
        sends="models",
        traffic=form.traffic,
    )


# ---- A client's mixture.


def choose(
    context: ClientContext,
    affinity: Array,
    is_eligible: Array,
    num_others: int,
    epsilon: Array | float,
) -> Array:
    """(M + 1,) int32: the client, then those with the highest affinity (K,) among the eligible (K,)."""
    is_other = jnp.arange(len(affinity)) != context.client
    scores = jnp.where(is_eligible & is_other, affinity, -jnp.inf)
    others, _ = neighbors.best_candidates(context.key, scores, num_others, epsilon)
    return jnp.concatenate([context.client[None], others.astype(jnp.int32)])


def personalize(form: Form, index: Array, models: Params, start: Params, split: Split) -> Mixed:
    """A client's mixture of its start and the received models, by their weights on its validation examples."""
    # w_n (Eq. 3 or 14); without examples, all weight is on the client's own model.
    weighed = form.weigh(models, start, split, index)
    own_only = jnp.zeros_like(weighed.weights).at[0].set(1.0)
    gains = jnp.where(split.size > 0, weighed.weights, own_only)

    weights = normalize(gains)  # Eq. 13
    start = moved(weighed.start, weighed.models, weights)  # Eq. 5
    return Mixed(start, weighed.index, weights, gains)


def first_order_weights(losses: Array, baseline: Array, distance: Array) -> Array:
    """Eq. 3, (L_i(start) - L_i(theta_n)) / |theta_n - start|; 0 for the start itself, at distance 0."""
    is_apart = distance > 0
    return jnp.where(is_apart, (baseline - losses) / jnp.where(is_apart, distance, 1), 0.0)


def normalize(weights: Array) -> Array:
    """Eq. 13: clips negative weights to 0 and normalizes the others to sum to 1; all zero if none is positive."""
    positive = jnp.maximum(weights, 0)
    total = positive.sum(axis=-1, keepdims=True)
    return positive / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)


def moved(start: Params, models: Params, weights: Array) -> Params:
    """Eq. 5: start + sum_n w*_n (theta_n - start)."""
    mixed = tree.mix(weights, models)
    return jax.tree.map(lambda origin, leaf: origin * (1 - weights.sum()) + leaf, start, mixed)


def distances(models: Params, start: Params, norm: str) -> Array:
    """(J,) |theta_n - start| over all parameters; 0 if they are equal up to rounding."""

    def length(stack: Params) -> Array:
        rows = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(stack)]
        if norm == "l1":
            return sum((jnp.abs(leaf).sum(axis=1) for leaf in rows), jnp.zeros(()))
        return jnp.sqrt(sum((jnp.square(leaf).sum(axis=1) for leaf in rows), jnp.zeros(())))

    distance = length(jax.tree.map(lambda leaf, origin: leaf - origin, models, start))
    is_apart = distance > 1e-6 * length(tree.stack_one(start))
    return jnp.where(is_apart, distance, 0.0)


def newcomer(problem: Problem, models: Params, data: ClientData, norm: str) -> Prediction:
    """One step of Eq. 3 and 5 over all K models, from their mean."""
    solver = problem.solver
    start = jax.tree.map(lambda leaf: leaf.mean(axis=0), models)
    split = data.validation if data.validation.y.shape[0] else data.train
    losses = losses_of(problem, models, split)
    baseline = solver.total_loss(start, split) / jnp.maximum(split.size, 1)
    params, _ = solver.without_statistics(models)
    start_params, _ = solver.without_statistics(start)
    distance = distances(params, start_params, norm)
    weights = normalize(first_order_weights(losses, baseline, distance))
    return Prediction.one(moved(start, models, weights))


def collaboration(context: ClientContext, row: Row) -> dict[str, Array]:
    """Whose models a client mixed, and its affinities unless there are too many clients."""
    used = {"index": row.index, "weights": row.weights}
    if row.affinity.shape[0] <= LARGEST_AFFINITY:
        used["affinity"] = row.affinity
    return used


def leading(models: Params, num: int) -> Params:
    """The first `num` models of a stack."""
    return jax.tree.map(lambda leaf: leaf[:num], models)


# ---- Options of the authors' code, which need a server that keeps a record of uploads.


def on_server(problem: Problem, form: Form, num_others: int) -> Form:
    """The form for `clusters` and `uploaded`: all models are on the server, followed by the means.

    The engine counts a client's own model as a download; this corrects the traffic.

    Raises:
        ArgumentError: for more clusters than clients, and for private training, whose ledger omits the first epoch.
    """
    num_clients = problem.num_clients
    # Of several clusters, the mean of their means is a candidate, too.
    num_means = form.clusters + 1 if form.clusters > 1 else form.clusters
    if form.clusters > num_clients:
        text = f"accepted: 0 to {num_clients}, the number of clients"
        raise ArgumentError("clusters", text, form.clusters)
    if form.uploaded and problem.solver.privacy.active:
        text = "the privacy ledger omits its first epoch; accepted with privacy: cohort"
        raise ArgumentError("available", text, "uploaded")

    def stack(models: Params, uploads: Uploads) -> Params:
        return with_cluster_means(models, uploads, form.clusters) if num_means else models

    def served(ids: Array) -> Array:
        means = num_clients + jnp.arange(num_means, dtype=jnp.int32)
        return jnp.concatenate([ids, means])

    def traffic(counted: Traffic) -> Traffic:
        num_downloads = num_others + num_means
        return counted._replace(model=counted.model * num_downloads / (num_downloads + 1))

    return form._replace(topology=Topology.SHARED, stack=stack, served=served, traffic=traffic)


def first_epoch(
    problem: Problem, key: Key, models: Params, clients: ClientData
) -> tuple[Params, Array]:
    """All clients' models (K, ...) after one epoch, and `Uploads.last` for the first uploaders."""
    num_clients = problem.num_clients
    train_key, cohort_key = jax.random.split(key)
    one_epoch = problem.with_epochs(1)

    def train(models: Params, row: PyTree, data: tuple[Array, ClientData]) -> ClientOutput:
        client, client_data = data
        zero = jnp.zeros((), jnp.int32)
        context = ClientContext(
            key=jax.random.fold_in(train_key, client),
            round=zero,
            step=zero,
            index=client[None],
            client=client,
        )
        trained = one_epoch.train_newcomer(context, client_data, start=tree.first(models), rounds=1)
        return ClientOutput((), Upload(tree.stack_one(trained)), Told(jnp.zeros(())))

    ids = jnp.arange(num_clients, dtype=jnp.int32)
    _, aggregate = problem.plan.exchange(
        train, models, ids[:, None], (), (ids, clients), topology=Topology.OWN
    )
    uploaders = draw_cohort(cohort_key, num_clients, problem.cohort_size).ids
    last = jnp.full(num_clients, -1, jnp.int32).at[uploaders].set(0)
    return aggregate.upload.update, last


def with_cluster_means(models: Params, uploads: Uploads, num: int) -> Params:
    """K models, then the means of `num` clusters and, if there are several clusters, the mean of those means.

    The affinities determine the clusters, which are spectral. A cluster's mean is over those of its clients that
    uploaded last, weighted by n_k; an empty cluster gets the mean of all models.
    """
    share = jax.nn.softmax(uploads.affinity, axis=1)
    label = spectral_clusters((share + share.T) / 2, num)
    is_member = label == jnp.arange(num)[:, None]

    # (num, K) n_k of the members that uploaded last; 1 for all clients if a cluster is empty.
    newest = jnp.where(is_member, uploads.last, -1).max(axis=1, keepdims=True)
    counts = is_member & (uploads.last == newest)
    weight = counts * jnp.asarray(uploads.size).astype(jnp.float32)
    weight = jnp.where(weight.sum(axis=1, keepdims=True) > 0, weight, 1.0)

    weight = weight / weight.sum(axis=1, keepdims=True)
    if num > 1:
        weight = jnp.concatenate([weight, weight.mean(axis=0, keepdims=True)])
    means = tree.mix(weight, models)
    return jax.tree.map(lambda leaf, mean: jnp.concatenate([leaf, mean]), models, means)
