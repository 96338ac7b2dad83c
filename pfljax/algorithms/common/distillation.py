"""Models that imitate other models' predictions."""

from __future__ import annotations

import jax
import optax

from pfljax.contract.types import Array, Key, Params
from pfljax.local.problem import Problem


def divergence(problem: Problem, teacher: Params, student: Params, x: Array, y: Array, key: Key | None = None) -> Array:
    """KL(teacher's || student's prediction) of each example (B,); for sequences, the mean over the places of classes.

    Args:
        problem: The problem of the method, with the network of both.
        teacher, student: Their parameters.
        x: Inputs (B, ...).
        y: Classes (B, ...), which tell places that count from others.
        key: As in `Model.loss`; both models get the same.
    """
    model = problem.model
    predicted, target = (jax.nn.log_softmax(model.apply(params, x, key)) for params in (student, teacher))
    return model.over_places(optax.losses.kl_divergence_with_log_targets(predicted, target), y)
