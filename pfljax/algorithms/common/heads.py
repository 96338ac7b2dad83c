"""A model's last layer, its head, by itself: its parameters, its matrix, and a server that trains it on features."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfljax.algorithms.common import classes
from pfljax.contract import tree
from pfljax.contract.types import Array, Params, PyTree
from pfljax.local.problem import Problem
from pfljax.local.solver import joined


class LabeledFeatures(NamedTuple):
    """Examples for a head.

    Attributes:
        features: (n, F).
        labels: (n,) classes.
        real: (n,) bool, which of them count.
    """

    features: Array
    labels: Array
    real: Array


def head_of(problem: Problem, params: Params) -> Params:
    """The last layer's leaves of one model or of a stack; None replaces the others."""
    head, _ = tree.partition(params, problem.model.mask(params, 1))
    return head


def matrix(problem: Problem, params: Params) -> Array:
    """H (C, F), by which the last layer of one model multiplies features."""
    num_features = classes.num_features(problem)
    inputs = jnp.concatenate([jnp.zeros((1, num_features)), jnp.eye(num_features)])
    outputs = problem.model.head(params, inputs)
    offset = outputs[0]
    return (outputs[1:] - offset).T


def fit(
    problem: Problem,
    head: Params,
    opt_state: PyTree,
    examples: LabeledFeatures,
    num_steps: int,
    round_number: Array,
) -> tuple[Params, PyTree]:
    """Trains a head with the clients' optimizer on the mean cross entropy, each step on all examples.

    Args:
        problem: The problem of the method.
        head: Result of `head_of` for one model.
        opt_state: Its optimizer state, as of `Solver.begin`.
        examples: Without any that count, no step is taken.
        num_steps: Number of steps.
        round_number: Number of the round, for learning rate schedules.

    Returns:
        The head after training, and its optimizer state.
    """
    model = problem.model
    params, statistics = problem.solver.without_statistics(head)
    num_real = jnp.maximum(examples.real.sum(), 1)

    # The rest of the model computes nothing that the outputs for given features need.
    shapes = model.network.shapes
    rest = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def mean_loss(params: Params) -> Array:
        whole = tree.combine(joined(params, statistics), rest)
        logits = model.head(whole, examples.features)
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, examples.labels)
        return jnp.where(examples.real, losses, 0).sum() / num_real

    def step(number: Array, carry: tuple[Params, PyTree]) -> tuple[Params, PyTree]:
        params, opt_state = carry
        updates, opt_state = problem.solver.optimizer.update(
            jax.grad(mean_loss)(params), opt_state, params, round_number=round_number
        )
        return optax.apply_updates(params, updates), opt_state

    start = (params, opt_state)
    trained = jax.lax.fori_loop(0, num_steps, step, start)
    params, opt_state = tree.where(jnp.any(examples.real), trained, start)
    return joined(params, statistics), opt_state
