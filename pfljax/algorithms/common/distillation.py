"""Models that imitate other models' predictions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from pfljax.contract.types import Array, Params, PyTree
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


def fit(
    problem: Problem,
    params: Params,
    optimizer: optax.GradientTransformation,
    examples: tuple[PyTree, Array, Array],
    steps: int,
) -> Params:
    """A model after steps on the mean KL(teacher's || its own prediction), each on all examples.

    Args:
        problem: The problem of the method.
        params: The model.
        optimizer: Its optimizer, which begins anew.
        examples: Inputs (n, *features), the teacher's logits (n, C), and which examples are real, (n,) bool.
        steps: Number of steps.
    """
    x, teacher, real = examples

    def loss(params):
        losses = divergence(problem, teacher, problem.model.apply(params, x), jnp.zeros(len(real), int))
        return jnp.where(real, losses, 0).sum() / jnp.maximum(real.sum(), 1)

    def step(_, carry):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(0, steps, step, (params, optimizer.init(params)))[0]
