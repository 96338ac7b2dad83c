"""Metrics of a client's predictions, and their summary over clients."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import jax.numpy as jnp
import numpy as np

from pfljax.contract.types import Algorithm, Array, Metrics, Params, Prediction, PyTree, Split
from pfljax.local.batches import sum_over_examples
from pfljax.local.problem import Problem


def outputs(problem: Problem, algorithm: Algorithm, prediction: Prediction, x: Array) -> Array:
    """One client's outputs for x (B, *features), by `Algorithm.apply` or the mixture of its models.

    These are logits (B, C) of classes or labels, for sequences (B, T, C), or regression values (B,). The prediction has
    its models and weights.
    """
    if algorithm.apply is not None:
        return algorithm.apply(prediction.models, prediction.inputs, x)
    assert prediction.weights is not None

    def apply(params: Params) -> Array:
        return problem.model.apply(params, x)

    model_outputs = problem.plan.over_models(apply, prediction.models)
    return problem.model.mixed(prediction.weights, model_outputs)


def predict(problem: Problem, algorithm: Algorithm, prediction: Prediction, x: Array) -> Array:
    """One client's predictions for x: the probabilities, or regression values, of its `outputs`."""
    logits = outputs(problem, algorithm, prediction, x)
    return problem.model.predict_from_outputs(logits)


def evaluate(
    problem: Problem, algorithm: Algorithm, prediction: Prediction, split: Split
) -> Metrics:
    """Scores a client's predictions on its own examples; NaN for a client without examples.

    Returns "loss" (): the mean loss (see `Model.loss_from_outputs`); for classification, "accuracy" () in [0, 1]; and
    the algorithm's own measures. A sequence counts with the mean over its positions.
    """
    model = problem.model

    def sums(x: PyTree, y: Array, mask: Array) -> dict[str, Array]:
        logits = outputs(problem, algorithm, prediction, x)
        losses = model.loss_from_outputs(logits, y)
        total: dict[str, Array] = {"loss": jnp.where(mask, losses, 0).sum()}
        if model.task == "classification":
            is_right = model.mean_over_positions(logits.argmax(axis=-1) == y, y)
            total["accuracy"] = jnp.where(mask, is_right, 0).sum()
        return total

    def mean(total: Array) -> Array:
        return jnp.where(split.size > 0, total / jnp.maximum(split.size, 1), jnp.nan)

    def predictions(x: Array) -> Array:
        return predict(problem, algorithm, prediction, x)

    totals = sum_over_examples(sums, split)
    values: Metrics = {name: mean(total) for name, total in totals.items()}
    for name, measure in algorithm.engine.measures.items():
        values[name] = measure(predictions, split)
    return values


def score_of_task(task: str) -> str:
    """The score by which clients are ranked and methods compared: "accuracy" for classification, otherwise "loss"."""
    return "accuracy" if task == "classification" else "loss"


def is_percent(score: str) -> bool:
    """Whether tables and figures have a score in percent, as they have accuracies."""
    return score in ("accuracy", "balanced_accuracy")


FEW = 10  # test examples; a score that rests on fewer is mostly noise
OF_ALL_EXAMPLES = ("accuracy", "loss")  # scores that rest on all examples, whatever their classes


def rests_on_few(score: str, num_examples: float, classes: Mapping[str, float]) -> bool:
    """Whether a client's score rests on fewer than `FEW` test examples, or, for most metrics, of a class.

    Args:
        score: The name of the score.
        num_examples: The client's number of test examples.
        classes: Its number of test examples by class. Of more than two classes, those without examples do not count,
            since the client does not have them. Empty: they are not known.
    """
    if score in OF_ALL_EXAMPLES or not classes:
        return num_examples < FEW
    counts = list(classes.values())
    if len(counts) > 2:
        counts = [count for count in counts if count]
    return min(counts, default=0) < FEW


def few_examples(score: str) -> str:
    """Says what a score that `rests_on_few` examples rests on."""
    examples = f"fewer than {FEW} test examples"
    return examples if score in OF_ALL_EXAMPLES else f"{examples}, or of a class"


def sign_of(name: str, lower_is_better: Collection[str] = ()) -> int:
    """1 if high values of a score are good, -1 if low ones are: a loss, and what is named in `lower_is_better`."""
    return -1 if name == "loss" or name in lower_is_better else 1


def summarize(
    values: dict[str, np.ndarray], sizes: Array, lower_is_better: Collection[str] = ()
) -> dict[str, float]:
    """Fairness summary of metrics (K,) over clients with numbers of test examples (K,); those without are left out.

    Returns "loss" and "accuracy", weighted by n_k, "accuracy_mean" (plain), "accuracy_std" (population deviation over
    the scored clients), "accuracy_bottom_decile" (the 10th percentile over clients), "accuracy_min". Of any other
    metric, the plain mean over clients and NAME_bottom_decile, the value that 10 % of the clients are worse than: the
    10th percentile, or the 90th if the metric is named in `lower_is_better`. Clients where it is NaN are left out.
    """
    scored = sizes > 0
    weights = sizes[scored]
    summary = {"loss": float(np.average(values["loss"][scored], weights=weights))}
    if "accuracy" in values:
        accuracy = values["accuracy"][scored].astype(np.float64)
        summary |= {
            "accuracy": float(np.average(accuracy, weights=weights)),
            "accuracy_mean": float(accuracy.mean()),
            "accuracy_std": float(accuracy.std()),
            "accuracy_bottom_decile": float(np.percentile(accuracy, 10)),
            "accuracy_min": float(accuracy.min()),
        }
    for name, client_values in values.items():
        if name in ("loss", "accuracy"):
            continue
        known = client_values[scored & ~np.isnan(client_values)].astype(np.float64)
        mean = float("nan")
        decile = float("nan")
        if known.size:
            percentile = 10 if sign_of(name, lower_is_better) > 0 else 90
            mean = float(known.mean())
            decile = float(np.percentile(known, percentile))
        summary[name] = mean
        summary[f"{name}_bottom_decile"] = decile
    return summary
