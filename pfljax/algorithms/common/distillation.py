"""Models that imitate other models' predictions."""

from __future__ import annotations

import jax
import optax

from pfljax.contract.types import Array
from pfljax.local.problem import Problem


def divergence(problem: Problem, teacher: Array, student: Array, y: Array) -> Array:
    """KL(teacher's || student's prediction) of each example (B,); for sequences, the mean over the places of classes.

    Args:
        problem: The problem of the method.
        teacher, student: Their logits (B, ..., C).
        y: Classes (B, ...), which tell places that count from others.
    """
    predicted, target = (jax.nn.log_softmax(logits) for logits in (student, teacher))
    return problem.model.over_places(optax.losses.kl_divergence_with_log_targets(predicted, target), y)
