"""What methods that treat classes apart read of a client's examples: counts of classes, and features by class."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pfljax.core import tree
from pfljax.core.errors import ArgumentError
from pfljax.core.types import Array, Params, Split
from pfljax.local.batches import masked, sum_over_examples
from pfljax.local.problem import Problem
from pfljax.models import Model


def required(problem: Problem, name: str, *, places: bool = True) -> int:
    """C, for a method that needs classes.

    Args:
        problem: What the method is built for.
        name: The method's.
        places: Whether an example may have several labels, as a sequence has.

    Raises:
        ArgumentError: if there are no classes, or no one class to an example.
    """
    model, num_classes = problem.model, problem.model.output_shape[-1]
    if model.task == "regression":
        raise ArgumentError("algorithm", "needs classes; accepted for a regression: methods that do not", name)
    if not places and len(model.output_shape) > 2:
        text = "needs one class to an example; accepted for sequences: methods that do not"
        raise ArgumentError("algorithm", text, name)
    return num_classes


def counts(split: Split, num_classes: int) -> Array:
    """(C,) how many of a client's examples, or of their places, are of each class."""

    def of_block(_, y, mask):
        found = jax.nn.one_hot(y, num_classes)
        return jnp.where(tree.per_row(mask, found), found, 0).reshape(-1, num_classes).sum(axis=0)

    return sum_over_examples(of_block, split)


def feature_sums(model: Model, params: Params, split: Split, num_classes: int) -> dict[str, Array]:
    """Of the features of a client's examples: "sums" (C, F) and "counts" (C,) by class, and "squares" () of norms.

    They are those of predictions: without dropout, with running statistics.
    """

    def of_block(x, y, mask):
        x, y = masked(x, y, mask)
        labels = jax.nn.one_hot(y, num_classes) * mask[:, None]
        features = jnp.where(mask[:, None], model.features(params, x), 0)
        return {"sums": labels.T @ features, "counts": labels.sum(axis=0), "squares": jnp.square(features).sum()}

    return sum_over_examples(of_block, split)


def means(sums: Array, counts: Array) -> Array:
    """Mean features (..., C, F) of sums (..., C, F) over counts (..., C) examples; zeros for classes without any."""
    return tree.scale(sums, 1 / jnp.where(counts > 0, counts, 1))


def num_features(model: Model) -> int:
    """F, the number of features that a model gives of an example."""
    return jax.eval_shape(model.features, model.network.shapes, model.example_input).shape[-1]
