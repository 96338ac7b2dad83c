"""Metrics of a client's predictions, and their summary over clients."""

from __future__ import annotations

from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract.types import Algorithm, Array, Metrics, Prediction, Split
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
    of_models = problem.plan.over_models(
        lambda params: problem.model.apply(params, x), prediction.models
    )
    return problem.model.mixed(prediction.weights, of_models)


def predict(problem: Problem, algorithm: Algorithm, prediction: Prediction, x: Array) -> Array:
    """One client's predictions for x: the probabilities, or regression values, of its `outputs`."""
    return problem.model.predictions_of(outputs(problem, algorithm, prediction, x))


def evaluate(
    problem: Problem, algorithm: Algorithm, prediction: Prediction, split: Split
) -> Metrics:
    """Scores a client's predictions on its own examples; NaN for a client without examples.

    Returns "loss" (): the mean loss (see `Model.losses_of`); for classification, "accuracy" () in [0, 1]; and the
    algorithm's own measures. A sequence counts with the mean over its positions.
    """
    model = problem.model

    def sums(x, y, mask):
        logits = outputs(problem, algorithm, prediction, x)
        total = {"loss": jnp.where(mask, model.losses_of(logits, y), 0).sum()}
        if model.task == "classification":
            total["accuracy"] = jnp.where(
                mask, model.over_places(logits.argmax(axis=-1) == y, y), 0
            ).sum()
        return total

    totals = sum_over_examples(sums, split)
    found = jax.tree.map(
        lambda t: jnp.where(split.size > 0, t / jnp.maximum(split.size, 1), jnp.nan), totals
    )

    def of(x):
        return predict(problem, algorithm, prediction, x)

    return found | {name: measure(of, split) for name, measure in algorithm.engine.measures.items()}


def score_of_task(task: str) -> str:
    """The score by which clients are ranked and methods compared: "accuracy" for classification, otherwise "loss"."""
    return "accuracy" if task == "classification" else "loss"


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
    real = sizes > 0
    out = {"loss": float(np.average(values["loss"][real], weights=sizes[real]))}
    if "accuracy" in values:
        accuracy = values["accuracy"][real].astype(np.float64)
        out |= {
            "accuracy": float(np.average(accuracy, weights=sizes[real])),
            "accuracy_mean": float(accuracy.mean()),
            "accuracy_std": float(accuracy.std()),
            "accuracy_bottom_decile": float(np.percentile(accuracy, 10)),
            "accuracy_min": float(accuracy.min()),
        }
    for name in [name for name in values if name not in ("loss", "accuracy")]:
        found = values[name][real & ~np.isnan(values[name])].astype(np.float64)
        worst = 10 if sign_of(name, lower_is_better) > 0 else 90
        out[name] = float(found.mean()) if found.size else float("nan")
        out[f"{name}_bottom_decile"] = (
            float(np.percentile(found, worst)) if found.size else float("nan")
        )
    return out
