"""Clients that mix the models that do well on their validation data, for both forms of FedFomo.

Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized federated learning with first order model optimization" (ICLR 2021).
A round of client i, which holds start_i, the model its last model was trained from, and a row p_i of affinities:

    receives its own last model and M others                                            (`choose`, Section 3.1)
    w_n <- a weight for each of them, on its validation data                            (`Form.weigh`, Eq. 3 or 14)
    w*_n <- max(w_n, 0) / sum_n max(w_n, 0)                                             (`normalize`, Eq. 13)
    start_i <- start_i + sum_n w*_n (theta_n - start_i)                                 (`moved`, Eq. 5)
    theta_i <- local training from start_i; uploaded                                    (`client_update`)
    p_i <- p_i + w                                                                      (`client_update`, Section 3.1)

Where both occur in the code, w_n is a gain and w*_n a weight. `rounds` builds the algorithm.

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
    ClientReport,
    Cohort,
    First,
    Key,
    Ledger,
    MethodReport,
    Metrics,
    Mixture,
    Params,
    Prediction,
    PyTree,
    Split,
    Start,
    State,
    Topology,
    Traffic,
    Upload,
)
from pfljax.exchange.rounds import draw_cohort
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter

LARGEST_AFFINITY = 1000  # largest number of clients for which the K x K affinities are reported


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of both forms."""

    neighbors: int = hyperparameter(
        4,
        at_least=0,
        grid=(4, 9),
        help="M, number of other clients' models downloaded per round; the paper's n is M + 1, with the client's own",
    )
    epsilon: float = hyperparameter(
        0.3,
        at_least=0,
        at_most=1,
        grid=(0.0, 0.1, 0.3, 0.5),
        help="probability, in the first round, of downloading a random model instead of the best",
    )
    epsilon_decay: float = hyperparameter(
        0.05, at_least=0, help="decrease of epsilon per round, down to 0", former="decay"
    )
    scaled: bool = hyperparameter(
        False, help="increase affinities by w / |sum of w|, as in the authors' code, instead of w"
    )


