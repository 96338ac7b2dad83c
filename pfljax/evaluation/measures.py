"""Metrics of a client's predictions other than accuracy and loss: functions of the user, and some by name.

A metric is a function (outputs, y) -> number of one client's examples, in NumPy arrays on the host: class probabilities
(n, C) and classes (n,), predicted values and targets for regression, with further axes where targets have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.fields import nearest
from pfljax.contract.types import Algorithm, Prediction, PyTree, Split
from pfljax.evaluation.metrics import predict
from pfljax.local.batches import of_examples
from pfljax.local.problem import Problem

BINS = 15  # of `calibration_error`
# Other entries of clients' rows, and beginnings of others' names.
TAKEN = {"client", "name", "n_train", "n_test", "distribution", "target", "split", "group", "size", "rounds", "clients"}
BEGINNINGS = ("validation_", "train_")
Metric = Callable[[np.ndarray, np.ndarray], Any]


def f1(outputs: np.ndarray, y: np.ndarray) -> float:
    """Macro F1: the mean F1 of the classes that occur or are predicted."""
    from sklearn.metrics import f1_score  # heavy

    outputs, y = of_classes(outputs, y)
    none: Any = 0  # of classes that occur but are not predicted
    return float(f1_score(y, outputs.argmax(axis=-1), average="macro", zero_division=none)) if y.size else np.nan


def balanced_accuracy(outputs: np.ndarray, y: np.ndarray) -> float:
    """The mean recall of the classes that occur."""
    outputs, y = of_classes(outputs, y)
    right = outputs.argmax(axis=-1) == y
    return float(np.mean([right[y == each].mean() for each in np.unique(y)])) if y.size else np.nan


def auroc(outputs: np.ndarray, y: np.ndarray) -> float:
    """The area under the ROC curve of each class that occurs against the rest, averaged; NaN with a single class."""
    from sklearn.metrics import roc_auc_score  # heavy

    outputs, y = of_classes(outputs, y)
    classes = np.unique(y)
    if len(classes) < 2:
        return np.nan
    return float(np.mean([roc_auc_score(y == each, outputs[:, each]) for each in classes]))


def calibration_error(outputs: np.ndarray, y: np.ndarray) -> float:
    """The expected calibration error: |accuracy - confidence| in 15 equal bins of confidence, weighted by size."""
    outputs, y = of_classes(outputs, y)
    surplus = outputs.max(axis=-1) - (outputs.argmax(axis=-1) == y)
    bins = np.minimum((outputs.max(axis=-1) * BINS).astype(int), BINS - 1)
    return float(np.abs(np.bincount(bins, surplus, BINS)).sum() / len(y)) if y.size else np.nan


def perplexity(outputs: np.ndarray, y: np.ndarray) -> float:
    """exp of the mean negative log likelihood of all tokens, or other classes, that there are to predict."""
    outputs, y = of_classes(outputs, y)
    likelihood = np.maximum(outputs[np.arange(len(y)), y], np.finfo(np.float32).tiny)
    return float(np.exp(-np.log(likelihood.astype(np.float64)).mean())) if y.size else np.nan


def of_classes(outputs: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (m, C) and classes (m,) of all places of sequences and images that have a class to predict."""
    outputs, y = outputs.reshape(-1, outputs.shape[-1]), y.reshape(-1).astype(np.int64)
    real = (y >= 0) & (y < outputs.shape[-1])
    return outputs[real], y[real]


def f1_of_labels(outputs: np.ndarray, y: np.ndarray) -> float:
    """Macro F1 of the labels that occur or are predicted, which they are from probability 0.5 on."""
    chosen, real = outputs >= 0.5, y > 0
    found, both = (chosen.astype(int) + real).sum(axis=0), (chosen & real).sum(axis=0)
    return float(np.mean(2 * both[found > 0] / found[found > 0])) if found.any() else np.nan


def over_labels(metric: Metric) -> Metric:
    """The mean over labels of a metric of two classes; labels where it is NaN are left out."""

    def mean(outputs: np.ndarray, y: np.ndarray) -> float:
        both = np.stack([1 - outputs, outputs], axis=-1)
        values = np.array([metric(both[:, label], y[:, label]) for label in range(y.shape[1])])
        return float(values[~np.isnan(values)].mean()) if not np.isnan(values).all() else np.nan

    return mean


METRICS: dict[str, Metric] = {
    "f1": f1,
    "balanced_accuracy": balanced_accuracy,
    "auroc": auroc,
    "calibration_error": calibration_error,
    "perplexity": perplexity,
}


def named(metrics: Mapping[str, Metric] | Sequence[str] | None, reserved: set[str], task: str) -> dict[str, Metric]:
    """Returns functions, or the metrics named in `METRICS`, by name.

    Raises `ArgumentError` for one that is not accepted. Refused are `reserved` names and those of other columns, and
    metrics that do not fit the clients' task.
    """
    given = metrics if isinstance(metrics, Mapping) else {name: name for name in metrics or ()}
    found: dict[str, Metric] = {}
    for name, metric in given.items():
        if isinstance(metric, str):
            if metric not in METRICS:
                raise ArgumentError("metrics", f"is no function, and unknown; {nearest(metric, METRICS)}", metric)
            if task == "regression":
                raise ArgumentError("metrics", "needs classes; accepted for regression: a function", metric)
            known = METRICS[metric]
            if known is perplexity and task == "multilabel":
                raise ArgumentError(
                    "metrics", "needs one class per place; accepted for several labels: the others", metric
                )
            labels = f1_of_labels if known is f1 else over_labels(known)
            metric = labels if task == "multilabel" else known
        if not callable(metric):
            raise ArgumentError("metrics", "accepted: functions (outputs, y) -> number, by name", name)
        if name in reserved | TAKEN or not str(name).isidentifier() or str(name).startswith(BEGINNINGS):
            others = ", ".join([*sorted(reserved | TAKEN), *(f"{each}..." for each in BEGINNINGS)])
            raise ArgumentError("metrics", f"accepted: names such as my_metric, other than {others}", name)
        found[name] = metric
    return found


OUTPUTS = ("outputs", "y", "size")


def outputs_of(problem: Problem, algorithm: Algorithm, prediction: Prediction, split: Split) -> dict[str, PyTree]:
    """A client's predictions for its own examples (`OUTPUTS`): outputs (n_max, ...), y (n_max, ...) and size ()."""
    of = lambda x, y: {"outputs": predict(problem, algorithm, prediction, x), "y": y}
    return of_examples(of, split) | {"size": split.size}


def row_bytes(problem: Problem, num_examples: int) -> int:
    """Bytes of a client's predictions."""
    return 4 * num_examples * math.prod(problem.model.output_shape[1:])


def measured(metrics: Mapping[str, Metric], found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Computes metrics of clients' predictions, which `outputs_of` returned, in NumPy arrays.

    Returns one float32 for each client, by name; NaN for clients without examples. Raises `ArgumentError` if a function
    raises an error, or returns anything but a number.
    """
    values = {name: np.full(len(found["size"]), np.nan, np.float32) for name in metrics}
    for client in np.flatnonzero(found["size"]):
        size = found["size"][client]
        outputs, y = found["outputs"][client, :size], found["y"][client, :size]
        for name, metric in metrics.items():
            try:
                values[name][client] = float(np.asarray(metric(outputs, y)).item())
            except Exception as error:  # a user's function
                line = (str(error).splitlines() or [""])[0]
                text = f"for outputs {outputs.shape} and y {y.shape}, raised {type(error).__name__}: {line}"
                raise ArgumentError("metrics", f"{text}; accepted: functions that return a number", name) from error
    return values
