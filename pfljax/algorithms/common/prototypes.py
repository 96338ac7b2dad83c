"""Classes as their examples' features show them: sums, counts and means of what a model's last layer receives.

sums, counts = class_sums(problem, params, data.train)
means(sums, counts)   # zeros where a class has no examples
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pfljax.core import tree
from pfljax.core.errors import ArgumentError
from pfljax.core.types import Array, Params, Split
from pfljax.local.batches import masked, sum_over_examples
from pfljax.local.problem import Problem


def form(problem: Problem) -> tuple[int, int]:
    """(C, F): how many classes there are, and how many features a model gives of an example.

    Raises:
        ArgumentError: if examples have no class each, as in a regression and in sequences.
    """
    model = problem.model
    shape = lambda fn: jax.eval_shape(fn, model.network.shapes, model.example_input).shape
    if model.task != "classification" or len(shape(model.apply)) != 2:
        raise ArgumentError("model", "has no features by class; accepted: one that classifies whole examples")
    return shape(model.apply)[1], shape(model.features)[1]


def class_sums(problem: Problem, params: Params, split: Split) -> tuple[Array, Array]:
    """The features of a client's examples under one model, summed class by class (C, F), and the classes' sizes (C,).

    They are those of predictions: without dropout, with running statistics.
    """
    classes, _ = form(problem)

    def sums(x, y, mask):
        x, y = masked(x, y, mask)
        member = jax.nn.one_hot(y, classes) * mask[:, None]
        return member.T @ problem.model.features(params, x), member.sum(axis=0)

    return sum_over_examples(sums, split)


def means(sums: Array, counts: Array) -> Array:
    """Mean features (..., C, F) of sums (..., C, F) over counts (..., C) examples; zeros for classes without any."""
    return tree.scale(sums, 1 / jnp.where(counts > 0, counts, 1))
