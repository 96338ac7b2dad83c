"""Local fine-tuning before evaluation, for any method: each client trains what it would predict with on its own data.

pFedMB's tables have it for all methods (Section 5.1). A client that predicts with one model trains a copy of it on the
mean loss; one that predicts with a mixture trains copies of all its models on the loss of the mixture, its weights as
they are; of a mixture of more than 16 models the 16 of most weight.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pfljax.core import tree
from pfljax.core.types import Algorithm, Array, ClientData, ClientOutput, Predictor
from pfljax.evaluation.metrics import losses, mixture
from pfljax.local.problem import Problem
from pfljax.local.solver import Solver

MOST = 16


def fine_tuned(problem: Problem, algorithm: Algorithm, epochs: int) -> Algorithm:
    """The algorithm, evaluated after `epochs` epochs of local training, of which its state knows nothing.

    Tuning starts with a fresh optimizer and at the rate of the first round, whatever the schedule.

    Args:
        problem: What the algorithm was built for.
        algorithm: Any.
        epochs: Passes over each client's training data; 0 leaves the algorithm as it is.
    """
    if not epochs:
        return algorithm

    def tune(key, predictor: Predictor, clients: ClientData) -> Predictor:
        predictor = heaviest(predictor) if predictor.topology != "own" else predictor
        num_clients, num = predictor.index.shape

        def client(models, _, data):
            number, weights, shard = data
            solver = solver_of(problem, weights[...]) if num > 1 else problem.solver
            solver = solver._replace(epochs=epochs, steps=0)
            start = models if num > 1 else jax.tree.map(lambda leaf: leaf[0], models)
            optimizer = solver.optimizer.init(start)
            client_key = jax.random.fold_in(key, number)
            params, _, _ = solver.fit(client_key, start, optimizer, shard.train, round_number=jnp.int32(0))
            params = params if num > 1 else tree.stack_one(params)
            return ClientOutput((), params, {}) if predictor.topology == "own" else ClientOutput((), (), params)

        data = (jnp.arange(num_clients), predictor.weights, clients)
        topology = predictor.topology
        _, returned = problem.plan.exchange(client, predictor.models, predictor.index, (), data, topology=topology)
        by_client = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), returned.report)
        own = returned.upload if topology == "own" else by_client
        index = jnp.arange(num_clients * num, dtype=jnp.int32).reshape(num_clients, num)
        return Predictor(own, index, predictor.weights, "own")

    omitted = "fine-tuning before evaluation"
    unaccounted = f"{algorithm.unaccounted}; {omitted}" if algorithm.unaccounted else omitted
    scored = f"{algorithm.scored}, tuned by each client on its training data"
    return algorithm._replace(tune=tune, scored=scored, unaccounted=unaccounted)


def heaviest(predictor: Predictor) -> Predictor:
    """The predictor with at most `MOST` models to a client, those of most weight: tuning makes a copy of each."""
    if predictor.index.shape[1] <= MOST:
        return predictor
    weights, places = jax.lax.top_k(predictor.weights, MOST)
    weights = weights / weights.sum(axis=1, keepdims=True)
    return dataclasses.replace(predictor, index=jnp.take_along_axis(predictor.index, places, axis=1), weights=weights)


def solver_of(problem: Problem, weights: Array) -> Solver:
    """The solver for mixtures of J models with `weights` (J,): its parameters have leaves (J, ...)."""

    def loss(params, x, y):
        return losses(problem.model, mixture(problem.plan, problem.model, params, weights, x), y)

    return problem.solver._replace(loss=loss)
