"""A model's last layer, its head, by itself: its parameters, its matrix, and a server that trains it on features."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import classes
from pfljax.contract import tree
from pfljax.contract.types import Array, Params, PyTree
from pfljax.local.problem import Problem


def head_of(problem: Problem, params: Params) -> Params:
    """The last layer's leaves of one model or of a stack; None replaces the others."""
    return tree.partition(params, problem.model.mask(params, 1))[0]


def matrix(problem: Problem, params: Params) -> Array:
    """H (C, F), by which the last layer multiplies features, of one model."""
    size = classes.num_features(problem)
    outputs = problem.model.head(params, jnp.concatenate([jnp.zeros((1, size)), jnp.eye(size)]))
    return (outputs[1:] - outputs[0]).T


def fit(
    problem: Problem, head: Params, optimizer: PyTree, examples: tuple[Array, Array, Array], steps: int, number: Array
) -> tuple[Params, PyTree]:
    """Trains a head with the clients' optimizer, each step on all examples.

    Args:
        problem: The problem of the method.
        head: Result of `head_of` for one model.
        optimizer: Its optimizer state.
        examples: Features (n, F), classes (n,), and which examples are real, (n,) bool; without any, no step is taken.
        steps: Number of steps.
        number: Number of the round, for learning rate schedules.
    """
    z, y, real = examples
    # The rest of the model computes nothing that the outputs for given features need.
    rest = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), problem.model.network.shapes)

    def loss(head):
        logits = problem.model.head(tree.combine(head, rest), z)
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, y)
        return jnp.where(real, losses, 0).sum() / jnp.maximum(real.sum(), 1)

    def step(_, carry):
        head, state = carry
        updates, state = problem.solver.optimizer.update(jax.grad(loss)(head), state, head, round_number=number)
        return optax.apply_updates(head, updates), state

    trained = jax.lax.fori_loop(0, steps, step, (head, optimizer))
    return jax.tree.map(lambda new, old: jnp.where(real.any(), new, old), trained, (head, optimizer))
