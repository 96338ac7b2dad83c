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


def label_codes(problem: Problem, split: Split) -> Array:
    """(C,) summed losses of predicting a client's labels of each class from the frequencies of its others.

    With n_c of n labels in class c and half a label added to each: -n_c log((n_c - 1/2) / (n - 1 + C/2)), or n_c log C
    if that is less. Labels at positions of a sequence count as parts of one example. inf with a criterion of the user.
    """
    model = problem.model
    num_classes = model.output_shape[-1]
    if model.criterion is not None:
        return jnp.full((num_classes,), jnp.inf)
    count = counts(split, num_classes)
    num_labels = count.sum()
    num_others = jnp.maximum(num_labels - 1, 0) + num_classes / 2
    code = -jnp.log(jnp.maximum(count - 0.5, 0.5) / num_others)
    codes = count * jnp.minimum(code, math.log(num_classes))

    # A sequence's loss is the mean over its positions.
    is_sequence = len(model.output_shape) > 2
    return codes * split.size / jnp.maximum(num_labels, 1) if is_sequence else codes


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
