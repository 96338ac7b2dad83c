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
from pfljax.contract.types import Algorithm, ClientContext, ClientData, Prediction
from pfljax.evaluation.metrics import outputs
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
    engine = algorithm.engine._replace(tune=in_general(problem, algorithm, epochs))
    general = dataclasses.replace(algorithm, engine=engine)
    tuned = algorithm.fine_tuned(epochs) if algorithm.fine_tuned else general
    scored = f"{algorithm.report.scored}, fine-tuned by each client on its training data"
    return dataclasses.replace(
        tuned,
        report=dataclasses.replace(tuned.report, scored=scored),
        ledger=algorithm.ledger.beside("fine-tuning before evaluation"),
    )


def in_general(
    problem: Problem, algorithm: Algorithm, epochs: int
) -> Callable[[ClientContext, Prediction, ClientData], Prediction]:
    """The general fine-tuning, as `EngineFields.tune`."""

    def tune(context: ClientContext, prediction: Prediction, data: ClientData) -> Prediction:
        prediction = prediction if algorithm.apply else heaviest(prediction)
        single = algorithm.apply is None and tree.num_rows(prediction.models) == 1
        solver = problem.solver if single else solver_of(problem, algorithm, prediction)
        solver = solver.with_epochs(epochs)
        start = tree.first(prediction.models) if single else prediction.models
        state, _ = solver.fit(
            context.key, solver.begin(start), data.train, round_number=jnp.int32(0)
        )
        tuned = tree.stack_one(state.whole) if single else state.whole
        return prediction._replace(models=tuned)

    return tune


def heaviest(prediction: Prediction) -> Prediction:
    """The prediction with at most the `MOST` heaviest models, because fine-tuning copies each."""
    assert prediction.weights is not None
    if len(prediction.weights) <= MOST:
        return prediction
    weights, places = jax.lax.top_k(prediction.weights, MOST)
    return prediction._replace(
        models=tree.take(prediction.models, places), weights=weights / weights.sum()
    )


def solver_of(problem: Problem, algorithm: Algorithm, prediction: Prediction) -> Solver:
    """The solver for what a client predicts with, with parameters (J, ...).

    It trains on the loss of the mixed predictions, as evaluation has it: without class weights, label smoothing and
    dropout.
    """

    def loss(params, x, y, key=None):
        logits = outputs(problem, algorithm, prediction._replace(models=params), x)
        return problem.model.losses_of(logits, y)

    return problem.solver.with_loss(loss)
