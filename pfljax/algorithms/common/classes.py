"""Per-class statistics of a client's examples: counts and features."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, Params, Split
from pfljax.local.batches import masked, sum_over_examples
from pfljax.local.problem import Problem


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
        raise ArgumentError("method", f"needs classes; choose another method for {what}", name)
    if not places and len(model.output_shape) > 2:
        text = "needs one class per example; choose another method for sequences"
        raise ArgumentError("method", text, name)
    return num_classes


def counts(split: Split, num_classes: int) -> Array:
    """(C,): number of a client's examples, or of their positions, in each class."""

    def of_block(_, y, mask):
        found = jax.nn.one_hot(y, num_classes)
        return jnp.where(tree.per_row(mask, found), found, 0).reshape(-1, num_classes).sum(axis=0)

    return sum_over_examples(of_block, split)


def label_code(problem: Problem, split: Split) -> Array:
    """() mean loss of predicting each of a client's labels from the frequencies of its others; inf without classes.

    With n_c of n labels in class c and half a label added to each: -sum_c n_c / n log((n_c - 1/2) / (n - 1 + C/2)), or
    log C if that is less.
    """
    model = problem.model
    if model.task != "classification" or model.criterion is not None:
        return jnp.array(jnp.inf)
    found = counts(split, model.output_shape[-1])
    num = found.sum()
    logs = jnp.log(jnp.maximum(found - 0.5, 0.5) / (jnp.maximum(num - 1, 0) + len(found) / 2))
    return jnp.minimum(-(found * logs).sum() / jnp.maximum(num, 1), math.log(len(found)))


def feature_sums(
    problem: Problem, params: Params, split: Split, num_classes: int, *, products: bool = False
) -> dict[str, Array]:
    """Features of a client's examples: per-class "sums" (C, F) and "counts" (C,), and "squares" (), summed over norms.

    With `products`, also the per-class sums of their outer products, (C, F, F). These are inference features: without
    dropout, with running statistics.
    """

    def of_block(x, y, mask):
        x, y = masked(x, y, mask)
        labels = jax.nn.one_hot(y, num_classes) * mask[:, None]
        features = jnp.where(mask[:, None], problem.model.features(params, x), 0)
        found = {"sums": labels.T @ features, "counts": labels.sum(axis=0), "squares": jnp.square(features).sum()}
        return found | ({"products": jnp.einsum("bc,bf,bg->cfg", labels, features, features)} if products else {})

    return sum_over_examples(of_block, split)


def means(sums: Array, counts: Array) -> Array:
    """Mean features (..., C, F) from sums (..., C, F) and counts (..., C); zeros for classes without examples."""
    return tree.scale(sums, 1 / jnp.where(counts > 0, counts, 1))


def num_features(problem: Problem) -> int:
    """F, the number of features that the model computes for an example."""
    model = problem.model
    return jax.eval_shape(model.features, model.network.shapes, model.example_input).shape[-1]
