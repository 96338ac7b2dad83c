"""Models that imitate other models' predictions."""

from __future__ import annotations

import jax
import optax

from pfljax.contract.types import Array
from pfljax.local.problem import Problem


def divergence(problem: Problem, teacher: Array, student: Array, y: Array) -> Array:
    """KL(teacher's || student's prediction) of each example (B,); of a sequence, the mean over its classes.

    Args:
        problem: The problem of the method.
        teacher: The teacher's logits (B, ..., C).
        student: The student's logits (B, ..., C).
        y: Classes (B, ...); positions of a sequence without a class do not count.
    """
    student_log_probs = jax.nn.log_softmax(student)
    teacher_log_probs = jax.nn.log_softmax(teacher)
    divergences = optax.losses.kl_divergence_with_log_targets(student_log_probs, teacher_log_probs)
    return problem.model.mean_over_positions(divergences, y)
