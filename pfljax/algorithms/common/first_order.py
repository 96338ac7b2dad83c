"""Clients that mix the models that do well on their validation data, for both forms of FedFomo.

Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized federated learning with first order model optimization" (ICLR 2021).
A round of client i, which holds start_i, the model its last model was trained from, and a row p_i of affinities:

    receives its own last model and M others                                            (`choose`, Section 3.1)
    w_n <- a weight for each of them, on its validation data                            (`Form.weigh`, Eq. 3 or 14)
    w*_n <- max(w_n, 0) / sum_n max(w_n, 0)                                             (`normalize`, Eq. 13)
    start_i <- start_i + sum_n w*_n (theta_n - start_i);  p_i <- p_i + w                (`moved`, Eq. 5)
    theta_i <- local training from start_i; uploaded.

Further behavior of the authors' code is optional: it scales w in p_i (`scaled`), downloads from the last uploaders
(`Form.uploaded`), and adds means of clusters to the candidates (`Form.clusters`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import neighbors
from pfljax.algorithms.common.uploads import Uploads, first_epoch, with_cluster_means
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.method import knob
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientData,
    ClientOutput,
    Key,
    Ledger,
    Params,
    Predictor,
    PyTree,
    Report,
    Split,
    State,
    Topology,
    Traffic,
)
from pfljax.exchange.views import read
from pfljax.local.problem import Problem

LARGEST_AFFINITY = 1000  # largest number of clients for which the K x K affinities are reported


@dataclasses.dataclass(frozen=True)
class Knobs:
    """Knobs of both forms."""

    neighbors: int = knob(
        4,
        at_least=0,
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
    scaled: bool = knob(False, help="increase affinities by w / |sum of w|, as in the authors' code, instead of w")


Weigh = Callable[[Params, Params, Split, Array], tuple[Array, Params, Array, Params]]


class Form(NamedTuple):
    """What a form of FedFomo downloads, and how it computes the weights.

    Attributes:
        topology: Topology of the stack of models.
        weigh: (received models, start, validation data, index) -> ids (J,), the client's own first, their models and
            weights (J,), and the model that the client moves from.
        stack: (K models, the server's state) -> models that can be downloaded, the K models first.
        served: ids (S, M + 1), the client's own first -> indices to download for them.
        norm: Norm of the distances for newcomers.
        clusters: Number of clusters whose means can be downloaded in addition to clients' models.
        uploaded: Whether the last uploaders' models can be downloaded instead of the cohort's; before the first round
            all clients train for an epoch, and a cohort uploads.
        traffic: As in `Algorithm`.
    """

    topology: Topology
    weigh: Weigh
    stack: Callable[[Params, PyTree], Params] = lambda models, server: models
    served: Callable[[Array], Array] = lambda ids: ids
    norm: str = "l2"
    clusters: int = 0
    uploaded: bool = False
    traffic: Callable[[Traffic], Traffic] | None = None


def normalize(weights: Array) -> Array:
    """Eq. 13: clips negative weights to 0 and normalizes the others to sum to 1; all zero if none is positive."""
    positive = jnp.maximum(weights, 0)
    return positive / jnp.maximum(positive.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


def first_order_weights(losses: Array, baseline: Array, distance: Array) -> Array:
    """Eq. 3, (L_i(start) - L_i(theta_n)) / |theta_n - start|; 0 for the start itself, at distance 0."""
    return jnp.where(distance > 0, (baseline - losses) / jnp.where(distance > 0, distance, 1), 0.0)


def distances(models: Params, start: Params, norm: str) -> Array:
    """(J,) |theta_n - start| over all parameters; 0 if they are equal up to rounding."""

    def length(stack):
        flat = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(stack)]
        if norm == "l1":
            return sum(jnp.abs(rows).sum(axis=1) for rows in flat)
        return jnp.sqrt(sum(jnp.square(rows).sum(axis=1) for rows in flat))

    far = length(jax.tree.map(lambda leaf, origin: leaf - origin, models, start))
    return jnp.where(far > 1e-6 * length(tree.stack_one(start)), far, 0.0)


def moved(start: Params, models: Params, weights: Array) -> Params:
    """Eq. 5: start + sum_n w*_n (theta_n - start)."""
    mixed = tree.mix(weights, models)
    return jax.tree.map(lambda origin, leaf: origin * (1 - weights.sum()) + leaf, start, mixed)


def on_server(problem: Problem, form: Form, num_others: int) -> Form:
    """The form for `clusters` and `uploaded`: all models are on the server, followed by the means.

    The engine counts a client's own model as a download; this corrects the traffic.

    Raises:
        ArgumentError: for more clusters than clients, and for private training, whose ledger omits the first epoch.
    """
    num, means = problem.num_clients, form.clusters + (form.clusters > 1)
    if form.clusters > num:
        raise ArgumentError("clusters", f"accepted: 0 to {num}, the number of clients", form.clusters)
    if form.uploaded and problem.solver.privacy.active:
        text = "the privacy ledger omits its first epoch; accepted with privacy: cohort"
        raise ArgumentError("available", text, "uploaded")

    def served(ids):
        return jnp.concatenate([ids, jnp.broadcast_to(num + jnp.arange(means), (len(ids), means))], axis=1)

    def stack(models, server):
        return with_cluster_means(models, server, form.clusters) if means else models

    def traffic(moved):
        return moved._replace(model=moved.model * (num_others + means) / (num_others + means + 1))

    return form._replace(topology="shared", stack=stack, served=served, traffic=traffic)


def rounds(problem: Problem, knobs: Knobs, form: Form) -> Algorithm:
    """An algorithm whose clients mix models with a `Form`'s weights."""
    num, num_others = problem.num_clients, min(knobs.neighbors, problem.cohort_size - 1)
    remembers = bool(form.clusters or form.uploaded)
    form = on_server(problem, form, num_others) if remembers else form

    def init(key, clients):
        if not clients.validation.y.shape[1]:
            text = "FedFomo needs validation examples; accepted: above 0"
            raise ArgumentError("validation_fraction", text, 0)
        ids = problem.ids(clients)
        models = problem.init_models(key, ids)
        rows = first_rows(problem, models, ids, num_others)
        if problem.part is not None:  # only rows are needed
            return State((), models, (), rows)
        models, last = (
            first_epoch(problem, key, models, clients) if form.uploaded else (models, jnp.zeros(num, jnp.int32))
        )
        server = Uploads(last, clients.train.size, rows["affinity"]) if remembers else ()
        return State(server, form.stack(models, server), (), rows)

    def download(key, state, cohort):
        epsilon = jnp.maximum(knobs.epsilon - knobs.decay * state.round, 0)
        eligible = state.server.newest if form.uploaded else jnp.zeros(num, bool).at[cohort.ids].set(True)
        return form.served(choose(problem, key, state, cohort.ids, eligible, num_others, epsilon))

    def client_update(context, models, row, data):
        start, (index, final, weights) = personalize(form, context.index, models, row["start"], data.validation)
        trained, optimizer, losses = problem.fit_models(context, tree.stack_one(start), row["optimizer"], data.train)
        gains = weights / jnp.maximum(jnp.abs(weights.sum()), 1e-9) if knobs.scaled else weights  # unclipped
        affinity = row["affinity"].at[index].add(gains, mode="drop")  # an index of K or more is no client
        kept = {"index": index[: num_others + 1], "weights": final[: num_others + 1], "optimizer": optimizer}
        report = {"loss": losses[0], "kept": final.sum() == 0}
        report |= {"index": index, "gains": gains} if remembers else {}
        return ClientOutput({"start": start, "affinity": affinity, **kept}, trained, report)

    def server_update(key, state, aggregate):
        models = tree.where(aggregate.count > 0, aggregate.upload, state.models)
        server = state.server.noted(aggregate.report, state.round) if remembers else ()
        models = models if form.topology == "peers" else form.stack(leading(models, num), server)
        metrics = {"kept_previous_model": aggregate.report["kept"].mean()}
        return state._replace(server=server, models=models), metrics

    return Algorithm(
        init=init,
        download=download,
        client_update=client_update,
        server_update=server_update,
        predictor=functools.partial(downloaded, problem, form, num_others),
        fine_tune=functools.partial(mixed, problem, form),
        adapt=lambda key, state, clients: newcomers(problem, leading(state.models, num), clients, form.norm),
        topology=form.topology,
        ledger=Ledger(gradients=1, unaccounted="the validation examples, which determine the mixtures that are sent"),
        report=Report("each client's mixture of the newest models, before training", (), collaboration, "peers"),
        via_server=True,
        traffic=form.traffic,
    )


def first_rows(problem: Problem, models: Params, ids: Array, num_others: int) -> PyTree:
    """Rows of clients `ids` (n,) before the first round, which starts from `models` (n, ...)."""
    return {
        "start": models,
        "affinity": jax.nn.one_hot(ids, problem.num_clients),
        "index": jnp.zeros((len(ids), num_others + 1), jnp.int32),
        "weights": jnp.zeros((len(ids), num_others + 1)),
        "optimizer": problem.optimizer_rows(leading(models, 1), len(ids)),
    }


def downloaded(problem: Problem, form: Form, num_others: int, key: Key, state: State, clients: ClientData) -> Predictor:
    """What each client would download next from all clients' newest models without exploring, before mixing."""
    ids, all_clients = problem.ids(clients), jnp.ones(problem.num_clients, bool)
    index = form.served(choose(problem, key, state, ids, all_clients, num_others, 0.0))
    weights = jnp.zeros(index.shape).at[:, 0].set(1.0)
    return Predictor(state.models, index, weights, form.topology, rows=state.clients["start"])


def mixed(problem: Problem, form: Form, key: Key, predictor: Predictor, clients: ClientData) -> Predictor:
    """The start of each client's next round, given what it has `downloaded`."""
    if not jax.tree.leaves(predictor.rows):  # newcomers have already mixed
        return predictor

    def client(models, _, data):
        index, start, split = data
        return ClientOutput((), (), personalize(form, index[...], models, read(start), split)[0])

    data = (predictor.index, predictor.rows, clients.validation)
    topology = predictor.topology
    mixtures = problem.plan.exchange(client, predictor.models, predictor.index, (), data, topology=topology)[1].report
    return Predictor.own(mixtures)


def collaboration(state: State) -> dict[str, Array]:
    """Whose models clients mixed, and their affinities unless there are too many clients."""
    many = state.clients["affinity"].shape[1] > LARGEST_AFFINITY
    return {name: state.clients[name] for name in ("index", "weights", *([] if many else ["affinity"]))}


def leading(models: Params, num: int) -> Params:
    """The first `num` models of a stack."""
    return jax.tree.map(lambda leaf: leaf[:num], models)


def choose(
    problem: Problem,
    key: Key,
    state: State,
    ids: Array,
    eligible: Array,
    num_others: int,
    epsilon: Array | float,
) -> Array:
    """(n, M + 1) int32: each client of `ids` (n,), then those with the highest affinity among the eligible (K,)."""

    def one(own, affinity):
        scores = jnp.where(eligible & (jnp.arange(problem.num_clients) != own), affinity, -jnp.inf)
        own_key = jax.random.fold_in(key, own)
        return neighbors.best_candidates(own_key, scores, num_others, epsilon)[0].astype(jnp.int32)

    others = problem.plan.over_rows(one, ids, state.clients["affinity"])
    return jnp.concatenate([ids[:, None], others], axis=1)


def personalize(
    form: Form, index: Array, models: Params, start: Params, split: Split
) -> tuple[Params, tuple[Array, Array, Array]]:
    """Returns the new start; then the indices (J,) of the mixed models, their normalized weights and raw weights."""
    index, models, weights, base = form.weigh(models, start, split, index)  # Eq. 3 or 14
    alone = jnp.zeros_like(weights).at[0].set(1.0)
    weights = jnp.where(split.size > 0, weights, alone)
    final = normalize(weights)  # Eq. 13
    return moved(base, models, final), (index, final, weights)  # Eq. 5


def newcomers(problem: Problem, models: Params, clients: ClientData, norm: str) -> Predictor:
    """One step of Eq. 3 and 5 over all K models, from their mean."""
    start = jax.tree.map(lambda leaf: leaf.mean(axis=0), models)
    split = clients.validation if clients.validation.y.shape[1] else clients.train
    both = jax.tree.map(lambda leaf, origin: jnp.concatenate([leaf, origin[None]]), models, start)
    losses = problem.losses_of_all(both, split)
    trained, origin = problem.solver.trained(models, start)
    distance = distances(trained, origin, norm)
    weights = normalize(first_order_weights(losses[:, :-1], losses[:, -1:], distance))
    rest = 1 - weights.sum(axis=1, keepdims=True)
    return Predictor.own(tree.mix(jnp.concatenate([weights, rest], axis=1), both))
