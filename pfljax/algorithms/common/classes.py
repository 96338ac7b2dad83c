"""Per-class statistics of a client's examples: counts and features."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Params, Split
from pfljax.local.batches import masked, sum_over_examples
from pfljax.local.problem import Problem
from pfljax.models import Model


def required(problem: Problem, name: str, *, places: bool = True) -> int:
    """Returns C for a method that needs classes.

    Args:
        problem: The problem of the method.
        name: Name of the method.
        places: Whether an example may have several labels, as a sequence does.

    Raises:
        ArgumentError: if there are no classes, or more than one class per example.
    """
    model, num_classes = problem.model, problem.model.output_shape[-1]
    if model.task != "classification":
        what = "a regression" if model.task == "regression" else "several labels"
        raise ArgumentError("algorithm", f"needs classes; choose another method for {what}", name)
    if not places and len(model.output_shape) > 2:
        text = "needs one class per example; choose another method for sequences"
        raise ArgumentError("algorithm", text, name)
    return num_classes


def counts(split: Split, num_classes: int) -> Array:
    """(C,): number of a client's examples, or of their positions, in each class."""

    def of_block(_, y, mask):
        found = jax.nn.one_hot(y, num_classes)
        return jnp.where(tree.per_row(mask, found), found, 0).reshape(-1, num_classes).sum(axis=0)

    return sum_over_examples(of_block, split)


def feature_sums(model: Model, params: Params, split: Split, num_classes: int) -> dict[str, Array]:
    """Features of a client's examples: per-class "sums" (C, F) and "counts" (C,), and "squares" (), summed over norms.

    These are inference features: without dropout, with running statistics.
    """

    def of_block(x, y, mask):
        x, y = masked(x, y, mask)
        labels = jax.nn.one_hot(y, num_classes) * mask[:, None]
        features = jnp.where(mask[:, None], model.features(params, x), 0)
        return {"sums": labels.T @ features, "counts": labels.sum(axis=0), "squares": jnp.square(features).sum()}

    return sum_over_examples(of_block, split)


def means(sums: Array, counts: Array) -> Array:
    """Mean features (..., C, F) from sums (..., C, F) and counts (..., C); zeros for classes without examples."""
    return tree.scale(sums, 1 / jnp.where(counts > 0, counts, 1))


def num_features(model: Model) -> int:
    """F, the number of features that a model computes for an example."""
    return jax.eval_shape(model.features, model.network.shapes, model.example_input).shape[-1]
