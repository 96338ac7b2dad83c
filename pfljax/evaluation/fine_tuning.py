"""Local fine-tuning before evaluation, for any method: each client trains its predictor on its own data.

pFedMB's tables use it for all methods (Section 5.1). A client that predicts with one model trains a copy of it on the
mean loss. A client that predicts with several models trains copies of all of them on the loss of its predictions, with
fixed mixture weights; in a mixture of more than 16 models, only the 16 of highest weight. A method may define its own
fine-tuning (`Algorithm.fine_tuned`), which replaces this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Mode,
    Params,
    Prediction,
    PyTree,
)
from pfljax.evaluation.metrics import outputs
from pfljax.exchange.lifting import over_classes
from pfljax.local.problem import Problem
from pfljax.local.solver import Solver

MOST = 16


def fine_tuned(problem: Problem, algorithm: Algorithm, epochs: int) -> Algorithm:
    """The algorithm evaluated after `epochs` epochs of local training; its state does not change. For 0, as it is.

    A method's own fine-tuning replaces the general one, which starts with a fresh optimizer and the initial learning
    rate, whatever the schedule.
    """
    if not epochs:
        return algorithm
    if algorithm.fine_tuned:
        tuned = algorithm.fine_tuned(epochs)
    else:
        engine = algorithm.engine._replace(tune=in_general(problem, algorithm, epochs))
        tuned = dataclasses.replace(algorithm, engine=engine)

    scored = f"{algorithm.report.scored}, fine-tuned by each client on its training data"
    report = dataclasses.replace(tuned.report, scored=scored)
    ledger = algorithm.ledger.with_unaccounted("fine-tuning before evaluation")
    return dataclasses.replace(tuned, report=report, ledger=ledger)


def in_general(
    problem: Problem, algorithm: Algorithm, epochs: int
) -> Callable[[ClientContext, Prediction, ClientData], Prediction]:
    """The general fine-tuning, as `EngineFields.tune`."""

    def tune(context: ClientContext, prediction: Prediction, data: ClientData) -> Prediction:
        if algorithm.apply is None:
            prediction = heaviest(prediction)
        is_single = algorithm.apply is None and tree.num_rows(prediction.models) == 1

        # One model on the mean loss, or all of them on the loss of what they predict together.
        if is_single:
            solver = problem.solver.with_epochs(epochs)
            start = solver.begin(tree.first(prediction.models))
        else:
            solver = solver_of(problem, algorithm, prediction).with_epochs(epochs)
            start = solver.begin(prediction.models)
        state, _ = solver.fit(context.key, start, data.train, round_number=jnp.int32(0))

        models = tree.stack_one(state.whole) if is_single else state.whole
        return prediction._replace(models=models)

    return tune


def heaviest(prediction: Prediction) -> Prediction:
    """The prediction with at most the `MOST` heaviest models, because fine-tuning copies each."""
    assert prediction.weights is not None
    if len(prediction.weights) <= MOST:
        return prediction
    _, positions = jax.lax.top_k(over_classes(prediction.weights), MOST)
    models = tree.take(prediction.models, positions)
    weights = prediction.weights[positions]
    tiny = jnp.finfo(jnp.float32).tiny
    weights = weights / jnp.maximum(weights.sum(axis=0), tiny)
    return prediction._replace(models=models, weights=weights)


def solver_of(problem: Problem, algorithm: Algorithm, prediction: Prediction) -> Solver:
    """The solver for what a client predicts with, with parameters (J, ...).

    It trains on the loss of the mixed predictions, as evaluation has it: without class weights, label smoothing and
    dropout.
    """

    def loss(params: Params, x: PyTree, y: Array, mode: Mode = None) -> Array:
        logits = outputs(problem, algorithm, prediction._replace(models=params), x)
        return problem.model.loss_from_outputs(logits, y)

    return problem.solver.with_loss(loss)