class Row(NamedTuple):
    """What client i keeps, besides theta_i, its last trained model, which others download.

    Attributes:
        start: start_i, a whole model.
        affinity: (K,) p_i.
        index: (M + 1,) int32, whose models it mixed last, for collaboration figures.
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
        models: theta_n, leaves (J, ...).
        weights: (J,) w_n of Eq. 3 or 14, the gains of `Mixed`.
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
        # Clients' own models come first.
        clients = index[:, :1]
        # p_i <- p_i + w; an index of K or more is no client.
        affinity = jnp.asarray(self.affinity).at[clients, index].add(gains, mode="drop")
        last = jnp.asarray(self.last).at[clients[:, 0]].set(number + 1)
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
        topology: Topology of the stack of models: "peers" if clients' own models are all that can be downloaded,
            otherwise "shared".
        weigh: (received models (J, ...), start_i, validation data, whose models (J,)) -> Weighed.
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


def rounds(problem: Problem, hyperparameters: Hyperparameters, form: Form) -> Algorithm:
    """An algorithm whose clients mix models with a `Form`'s weights."""
    num_clients = problem.num_clients
    num_others = min(hyperparameters.neighbors, problem.cohort_size - 1)
    num_mixed = num_others + 1
    if form.remembers:
        form = extend_form(problem, form, num_others)
    between_clients = form.topology is Topology.PEERS

    # ---- The client.

    def first_row(key: Key, client: Array, start: Start) -> First:
        """theta_i and start_i are the initial model; p_i is a row of the identity."""
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
        # epsilon falls by `epsilon_decay` per round.
        epsilon = jnp.maximum(
            hyperparameters.epsilon - hyperparameters.epsilon_decay * context.round, 0
        )
        # The last uploaders' models are available, or the active clients'.
        if form.uploaded:
            is_eligible = context.server.newest
        else:
            is_eligible = jnp.zeros(num_clients, bool).at[cohort.ids].set(True)
        ids = choose(context, row.affinity, is_eligible, num_others, epsilon)
        return form.served(ids)

    def client_update(
        context: ClientContext, models: Params, row: Row, data: ClientData
    ) -> ClientOutput:
        # w_n, w*_n, and start_i <- start_i + sum_n w*_n (theta_n - start_i).
        mixed = personalize(form, context.index, models, row.start, data.validation)

        # theta_i <- local training from start_i.
        trained = problem.fit(context, tree.stack_one(mixed.start), data.train)

        # p_i <- p_i + w, with negative w, too; in the authors' code, p_i + w / |sum of w|.
        gains = mixed.gains
        if hyperparameters.scaled:
            gains = gains / jnp.maximum(jnp.abs(gains.sum()), 1e-9)
        # An index of K or more is no client.
        affinity = jnp.asarray(row.affinity).at[mixed.index].add(gains, mode="drop")

        # If no w_n is positive, start_i stays.
        entries = {"stays": mixed.weights.sum() == 0}
        if form.remembers:
            entries["index"] = mixed.index
            entries["gains"] = gains
        # theta_i is uploaded: one contribution, to the first model received, the client's own.
        return ClientOutput(
            row=Row(
                start=mixed.start,
                affinity=affinity,
                index=mixed.index[:num_mixed],
                weights=mixed.weights[:num_mixed],
            ),
            upload=Upload(update=trained.models),
            report=ClientReport(loss=trained.losses[0], entries=entries),
            opt_state=trained.opt_state,
        )

    # ---- The server, or what stores the clients' models.

    def start(key: Key, clients: ClientData) -> Start:
        if not clients.validation.y.shape[1]:
            text = "FedFomo needs validation examples; accepted: above 0"
            raise ArgumentError("validation_fraction", text, 0)
        if between_clients:
            return Start()

        # theta_i of all clients; with `uploaded`, after an epoch.
        models = problem.init_models(key, num_clients)
        last = jnp.zeros(num_clients, jnp.int32)
        if form.uploaded:
            models, last = train_first_epoch(problem, key, models, clients)

        # P, of which the clients hold the rows, too.
        server = ()
        if form.remembers:
            affinity = jnp.eye(num_clients)
            server = Uploads(last=last, size=clients.train.size, affinity=affinity)
        return Start(state=server, models=form.stack(models, server))

    def server_update(key: Key, state: State, aggregate: Aggregate) -> tuple[State, Metrics]:
        # A model that was uploaded replaces the last one of its client.
        entries = aggregate.report.entries
        is_new = aggregate.num_sent > 0
        models = tree.where(is_new, aggregate.upload.update, state.models)

        # The server's record: who uploaded last, and P.
        if form.remembers:
            uploads: Uploads = state.server.state
            uploads = uploads.after_round(state.round, entries["index"], entries["gains"])
            state = state.with_server(uploads)

        # Means of the new models replace those that followed the clients' models.
        if not between_clients:
            models = form.stack(client_models(models, num_clients), state.server.state)
        return state.with_models(models), {"kept_previous_model": entries["stays"].mean()}

    # ---- What a client predicts with.

    def select_models(context: ClientContext, row: Row, size: Array) -> Mixture:
        """What the client would download next from all clients' newest models, without exploring."""
        everyone = jnp.ones(num_clients, bool)
        ids = choose(context, row.affinity, everyone, num_others, epsilon=0.0)
        index = form.served(ids)
        # `predict` computes the weights; here, the client's own model has all.
        own_only = jnp.zeros(index.shape).at[0].set(1.0)
        return Mixture(index=index, weights=own_only)

    def predict(context: ClientContext, models: Params, row: Row, data: ClientData) -> Prediction:
        """The start_i with which the next round would begin."""
        mixed = personalize(form, context.index, models, row.start, data.validation)
        return Prediction.single(mixed.start)

    def adapt(context: ClientContext, models: Params, data: ClientData) -> Prediction:
        """Newcomers take one step of Eq. 3 and 5."""
        models = client_models(models, num_clients)
        return adapt_newcomer(problem, models, data, form.norm)

    return Algorithm(
        topology=form.topology,
        start=start,
        first_row=first_row,
        download=download,
        client_update=client_update,
        server_update=server_update,
        select_models=select_models,
        predict=predict,
        adapt=adapt,
        ledger=Ledger(
            gradients=1,
            unaccounted="the validation examples, which determine the mixtures that are sent",
        ),
        report=MethodReport(
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
    """(M + 1,) int32: the client, then M with the highest affinity (K,) among the eligible (K,).

    Each of the M is a random eligible one with probability epsilon; the context's key draws them, and breaks ties.
    """
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

    # w*_n (Eq. 13)
    weights = normalize(gains)
    # start_i <- start_i + sum_n w*_n (theta_n - start_i)  (Eq. 5)
    start = moved(weighed.start, weighed.models, weights)
    return Mixed(start=start, index=weighed.index, weights=weights, gains=gains)


def first_order_weights(losses: Array, baseline: Array, distance: Array) -> Array:
    """Eq. 3, (J,): (L_i(start) - L_i(theta_n)) / |theta_n - start|; 0 for the start itself, at distance 0.

    Args:
        losses: (J,) L_i(theta_n).
        baseline: () L_i(start).
        distance: (J,) |theta_n - start|.
    """
    differs = distance > 0
    decrease = baseline - losses
    divisor = jnp.where(differs, distance, 1)
    return jnp.where(differs, decrease / divisor, 0.0)


def normalize(weights: Array) -> Array:
    """Eq. 13: clips negative weights to 0 and normalizes the others to sum to 1; all zero if none is positive."""
    positive = jnp.maximum(weights, 0)
    total = positive.sum(axis=-1, keepdims=True)
    return positive / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)


def moved(start: Params, models: Params, weights: Array) -> Params:
    """Eq. 5: start + sum_n w*_n (theta_n - start), which is (1 - sum_n w*_n) start + sum_n w*_n theta_n."""
    mixture = tree.mix(weights, models)

    def move(start: Array, mixture: Array) -> Array:
        return start * (1 - weights.sum()) + mixture

    return jax.tree.map(move, start, mixture)


def distances(problem: Problem, models: Params, start: Params, norm: str) -> Array:
    """(J,) |theta_n - start| over all parameters, without batch statistics; 0 if they are equal up to rounding."""
    params, _ = problem.solver.without_statistics(models)
    start_params, _ = problem.solver.without_statistics(start)

    def norms(stack: Params) -> Array:
        """(J,) norms of J stacked trees of parameters, L2 or L1."""
        total = jnp.zeros(())
        for leaf in jax.tree.leaves(stack):
            rows = leaf.reshape(leaf.shape[0], -1)
            terms = jnp.abs(rows) if norm == "l1" else jnp.square(rows)
            total = total + terms.sum(axis=1)
        return total if norm == "l1" else jnp.sqrt(total)

    distance = norms(tree.subtract(params, start_params))
    differs = distance > 1e-6 * norms(tree.stack_one(start_params))
    return jnp.where(differs, distance, 0.0)


def adapt_newcomer(problem: Problem, models: Params, data: ClientData, norm: str) -> Prediction:
    """One step of Eq. 3 and 5 over all K models, from their mean."""
    solver = problem.solver
    start = jax.tree.map(lambda leaf: leaf.mean(axis=0), models)
    # Its training data, if no newcomer has validation data.
    split = data.validation if data.validation.y.shape[0] else data.train

    # w_n (Eq. 3)
    losses = losses_of(problem, models, split)
    baseline = solver.total_loss(start, split) / jnp.maximum(split.size, 1)
    distance = distances(problem, models, start, norm)
    gains = first_order_weights(losses, baseline, distance)

    # w*_n (Eq. 13), and start + sum_n w*_n (theta_n - start)  (Eq. 5)
    weights = normalize(gains)
    model = moved(start, models, weights)
    return Prediction.single(model)


def collaboration(context: ClientContext, row: Row) -> dict[str, Array]:
    """Whose models a client mixed, and its affinities unless there are too many clients."""
    used = {"index": row.index, "weights": row.weights}
    if row.affinity.shape[0] <= LARGEST_AFFINITY:
        used["affinity"] = row.affinity
    return used


def client_models(models: Params, num_clients: int) -> Params:
    """The K clients' models (K, ...) of a stack, without the means that may follow them."""
    return jax.tree.map(lambda leaf: leaf[:num_clients], models)


# ---- Options of the authors' code, which need a server that keeps a record of uploads.


def extend_form(problem: Problem, form: Form, num_others: int) -> Form:
    """The form for `clusters` and `uploaded`: all models are on the server, followed by the clusters' means.

    The engine counts a client's own model as a download; the form's `traffic` leaves it out.

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
        """The K models, followed by the means."""
        if not num_means:
            return models
        return with_cluster_means(models, uploads, form.clusters)

    def served(ids: Array) -> Array:
        """The clients' models, and all means."""
        means = num_clients + jnp.arange(num_means, dtype=jnp.int32)
        return jnp.concatenate([ids, means])

    def traffic(counted: Traffic) -> Traffic:
        """Without the client's own model."""
        num_downloads = num_others + num_means
        return counted._replace(model=counted.model * num_downloads / (num_downloads + 1))

    return form._replace(topology=Topology.SHARED, stack=stack, served=served, traffic=traffic)


def train_first_epoch(
    problem: Problem, key: Key, models: Params, clients: ClientData
) -> tuple[Params, Array]:
    """All clients' models (K, ...) after one epoch, and `Uploads.last` for the first uploaders."""
    num_clients = problem.num_clients
    train_key, cohort_key = jax.random.split(key)
    one_epoch = problem.with_epochs(1)

    def train(models: Params, row: PyTree, data: tuple[Array, ClientData]) -> ClientOutput:
        """A client's epoch, as round 0; the engine calls this as it does `client_update`."""
        client, client_data = data
        zero = jnp.zeros((), jnp.int32)
        context = ClientContext(
            key=jax.random.fold_in(train_key, client),
            round=zero,
            step=zero,
            index=client[None],
            client=client,
        )
        start = tree.first(models)
        trained = one_epoch.train_newcomer(context, client_data, start=start, rounds=1)
        return ClientOutput(
            row=(),
            upload=Upload(update=tree.stack_one(trained)),
            report=ClientReport(loss=jnp.zeros(())),
        )

    # All clients train their own models.
    ids = jnp.arange(num_clients, dtype=jnp.int32)
    _, aggregate = problem.plan.exchange(
        train,
        models,
        index=ids[:, None],
        rows=(),
        data=(ids, clients),
        topology=Topology.OWN,
    )

    # A cohort of them uploads.
    uploaders = draw_cohort(cohort_key, num_clients, problem.cohort_size).ids
    last = jnp.full(num_clients, -1, jnp.int32).at[uploaders].set(0)
    return aggregate.upload.update, last


def with_cluster_means(models: Params, uploads: Uploads, num: int) -> Params:
    """K models, then the means of `num` clusters and, if there are several clusters, the mean of those means.

    The affinities determine the clusters, which are spectral. A cluster's mean is over those of its clients that
    uploaded last, weighted by n_k; an empty cluster gets the mean of all models.
    """
    # (num, K) which clients are in which cluster.
    share = jax.nn.softmax(uploads.affinity, axis=1)
    similarity = (share + share.T) / 2
    label = spectral_clusters(similarity, num)
    is_member = label == jnp.arange(num)[:, None]

    # (num, K) n_k of the members that uploaded last; 1 for all clients if a cluster is empty.
    newest = jnp.where(is_member, uploads.last, -1).max(axis=1, keepdims=True)
    is_newest = is_member & (uploads.last == newest)
    weight = is_newest * jnp.asarray(uploads.size).astype(jnp.float32)
    weight = jnp.where(weight.sum(axis=1, keepdims=True) > 0, weight, 1.0)

    # The clusters' means, then the mean of those means.
    weight = weight / weight.sum(axis=1, keepdims=True)
    if num > 1:
        mean_weight = weight.mean(axis=0, keepdims=True)
        weight = jnp.concatenate([weight, mean_weight])
    means = tree.mix(weight, models)

    def append(leaf: Array, mean: Array) -> Array:
        return jnp.concatenate([leaf, mean])

    return jax.tree.map(append, models, means)
