"""One global model that clients receive, train and send back, and a server averages: what FedAvg and its kin share.

    A round: every client of the cohort receives theta and trains it to theta_k (`train`);
    theta <- sum_k n_k theta_k / sum_k n_k, or a server optimizer's step along theta minus that mean.

A method says how a client trains, what it keeps (its row) and what it predicts with.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import optax

from pfljax import aggregation, tree
from pfljax.solvers import Problem
from pfljax.types import Algorithm, Array, Key, Params, Predictor, PyTree, Shard, State, Turn, Work

Train = Callable[[Turn, Params, PyTree, Shard], tuple[Params, PyTree, Array]]
Predict = Callable[[Key, State, Shard], Predictor]


def averaging(
    problem: Problem,
    *,
    scored: str = "the global model",
    train: Train | None = None,
    rows: Callable[[Key, Params, Shard], PyTree] | None = None,
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
        return jnp.zeros((cohort.ids.shape[0], 1), jnp.int32)

    def work(turn, models, row, shard):
        models, row, losses = train(turn, models, row, shard)
        upload, sent = aggregation.weighted(models, shard.train.size)
        return Work(row, upload, {"loss": losses[0]}, sent)

    def update(key, state, returned):
        mean = aggregation.average(state.models, returned)
        if server is None:
            return state._replace(models=mean), {}
        updates, optimizer = server.update(tree.subtract(state.models, mean), state.optimizer, state.models)
        return state._replace(models=optax.apply_updates(state.models, updates), optimizer=optimizer), {}

    def global_model(key, state, clients):
        return Predictor.one(state.models, tree.num_rows(clients))

    predictor = predictor or global_model
    adapt = adapt or predictor
    return Algorithm(init, download, work, update, predictor, adapt, "shared", scored, gradients=gradients)
