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
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import neighbors
from pfljax.algorithms.common.by_loss import losses_of
from pfljax.algorithms.common.uploads import Uploads, first_epoch, with_cluster_means
from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.method import knob
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    First,
    Ledger,
    Mixture,
    Params,
    Prediction,
    PyTree,
    Report,
    Split,
    Start,
    Topology,
    Traffic,
)
from pfljax.local.problem import Problem

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
    scaled: bool = knob(False, help="increase affinities by w / |sum of w|, as in the authors' code, instead of w")


class Row(NamedTuple):
    """What client i keeps.

    Attributes:
        start: start_i.
        affinity: (K,) p_i.
        index: (M + 1,) int32, whose models it mixed last.
        weights: (M + 1,) w*_n of these.
        optimizer: Its optimizer, if it is kept.
    """

    start: Params
    affinity: Array
    index: Array
    weights: Array
    optimizer: PyTree


Weigh = Callable[[Params, Params, Split, Array], tuple[Array, Params, Array, Params]]


class Form(NamedTuple):
    """What a form of FedFomo downloads, and how it computes the weights.

    Attributes:
        topology: Topology of the stack of models.
        weigh: (received models, start, validation data, index) -> ids (J,), the client's own first, their models and
            weights (J,), and the model that the client moves from.
        stack: (K models, the server's state) -> models that can be downloaded, the K models first.
        served: ids (M + 1,), the client's own first -> indices to download for them.
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

    @property
    def remembers(self) -> bool:
        """Whether the server keeps a record of `Uploads`."""
        return bool(self.clusters or self.uploaded)


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
        return jnp.concatenate([ids, num + jnp.arange(means, dtype=jnp.int32)])

    def stack(models, server):
        return with_cluster_means(models, server, form.clusters) if means else models

    def traffic(moved):
        return moved._replace(model=moved.model * (num_others + means) / (num_others + means + 1))

    return form._replace(topology="shared", stack=stack, served=served, traffic=traffic)


def rounds(problem: Problem, knobs: Knobs, form: Form) -> Algorithm:
    """An algorithm whose clients mix models with a `Form`'s weights."""
    num, num_others = problem.num_clients, min(knobs.neighbors, problem.cohort_size - 1)
    form = on_server(problem, form, num_others) if form.remembers else form
    start, first_row = beginning(problem, form, num_others)

    def download(context, row, cohort):
        epsilon = jnp.maximum(knobs.epsilon - knobs.decay * context.round, 0)
        eligible = context.server.newest if form.uploaded else jnp.zeros(num, bool).at[cohort.ids].set(True)
        return form.served(choose(context, row.affinity, eligible, num_others, epsilon))

    def client_update(context, models, row, data):
        start, (index, final, weights) = personalize(form, context.index, models, row.start, data.validation)
        trained, optimizer, losses = problem.fit(context, tree.stack_one(start), row.optimizer, data.train)
        gains = weights / jnp.maximum(jnp.abs(weights.sum()), 1e-9) if knobs.scaled else weights  # unclipped
        affinity = row.affinity.at[index].add(gains, mode="drop")  # an index of K or more is no client
        report = {"loss": losses[0], "kept": final.sum() == 0}
        report |= {"index": index, "gains": gains} if form.remembers else {}
        row = Row(start, affinity, index[: num_others + 1], final[: num_others + 1], optimizer)
        return ClientOutput(row, trained, report)

    def server_update(key, state, aggregate):
        models = tree.where(aggregate.count > 0, aggregate.upload, state.models)
        server = state.server.noted(aggregate.report, state.round) if form.remembers else ()
        models = models if form.topology == "peers" else form.stack(leading(models, num), server)
        metrics = {"kept_previous_model": aggregate.report["kept"].mean()}
        return state._replace(server=server, models=models), metrics

    def whom(context, row, size):
        """What the client would download next from all clients' newest models, without exploring."""
        index = form.served(choose(context, row.affinity, jnp.ones(num, bool), num_others, 0.0))
        return Mixture(index, jnp.zeros(index.shape).at[0].set(1.0))

    def predict(context, models, row, data):
        return Prediction.one(personalize(form, context.index, models, row.start, data.validation)[0])

    return Algorithm(
        start=start,
        first_row=first_row,
        download=download,
        client_update=client_update,
        server_update=server_update,
        whom=whom,
        predict=predict,
        adapt=lambda context, models, data: newcomer(problem, leading(models, num), data, form.norm),
        topology=form.topology,
        ledger=Ledger(gradients=1, unaccounted="the validation examples, which determine the mixtures that are sent"),
        report=Report("each client's mixture of the newest models, before training", (), collaboration, "peers"),
        via_server=True,
        sends="models",
        traffic=form.traffic,
    )


