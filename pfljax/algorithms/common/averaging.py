"""One global model that clients receive, train and send back, and a server averages: what FedAvg and its kin share.

    A round: every client of the cohort receives theta and trains it to theta_k (`train`);
    theta <- sum_k n_k theta_k / sum_k n_k, or a server optimizer's step along theta minus that mean.

A method says how a client trains, what it keeps (its row) and what it predicts with. `sharing_layers` is for those that
average some layers only.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import aggregation
from pfljax.core import tree
from pfljax.core.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    Key,
    Params,
    Predictor,
    PyTree,
    State,
)
from pfljax.local.problem import Problem


def loss_at_start(problem: Problem, models: Params, shard: ClientData) -> Array:
    """() the mean loss of the one model of a stack (1, ...), as received, on a client's training data."""
    params = jax.tree.map(lambda leaf: leaf[0], models)
    return problem.solver.total_loss(params, shard.train) / jnp.maximum(shard.train.size, 1)


Train = Callable[[ClientContext, Params, PyTree, ClientData], tuple[Params, PyTree, Array]]
Predict = Callable[[Key, State, ClientData], Predictor]


def averaging(
    problem: Problem,
    *,
    scored: str = "the global model",
    train: Train | None = None,
    rows: Callable[[Key, Params, ClientData], PyTree] | None = None,
    shared: Callable[[Params], Params] = lambda models: models,
    server: optax.GradientTransformation | None = None,
    predictor: Predict | None = None,
    adapt: Predict | None = None,
    gradients: int = 1,
) -> Algorithm:
    """An algorithm with one averaged model.

    Args:
        problem: What it is built for.
        scored: Which model the evaluation scores, in words.
        train: (turn, models (1, ...), row, shard) -> (models, row, losses (1,)), a client's part of a round; None:
            epochs or steps of the solver.
        rows: (key, models (1, ...), clients) -> what clients keep, leaves (K, ...); None: their optimizers, where those
            are kept.
        shared: Of a stack of models what is averaged; the clients keep the rest.
        server: The server's optimizer; None: the mean replaces the model.
        predictor: As in `Algorithm`; None: the global model.
        adapt: As in `Algorithm`; None: as `predictor`.
        gradients: As in `Algorithm`.
    """
    train = train or (lambda turn, models, row, shard: problem.fit_models(turn, models, row, shard.train))

    def init(key, clients):
        models = problem.init_models(key, 1)
        kept = rows(key, models, clients) if rows else problem.optimizer_rows(models, tree.num_rows(clients))
        models = shared(models)
        return State((), models, server.init(models) if server else (), kept)

    def download(key, state, cohort):
        return aggregation.all_models(cohort.ids.shape[0])

    def work(turn, models, row, shard):
        models, row, losses = train(turn, models, row, shard)
        upload, sent = aggregation.weighted(models, shard.train.size)
        return ClientOutput(row, upload, {"loss": losses[0]}, sent)

    def update(key, state, returned):
        mean = aggregation.average(state.models, returned)
        if server is None:
            return state._replace(models=mean), {}
        updates, optimizer = server.update(tree.subtract(state.models, mean), state.optimizer, state.models)
        models = optax.apply_updates(state.models, updates)
        came = returned.upload["weight"].sum() > 0  # else no step on a gradient of zero
        new = lambda new, old: jax.tree.map(lambda a, b: jnp.where(came, a, b), new, old)
        return state._replace(models=new(models, state.models), optimizer=new(optimizer, state.optimizer)), {}

    def global_model(key, state, clients):
        return Predictor.one(state.models, tree.num_rows(clients))

    predictor = predictor or global_model
    adapt = adapt or predictor
    return Algorithm(init, download, work, update, predictor, adapt, "shared", scored, gradients=gradients)


def sharing_layers(problem: Problem, shared: Callable[[Params], PyTree], *, scored: str) -> Algorithm:
    """An algorithm that averages some layers theta; each client keeps the others, phi_k, and trains both together.

        A round: client k receives theta, trains (theta, phi_k) on D_k; phi_k stays;
        theta <- sum_k n_k theta_k / sum_k n_k.

    Newcomers train layers of their own with the shared ones as they are, for as many rounds as a run has.

    Args:
        problem: What it is built for.
        shared: Of a model's parameters, a tree of bools: what is averaged.
        scored: Which model the evaluation scores, in words.
    """

    def split(models):
        return tree.partition(models, shared(models))

    def rows(key, models, clients):
        num = tree.num_rows(clients)
        return {"own": split(problem.init_models(key, num))[1], "optimizer": problem.optimizer_rows(models, num)}

    def train(turn, models, row, shard):
        whole = tree.combine(models, tree.stack_one(row["own"]))
        whole, optimizer, losses = problem.fit_models(turn, whole, row["optimizer"], shard.train)
        theta, phi = split(whole)
        return theta, {"own": jax.tree.map(lambda leaf: leaf[0], phi), "optimizer": optimizer}, losses

    def predictor(key, state, clients):
        return Predictor.own(tree.combine(tree.repeat(state.models, tree.num_rows(clients)), state.clients["own"]))

    def adapt(key, state, clients):
        num = tree.num_rows(clients)
        init_key, train_key = jax.random.split(key)
        start = tree.combine(tree.repeat(state.models, num), split(problem.init_models(init_key, num))[1])
        frozen = problem._replace(solver=problem.solver._replace(optimizer=only_own(problem.solver.optimizer)))
        return Predictor.own(frozen.train_alone(train_key, start, clients, own=True, rounds=problem.rounds))

    def only_own(optimizer):
        """The optimizer, with updates of zero for the shared layers."""

        def update(updates, state, params, **extra):
            updates, state = optimizer.update(updates, state, params, **extra)
            return jax.tree.map(lambda m, leaf: jnp.zeros_like(leaf) if m else leaf, shared(updates), updates), state

        return optimizer._replace(update=update)

    return averaging(
        problem,
        train=train,
        rows=rows,
        shared=lambda models: split(models)[0],
        predictor=predictor,
        adapt=adapt,
        scored=scored,
    )
