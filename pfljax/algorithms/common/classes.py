"""What methods that treat classes apart read of a client's labels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pfljax.core import tree
from pfljax.core.errors import ArgumentError
from pfljax.core.types import Array, Params, Split
from pfljax.local.batches import sum_over_examples
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
    """Of the features of a client's examples: "sums" (C, F) and "counts" (C,) by class, and "squares" () of norms."""

    def of_block(x, y, mask):
        real = mask[:, None]
        labels = jnp.where(real, jax.nn.one_hot(y, num_classes), 0)
        features = jnp.where(real, model.features(params, x), 0)
        return {"sums": labels.T @ features, "counts": labels.sum(axis=0), "squares": jnp.square(features).sum()}

    return sum_over_examples(of_block, split)