def beginning(problem: Problem, form: Form, num_others: int) -> tuple[Callable, Callable]:
    """`start` and `first_row` of an algorithm."""
    num, width = problem.num_clients, num_others + 1

    def start(key, clients):
        if not clients.validation.y.shape[1]:
            text = "FedFomo needs validation examples; accepted: above 0"
            raise ArgumentError("validation_fraction", text, 0)
        if form.topology == "peers":
            return Start()
        models, last = problem.init_models(key, num), jnp.zeros(num, jnp.int32)
        if form.uploaded:
            models, last = first_epoch(problem, key, models, clients)
        server = Uploads(last, clients.train.size, jnp.eye(num)) if form.remembers else ()
        return Start(server, form.stack(models, server))

    def first_row(key, client, start):
        model = problem.init_model(key, client)
        optimizer = problem.kept_optimizers(tree.stack_one(model))
        row = Row(model, jax.nn.one_hot(client, num), jnp.zeros(width, jnp.int32), jnp.zeros(width), optimizer)
        return First(row, model if form.topology == "peers" else ())

    return start, first_row


def collaboration(context: ClientContext, row: Row) -> dict[str, Array]:
    """Whose models a client mixed, and its affinities unless there are too many clients."""
    used = {"index": row.index, "weights": row.weights}
    return used if row.affinity.shape[0] > LARGEST_AFFINITY else used | {"affinity": row.affinity}


def leading(models: Params, num: int) -> Params:
    """The first `num` models of a stack."""
    return jax.tree.map(lambda leaf: leaf[:num], models)


def choose(context: ClientContext, affinity: Array, eligible: Array, num_others: int, epsilon: Array | float) -> Array:
    """(M + 1,) int32: the client, then those with the highest affinity (K,) among the eligible (K,)."""
    scores = jnp.where(eligible & (jnp.arange(len(affinity)) != context.client), affinity, -jnp.inf)
    others, _ = neighbors.best_candidates(context.key, scores, num_others, epsilon)
    return jnp.concatenate([context.client[None], others.astype(jnp.int32)])


def personalize(
    form: Form, index: Array, models: Params, start: Params, split: Split
) -> tuple[Params, tuple[Array, Array, Array]]:
    """Returns the new start; then the indices (J,) of the mixed models, their normalized weights and raw weights."""
    index, models, weights, base = form.weigh(models, start, split, index)  # Eq. 3 or 14
    alone = jnp.zeros_like(weights).at[0].set(1.0)
    weights = jnp.where(split.size > 0, weights, alone)
    final = normalize(weights)  # Eq. 13
    return moved(base, models, final), (index, final, weights)  # Eq. 5


def newcomer(problem: Problem, models: Params, data: ClientData, norm: str) -> Prediction:
    """One step of Eq. 3 and 5 over all K models, from their mean."""
    start = jax.tree.map(lambda leaf: leaf.mean(axis=0), models)
    split = data.validation if data.validation.y.shape[0] else data.train
    baseline = problem.solver.total_loss(start, split) / jnp.maximum(split.size, 1)
    trained, origin = problem.solver.trained(models, start)
    weights = first_order_weights(losses_of(problem, models, split), baseline, distances(trained, origin, norm))
    return Prediction.one(moved(start, models, normalize(weights)))
