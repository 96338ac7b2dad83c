"""Per-class statistics of a client's examples: counts and features."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Params, PyTree, Split
from pfljax.local.batches import masked, sum_over_examples
from pfljax.local.problem import Problem


def required(problem: Problem, name: str, *, per_position: bool = True) -> int:
    """Returns C for a method that needs classes.

    Args:
        problem: The problem of the method.
        name: Name of the method.
        per_position: Whether an example may have a label per position, as a sequence does.

    Raises:
        ArgumentError: if there are no classes, or more than one class per example.
    """
    model = problem.model
    num_classes = model.output_shape[-1]
    if model.task != "classification":
        what = "a regression" if model.task == "regression" else "several labels"
        raise ArgumentError("method", f"needs classes; choose another method for {what}", name)
    if not per_position and len(model.output_shape) > 2:
        text = "needs one class per example; choose another method for sequences"
        raise ArgumentError("method", text, name)
    return num_classes


def counts(split: Split, num_classes: int) -> Array:
    """(C,): number of a client's examples, or of their positions, in each class."""

    def count_block(x: PyTree, y: Array, mask: Array) -> Array:
        labels = jax.nn.one_hot(y, num_classes)
        real = jnp.where(tree.per_row(mask, labels), labels, 0)
        return real.reshape(-1, num_classes).sum(axis=0)

    return sum_over_examples(count_block, split)


def label_code(problem: Problem, split: Split) -> Array:
    """() mean loss of predicting each of a client's labels from the frequencies of its others; inf without classes.

    With n_c of n labels in class c and half a label added to each: -sum_c n_c / n log((n_c - 1/2) / (n - 1 + C/2)), or
    log C if that is less.
    """
    model = problem.model
    if model.task != "classification" or model.criterion is not None:
        return jnp.array(jnp.inf)
    num_classes = model.output_shape[-1]
    count = counts(split, num_classes)
    num_labels = count.sum()
    num_others = jnp.maximum(num_labels - 1, 0) + num_classes / 2
    logs = jnp.log(jnp.maximum(count - 0.5, 0.5) / num_others)
    mean_loss = -(count * logs).sum() / jnp.maximum(num_labels, 1)
    return jnp.minimum(mean_loss, math.log(num_classes))


class FeatureSums(NamedTuple):
    """Sums over a client's examples of the features of a model.

    Attributes:
        sums: (C, F) of each class's features.
        counts: (C,) number of examples of each class.
        squares: () of the features' squared norms.
        products: (C, F, F) of each class's outer products of features; None if they are not wanted.
    """

    sums: Array
    counts: Array
    squares: Array
    products: Array | None = None


def feature_sums(
    problem: Problem, params: Params, split: Split, num_classes: int, *, products: bool = False
) -> FeatureSums:
    """Adds up inference features, which are without dropout, with running statistics.

    Args:
        problem: The problem of the method.
        params: A whole model, with its batch statistics.
        split: The client's examples.
        num_classes: C.
        products: Whether outer products of features are added up, too.
    """

    def sum_block(x: PyTree, y: Array, mask: Array) -> FeatureSums:
        x, y = masked(x, y, mask)
        labels = jax.nn.one_hot(y, num_classes) * mask[:, None]
        features = jnp.where(mask[:, None], problem.model.features(params, x), 0)
        outer = None
        if products:
            outer = jnp.einsum("bc,bf,bg->cfg", labels, features, features)
        return FeatureSums(
            sums=labels.T @ features,
            counts=labels.sum(axis=0),
            squares=jnp.square(features).sum(),
            products=outer,
        )

    return sum_over_examples(sum_block, split)


def means(sums: Array, counts: Array) -> Array:
    """Mean features (..., C, F) from sums (..., C, F) and counts (..., C); zeros for classes without examples."""
    return tree.scale(sums, 1 / jnp.where(counts > 0, counts, 1))


def num_features(problem: Problem) -> int:
    """F, the number of features that the model computes for an example."""
    model = problem.model
    return jax.eval_shape(model.features, model.network.shapes, model.example_input).shape[-1]
