"""Local fine-tuning before evaluation, for any method: each client trains its predictor on its own data.

pFedMB's tables use it for all methods (Section 5.1). A client that predicts with one model trains a copy of it on the
mean loss. A client that predicts with several models trains copies of all of them on the loss of its predictions, with
fixed mixture weights; in a mixture of more than 16 models, only the 16 of highest weight. A method may define its own
fine-tuning (`Algorithm.fine_tuned`), which replaces all this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import Algorithm, Array, ClientData, ClientOutput, Key, Predictor, PyTree
from pfljax.evaluation.metrics import predict
from pfljax.local.problem import Problem
from pfljax.local.solver import Solver

MOST = 16


def fine_tuned(problem: Problem, algorithm: Algorithm, epochs: int) -> Algorithm:
    """The algorithm evaluated after `epochs` epochs of local training; its state does not change.

    A method's own fine-tuning replaces the general one. The general one runs after `Algorithm.fine_tune` and starts
    with a fresh optimizer and the initial learning rate, whatever the schedule.

    Args:
        problem: The problem of the algorithm.
        algorithm: Any algorithm.
        epochs: Passes over each client's training data; 0 returns the algorithm unchanged.
    """
    if not epochs:
        return algorithm
    before, train = algorithm.fine_tune, in_general(problem, epochs)

    def both(key, predictor, clients):
        return train(key, before(key, predictor, clients) if before else predictor, clients)

    general = dataclasses.replace(algorithm, fine_tune=both)
    tuned = algorithm.fine_tuned(epochs) if algorithm.fine_tuned else general
    scored = f"{algorithm.report.scored}, fine-tuned by each client on its training data"
    return dataclasses.replace(
        tuned,
        report=dataclasses.replace(tuned.report, scored=scored),
        ledger=algorithm.ledger.beside("fine-tuning before evaluation"),
    )


def in_general(problem: Problem, epochs: int) -> Callable[[Key, Predictor, ClientData], Predictor]:
    """The general fine-tuning: (key, predictor, clients) -> Predictor."""

    def fine_tune(key, predictor: Predictor, clients: ClientData) -> Predictor:
        predictor = heaviest(predictor) if predictor.apply is None else predictor
        num_clients, num = predictor.index.shape
        single = num == 1 and predictor.apply is None

        def client(models, _, data):
            number, weights, row, own = data
            solver = problem.solver if single else solver_of(problem, predictor, weights, row)
            solver = solver._replace(epochs=epochs, steps=0)
            start = tree.first(models) if single else models
            optimizer = solver.optimizer.init(start)
            client_key = jax.random.fold_in(key, number)
            params, _, _ = solver.fit(client_key, start, optimizer, own.train, round_number=jnp.int32(0))
            params = tree.stack_one(params) if single else params
            return ClientOutput((), params, {}) if predictor.topology == "own" else ClientOutput((), (), params)

        data = (problem.ids(clients), predictor.weights, predictor.rows, clients)
        topology = predictor.topology
        _, came = problem.plan.exchange(client, predictor.models, predictor.index, (), data, topology=topology)
        by_client = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), came.report)
        models = came.upload if topology == "own" else by_client
        index = jnp.arange(num_clients * num, dtype=jnp.int32).reshape(num_clients, num)
        return dataclasses.replace(predictor, models=models, index=index, topology="own")

    return fine_tune


def heaviest(predictor: Predictor) -> Predictor:
    """The predictor with the at most `MOST` heaviest models per client, since fine-tuning copies each."""
    if predictor.index.shape[1] <= MOST:
        return predictor
    weights, places = jax.lax.top_k(predictor.weights, MOST)
    weights = weights / weights.sum(axis=1, keepdims=True)
    models, index = predictor.models, jnp.take_along_axis(predictor.index, places, axis=1)
    if predictor.topology == "own":  # adjacent, as in the index
        models, index = (
            tree.take(models, index.reshape(-1)),
            jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape),
        )
    return dataclasses.replace(predictor, models=models, index=index, weights=weights)


def solver_of(problem: Problem, predictor: Predictor, weights: Array, row: PyTree) -> Solver:
    """The solver for a client's predictor, with parameters (J, ...)."""

    def loss(params, x, y, key=None):
        return problem.model.losses_of(predict(problem.plan, problem.model, predictor, params, weights, row, x), y)

    return problem.solver._replace(loss=loss)
