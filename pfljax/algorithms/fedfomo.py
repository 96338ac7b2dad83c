"""FedFomo: each client mixes the models that do well on its own validation data.

Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized federated learning with first order model optimization" (ICLR 2021).

    A round of client i, which holds its last trained model theta_i and start_i, from where that was trained:
    M of the active clients' models <- the highest of its row p_i of the affinity matrix P, each of the M
        replaced by a random one with probability epsilon                                        (Section 3.1)
    w_n <- (L_i(start_i) - L_i(theta_n)) / |theta_n - start_i|, for those and its own            (Eq. 3)
    p_i <- p_i + w;  w*_n <- max(w_n, 0) / sum_n max(w_n, 0)                                     (Eq. 13)
    start_i <- start_i + sum_n w*_n (theta_n - start_i), unchanged where no w_n is positive       (Eq. 5)
    theta_i <- E epochs of local training from start_i; uploaded.
L_i is the mean loss on client i's validation data. What is scored is the start_i with which the next round would begin,
of all clients' newest models, as FedAvg's mean is of all newest ones, and with epsilon 0: the personalized model before
it is trained on local data again, which leads away from targets that differ from them.

The variant for model averages (Appendix A.4): clients see no single model but averages of all K,
    w_n <- L_i(mean of all but theta_n) - L_i(mean of all)                                       (Eq. 14)

Departures from the paper:
- epsilon falls by `decay` a round (Appendix A.6) and is drawn for each of the M slots, as in the authors' code.
- |.| is the L2 norm over all parameters (`norm=l1` is the authors' code).
- A client without validation examples goes on from its own trained model.
- Eq. 14's leave-one-out averages are computed by the client from the mean and theta_n; on the wire they would be what
  travels, at the same size, the client's own among them. They are averages over all clients, also where only
  some are active.
- All models start from the same parameters (where `common_init` holds), so that the first exchange weighs nothing,
  and affinities first count in the third.
- Newcomers start from the mean of all models and take one step of Eq. 3 and 5 over all of them (in the variant too), on
  their training data if none of them has validation data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import neighbors
from pfljax.core import tree
from pfljax.core.errors import ArgumentError
from pfljax.core.method import knob, method
from pfljax.core.types import (
    Algorithm,
    Array,
    ClientOutput,
    Cohort,
    Ledger,
    Params,
    Predictor,
    Report,
    Split,
    State,
    Topology,
)
from pfljax.engine.views import read
from pfljax.local.problem import Problem

UNACCOUNTED = "the validation examples, by which models that are sent are mixed"


@dataclasses.dataclass(frozen=True)
class Affinities:
    """Knobs of both forms: which models a client downloads."""

    neighbors: int = knob(
        5,
        at_least=0,
        help="M, models that a client downloads in a round beside its own; all others where there are fewer",
    )
    epsilon: float = knob(
        0.3, at_least=0, at_most=1, help="probability of downloading a random model, in the first round"
    )
    decay: float = knob(0.05, at_least=0, help="how much epsilon falls a round, down to 0")


@method(keeps="the model it trains from, its affinities", travels="M others' models down, its own up", validates=True)
@dataclasses.dataclass(frozen=True)
class FedFomo(Affinities):
    """FedFomo (Zhang et al., 2021): each client mixes the models that do well on its own validation data."""

    norm: Literal["l2", "l1"] = knob("l2", help="distance between models in the weights, over all parameters")

    def build(self, problem: Problem) -> Algorithm:  # clients' models lie on the server one by one
        def weigh(models, start, split, index):
            losses = problem.plan.over_models(lambda params: problem.solver.total_loss(params, split), models)
            baseline = problem.solver.total_loss(start, split)
            size, far = jnp.maximum(split.size, 1), distances(models, start, self.norm)
            return index, models, first_order_weights(losses / size, baseline / size, far)

        served = Served("peers", lambda models: models, lambda index: index, weigh)
        return build(problem, self, self.norm, served)


@method(
    name="fedfomo_average",
    keeps="the model it trains from, its affinities",
    travels="the mean and M + 1 leave-one-out means down, its model up",
    validates=True,
)
@dataclasses.dataclass(frozen=True)
class FedFomoAverage(Affinities):
    """FedFomo on averages of models (Eq. 14): clients see no single model but averages of all K."""

    def build(self, problem: Problem) -> Algorithm:
        num = problem.num_clients

        def with_mean(models):
            """The K models and, as number K, their mean."""
            return jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf.mean(axis=0, keepdims=True)]), models)

        def insert_mean(index):
            return jnp.concatenate([index[:, :1], jnp.full_like(index[:, :1], num), index[:, 1:]], axis=1)

        def weigh(models, start, split, index):
            places = jnp.array([0, *range(2, len(index))])
            mean, models, index = jax.tree.map(lambda leaf: leaf[1], models), tree.take(models, places), index[places]

            def without(params):
                left = jax.tree.map(lambda average, leaf: (num * average - leaf) / max(num - 1, 1), mean, params)
                return problem.solver.total_loss(left, split)

            gain = problem.plan.over_models(without, models) - problem.solver.total_loss(mean, split)
            return index, models, gain / jnp.maximum(split.size, 1)  # Eq. 14

        return build(problem, self, "l2", Served("shared", with_mean, insert_mean, weigh))


@dataclasses.dataclass(frozen=True)
class Served:
    """What can be downloaded, and how a client weighs it.

    Attributes:
        topology: Of the stack of models.
        stack: K models -> what can be downloaded.
        index: Ids (S, M + 1), own first -> what is downloaded for them.
        weigh: (received models, start, validation data, index) -> ids (M + 1,), their models and weights (M + 1,).
    """

    topology: Topology
    stack: Callable[[Params], Params]
    index: Callable[[Array], Array]
    weigh: Callable[[Params, Params, Split, Array], tuple[Array, Params, Array]]


def normalize(weights: Array) -> Array:
    """Eq. 13: negative weights cut to 0, the others made to sum to 1; all zero where none is positive."""
    positive = jnp.maximum(weights, 0)
    return positive / jnp.maximum(positive.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


def first_order_weights(losses: Array, baseline: Array, distance: Array) -> Array:
    """Eq. 3, (L_i(start) - L_i(theta_n)) / |theta_n - start|; 0 for a model that is the start itself, distance 0."""
    return jnp.where(distance > 0, (baseline - losses) / jnp.where(distance > 0, distance, 1), 0.0)


def distances(models: Params, start: Params, norm: str) -> Array:
    """(J,) |theta_n - start| over all parameters; 0 where they are equal but for rounding."""

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


def build(problem: Problem, knobs: Affinities, norm: str, served: Served) -> Algorithm:
    """What both forms share; `norm` is that of the distances for newcomers."""
    num_clients, num_others = problem.num_clients, min(knobs.neighbors, problem.cohort_size - 1)
    own_of = lambda models: jax.tree.map(lambda leaf: leaf[:num_clients], models)  # the clients' models of the stack
    personalize = personalization(served)
    choose = choice(problem, served, num_others)

    def init(key, clients):
        if not clients.validation.y.shape[1]:
            needed = "FedFomo weighs models on validation examples; accepted: above 0"
            raise ArgumentError("validation_fraction", needed, 0)
        models = problem.init_models(key, num_clients)
        rows = {
            "start": models,
            "affinity": jnp.eye(num_clients),
            "index": jnp.zeros((num_clients, num_others + 1), jnp.int32),
            "weights": jnp.zeros((num_clients, num_others + 1)),
            "optimizer": problem.optimizer_rows(jax.tree.map(lambda leaf: leaf[:1], models), num_clients),
        }
        return State((), served.stack(models), (), rows)

    def download(key, state, cohort):
        return choose(key, state, cohort, jnp.maximum(knobs.epsilon - knobs.decay * state.round, 0))

    def client_update(context, models, row, data):
        start, (index, final, weights) = personalize(context.index, models, row["start"], data.validation)
        trained, optimizer, losses = problem.fit_models(context, tree.stack_one(start), row["optimizer"], data.train)
        affinity = row["affinity"].at[index].add(weights)  # p <- p + w, uncut
        row = {"start": start, "affinity": affinity, "index": index, "weights": final, "optimizer": optimizer}
        return ClientOutput(row, trained, {"loss": losses[0], "kept": final.sum() == 0})

    def server_update(key, state, aggregate):
        models = tree.where(aggregate.count > 0, aggregate.upload, state.models)
        models = models if served.topology == "peers" else served.stack(own_of(models))
        return state._replace(models=models), {"kept_previous_model": aggregate.report["kept"].mean()}

    def predictor(key, state, clients):
        everyone = Cohort(jnp.arange(num_clients, dtype=jnp.int32), everyone=True)
        index = choose(key, state, everyone, 0.0)

        def client(models, _, data):
            index, start, split = data
            return ClientOutput((), (), personalize(index[...], models, read(start), split)[0])

        data = (index, state.clients["start"], clients.validation)
        found = problem.plan.exchange(client, state.models, index, (), data, topology=served.topology)[1]
        return Predictor.own(found.report)

    scored = "each client's mixture of the newest models, not yet trained"
    return Algorithm(
        init=init,
        client_update=client_update,
        server_update=server_update,
        predictor=predictor,
        adapt=lambda key, state, clients: newcomers(problem, own_of(state.models), clients, norm),
        download=download,
        topology=served.topology,
        via_server=True,
        ledger=Ledger(gradients=1, unaccounted=UNACCOUNTED),
        report=Report(scored=scored, collaboration=collaboration, topology="peers"),
    )


def choice(problem: Problem, served: Served, num_others: int) -> Callable:
    """(key, state, cohort, epsilon) -> (S, ...) what the clients of the cohort download."""

    def choose(key, state, cohort, epsilon):
        def one(own, affinity):
            ids = jnp.arange(problem.num_clients)
            scores = jnp.where((cohort.position(ids) >= 0) & (ids != own), affinity, -jnp.inf)
            own_key = jax.random.fold_in(key, own)
            return neighbors.best_candidates(own_key, scores, num_others, epsilon)[0].astype(jnp.int32)

        others = problem.plan.over_rows(one, cohort.ids, state.clients["affinity"])
        return served.index(jnp.concatenate([cohort.ids[:, None], others], axis=1))

    return choose


def personalization(served: Served) -> Callable:
    """Eq. 3 and 5: the new start, and whose models were weighed (M + 1,), their weights, cut and uncut."""

    def personalize(index, models, start, split):
        index, models, weights = served.weigh(models, start, split, index)
        alone = jnp.zeros_like(weights).at[0].set(1.0)
        weights = jnp.where(split.size > 0, weights, alone)
        final = normalize(weights)
        return moved(start, models, final), (index, final, weights)

    return personalize


def newcomers(problem: Problem, models: Params, clients, norm: str) -> Predictor:
    """One step of Eq. 3 and 5 over all K models, from their mean."""
    start = jax.tree.map(lambda leaf: leaf.mean(axis=0), models)
    split = clients.validation if clients.validation.y.shape[1] else clients.train
    both = jax.tree.map(lambda leaf, origin: jnp.concatenate([leaf, origin[None]]), models, start)
    losses = problem.losses_of_all(both, split)
    weights = normalize(first_order_weights(losses[:, :-1], losses[:, -1:], distances(models, start, norm)))
    rest = 1 - weights.sum(axis=1, keepdims=True)
    return Predictor.own(tree.mix(jnp.concatenate([weights, rest], axis=1), both))


def collaboration(state: State) -> dict[str, Array]:
    """Whom clients mixed; affinities (K, K) too, unless there are very many clients."""
    names = ("index", "weights", "affinity") if tree.num_rows(state.clients) <= 1000 else ("index", "weights")
    return {name: state.clients[name] for name in names}
