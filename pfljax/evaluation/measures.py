"""Metrics of a client's predictions other than accuracy and loss: functions of the user, and some by name.

A metric of a user's is a function (outputs, y) -> number of one client's examples, in NumPy arrays on the host: class
probabilities (n, C) and classes (n,), predicted values and targets for regression, with further axes where targets have
them. Probabilities are float64, computed from logits. High values are good, unless `metric` says otherwise.

Metrics that are known by name get logits instead, which keep their order where probabilities are rounded to 0 or 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pfljax.contract.errors import ArgumentError, warn
from pfljax.contract.types import Algorithm, Array, Prediction, PyTree, Split
from pfljax.evaluation.metrics import outputs, score_of_task
from pfljax.local.batches import over_examples
from pfljax.local.problem import Problem
from pfljax.settings.fields import checked, in_their_case, nearest

BINS = 15  # of `calibration_error`
# Other entries of clients' rows, and beginnings of others' names.
TAKEN = {
    "client",
    "name",
    "n_train",
    "n_test",
    "group",
    "target",
    "split",
    "size",
    "rounds",
    "clients",
    "classes",
}
TAKEN |= {"distribution"}  # the former name of "group" in files
BEGINNINGS = ("validation_", "train_")
Function = Callable[[np.ndarray, np.ndarray], Any]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric of one client's predictions.

    Attributes:
        function: (outputs, y) -> a number.
        higher_is_better: Whether high values are good.
        takes_logits: Whether the function gets logits in place of probabilities.
        is_direction_assumed: Whether nobody has said which values are good.
    """

    function: Function
    higher_is_better: bool = True
    takes_logits: bool = False
    is_direction_assumed: bool = False

    def __call__(self, outputs: np.ndarray, y: np.ndarray) -> Any:
        return self.function(outputs, y)


@checked()
def metric(function: Callable | None = None, *, higher_is_better: bool = True) -> Any:
    """Says whether high or low values of your own metric are good: `metrics={"mae": pfl.metrics.metric(mae, ...)}`.

    Bottom deciles, orders from the worst to the best and marks of the best depend on it, and ranks, best rounds and
    tuning if it is the `score` of a run. As a decorator: `@pfl.metrics.metric(higher_is_better=False)`.

    Args:
        function: (outputs, y) -> a number, of one client's examples; see `evaluation.measures`.
        higher_is_better: Whether high values are good, as for functions that are passed without `metric`.

    Raises:
        ArgumentError: if the function is none.

    Examples:
        >>> import numpy as np
        >>> import pfljax as pfl
        >>> @pfl.metrics.metric(higher_is_better=False)
        ... def mean_absolute_error(outputs, y):
        ...     return np.abs(outputs - y).mean()
        >>> float(mean_absolute_error(np.array([1.0, 2.0]), np.array([1.0, 4.0])))
        1.0
        >>> mean_absolute_error.higher_is_better
        False
    """
    if function is None:
        return functools.partial(metric, higher_is_better=higher_is_better)
    if isinstance(function, Metric):
        return dataclasses.replace(
            function, higher_is_better=higher_is_better, is_direction_assumed=False
        )
    return Metric(function, higher_is_better)


def f1(logits: np.ndarray, y: np.ndarray) -> float:
    """Macro F1: the mean F1 of the classes that occur or are predicted.

    Examples:
        Of three examples, the last one is wrong:

        >>> import numpy as np
        >>> import pfljax as pfl
        >>> logits = np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0]])
        >>> y = np.array([0, 1, 1])
        >>> round(pfl.metrics.f1(logits, y), 4)
        0.6667
    """
    from sklearn.metrics import f1_score  # heavy

    logits, y = flat_classes(logits, y)
    if not y.size:
        return np.nan
    not_predicted: Any = 0  # F1 of classes that occur but are not predicted
    predicted = logits.argmax(axis=-1)
    return float(f1_score(y, predicted, average="macro", zero_division=not_predicted))


def balanced_accuracy(logits: np.ndarray, y: np.ndarray) -> float:
    """The mean recall of the classes that occur.

    Examples:
        Class 0 has a recall of 1, class 1 of 1 / 2:

        >>> import numpy as np
        >>> import pfljax as pfl
        >>> logits = np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0]])
        >>> y = np.array([0, 1, 1])
        >>> pfl.metrics.balanced_accuracy(logits, y)
        0.75
    """
    logits, y = flat_classes(logits, y)
    if not y.size:
        return np.nan
    is_right = logits.argmax(axis=-1) == y
    recalls = [is_right[y == label].mean() for label in np.unique(y)]
    return float(np.mean(recalls))


def auroc(logits: np.ndarray, y: np.ndarray) -> float:
    """The area under the ROC curve of each class that occurs against the rest, averaged; NaN with a single class.

    Examples are ordered by log odds, which have the order of the probabilities.

    Examples:
        Of the two pairs of examples of different classes, one is in the right order:

        >>> import numpy as np
        >>> import pfljax as pfl
        >>> logits = np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
        >>> y = np.array([0, 1, 1])
        >>> pfl.metrics.auroc(logits, y)
        0.5
    """
    from scipy import special  # slow to import
    from sklearn.metrics import roc_auc_score  # heavy

    logits, y = flat_classes(logits, y)
    classes = np.unique(y)
    if len(classes) < 2:
        return np.nan
    areas = []
    for label in classes:
        others = np.delete(logits, label, axis=1)
        log_odds = logits[:, label] - special.logsumexp(others, axis=1)
        areas.append(roc_auc_score(y == label, log_odds))
    return float(np.mean(areas))


def calibration_error(logits: np.ndarray, y: np.ndarray) -> float:
    """The expected calibration error: |accuracy - confidence| in 15 equal bins of confidence, weighted by size.

    Examples:
        The model is sure of both examples, and right about one:

        >>> import numpy as np
        >>> import pfljax as pfl
        >>> logits = np.array([[100.0, 0.0], [100.0, 0.0]])
        >>> y = np.array([0, 1])
        >>> pfl.metrics.calibration_error(logits, y)
        0.5
    """
    from scipy import special  # slow to import

    logits, y = flat_classes(logits, y)
    if not y.size:
        return np.nan
    confidence = special.softmax(logits, axis=-1).max(axis=-1)
    surplus = confidence - (logits.argmax(axis=-1) == y)
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    surplus_of_bins = np.bincount(bins, surplus, BINS)
    return float(np.abs(surplus_of_bins).sum() / len(y))


def perplexity(logits: np.ndarray, y: np.ndarray) -> float:
    """exp of the mean negative log likelihood of all tokens, or other classes, that there are to predict.

    Examples:
        Equal logits for four classes:

        >>> import numpy as np
        >>> import pfljax as pfl
        >>> logits = np.zeros((3, 4))
        >>> y = np.array([0, 1, 3])
        >>> round(pfl.metrics.perplexity(logits, y), 6)
        4.0
    """
    from scipy import special  # slow to import

    logits, y = flat_classes(logits, y)
    if not y.size:
        return np.nan
    log_probabilities = special.log_softmax(logits, axis=-1)
    log_likelihood = log_probabilities[np.arange(len(y)), y]
    return float(np.exp(-log_likelihood.mean()))


def mae(values: np.ndarray, y: np.ndarray) -> float:
    """The mean absolute error of a regression.

    Examples:
        >>> import numpy as np
        >>> import pfljax as pfl
        >>> pfl.metrics.mae(np.array([1.0, 2.0]), np.array([1.0, 5.0]))
        1.5
    """
    return float(np.abs(_errors(values, y)).mean()) if y.size else np.nan


def rmse(values: np.ndarray, y: np.ndarray) -> float:
    """The root of the mean squared error of a regression.

    Examples:
        >>> import numpy as np
        >>> import pfljax as pfl
        >>> pfl.metrics.rmse(np.array([1.0, 2.0]), np.array([3.0, 4.0]))
        2.0
    """
    return float(np.sqrt(np.square(_errors(values, y)).mean())) if y.size else np.nan


def r2(values: np.ndarray, y: np.ndarray) -> float:
    """The coefficient of determination of a regression, mean over outputs; NaN where all targets are equal.

    Examples:
        A model that predicts the mean of the targets explains nothing:

        >>> import numpy as np
        >>> import pfljax as pfl
        >>> pfl.metrics.r2(np.array([2.0, 2.0]), np.array([1.0, 3.0]))
        0.0
    """
    if not y.size:
        return np.nan
    squares = np.square(_errors(values, y)).sum(axis=0)
    variation = np.square(y - y.mean(axis=0, dtype=np.float64)).sum(axis=0)
    return float(np.mean(1 - squares / variation)) if np.all(variation > 0) else np.nan


def _errors(values: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Values minus targets, float64."""
    return values.reshape(y.shape).astype(np.float64) - y


def flat_classes(logits: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits (m, C), float64, and classes (m,) of all positions of sequences and images with a class to predict."""
    logits = logits.reshape(-1, logits.shape[-1])
    y = y.reshape(-1).astype(np.int64)
    real = (y >= 0) & (y < logits.shape[-1])
    return logits[real].astype(np.float64), y[real]


def f1_of_labels(logits: np.ndarray, y: np.ndarray) -> float:
    """Macro F1 of the labels that occur or are predicted, which they are from probability 0.5 on."""
    is_predicted = logits >= 0
    is_true = y > 0
    either = (is_predicted.astype(int) + is_true).sum(axis=0)
    both = (is_predicted & is_true).sum(axis=0)
    if not either.any():
        return np.nan
    counts = either > 0
    return float(np.mean(2 * both[counts] / either[counts]))


def over_labels(function: Function) -> Function:
    """The mean over labels of a metric of two classes; labels where it is NaN are left out."""

    def mean(logits: np.ndarray, y: np.ndarray) -> float:
        both = np.stack([np.zeros_like(logits), logits], axis=-1)
        values = np.array([function(both[:, label], y[:, label]) for label in range(y.shape[1])])
        known = values[~np.isnan(values)]
        return float(known.mean()) if known.size else np.nan

    return mean


METRICS: dict[str, Metric] = {
    "f1": Metric(f1, takes_logits=True),
    "balanced_accuracy": Metric(balanced_accuracy, takes_logits=True),
    "auroc": Metric(auroc, takes_logits=True),
    "calibration_error": Metric(calibration_error, higher_is_better=False, takes_logits=True),
    "perplexity": Metric(perplexity, higher_is_better=False, takes_logits=True),
    "mae": Metric(mae, higher_is_better=False),
    "rmse": Metric(rmse, higher_is_better=False),
    "r2": Metric(r2),
}
OF_REGRESSION = ("mae", "rmse", "r2")


def names_for_task(task: str) -> list[str]:
    """The names in `METRICS` that fit a task."""
    is_regression = task == "regression"
    return [name for name in METRICS if (name in OF_REGRESSION) == is_regression]


def named(
    metrics: Mapping[str, Any] | Sequence[str] | None, reserved: set[str], task: str
) -> dict[str, Metric]:
    """Returns the metrics of a run, functions of the user's or names in `METRICS`, by name.

    Raises `ArgumentError` for one that is not accepted. Refused are `reserved` names and those of other columns, and
    metrics that do not fit the clients' task.
    """
    if not isinstance(metrics, Mapping):
        names = [in_their_case(name, METRICS) for name in metrics or ()]
        metrics = {name: name for name in names}
    names_of_functions = {id(known.function): name for name, known in METRICS.items()}
    run_metrics: dict[str, Metric] = {}
    for name, function in metrics.items():
        known = names_of_functions.get(id(function))
        if isinstance(function, str):
            known = matching(function, METRICS) or function
            # The name of a metric that is listed, and not renamed, is written as in `METRICS`.
            name = known if name == function else name
        if known is not None:
            run_metrics[name] = metric_for_task(known, task)
        elif isinstance(function, Metric):
            run_metrics[name] = function
        elif callable(function):
            run_metrics[name] = Metric(function, is_direction_assumed=True)
        else:
            text = "accepted: functions (outputs, y) -> number, by name"
            raise ArgumentError("metrics", text, name)
        check_name(name, reserved | TAKEN)
    return run_metrics


def matching(name: str, names: Iterable[str]) -> str | None:
    """Returns the member of `names` that equals `name` but for case; None if none does, or several do."""
    names = list(names)
    if name in names:
        return name
    wanted = name.casefold()
    same = [candidate for candidate in names if candidate.casefold() == wanted]
    return same[0] if len(same) == 1 else None


class Scored(NamedTuple):
    """The score of a run, by which clients, rounds and methods are ordered.

    Attributes:
        name: Its name: "accuracy", "loss" or that of a metric.
        higher_is_better: Whether high values are good.
        metrics: The metrics of the run, which include it unless it is the accuracy or the loss.
    """

    name: str
    higher_is_better: bool
    metrics: Mapping[str, Metric]


def scored(
    score: str | Callable | None, metrics: Mapping[str, Metric], reserved: set[str], task: str
) -> Scored:
    """Returns the score of a run. Warns if it is a function, and nobody has said which of its values are good.

    Args:
        score: Its name, in upper or lower case, or a function (outputs, y) -> number; None: that of the task. A metric
            in `METRICS` and a function are added to the metrics of the run.
        metrics: The metrics of the run; see `named`.
        reserved: See `named`.
        task: The task of the clients.

    Raises:
        ArgumentError: if there is no such score for the task.
    """
    default = score_of_task(task)
    if score is None:
        return Scored(default, default != "loss", metrics)
    if not isinstance(score, str):
        chosen = _scored_by_function(score, metrics, reserved, task)
        _warn_of_assumed_direction(chosen)
        return chosen
    task_scores = dict.fromkeys([default, "loss"])
    name = matching(score, [*task_scores, *metrics])
    if name in task_scores:
        return Scored(name, name != "loss", metrics)
    if name is not None:
        chosen = Scored(name, metrics[name].higher_is_better, metrics)
        _warn_of_assumed_direction(chosen)
        return chosen
    known = matching(score, names_for_task(task))
    if known is None:
        accepted = dict.fromkeys([*task_scores, *metrics, *names_for_task(task)])
        text = f"accepted: {', '.join(accepted)}, or a function (outputs, y) -> number"
        raise ArgumentError("score", text, score)
    try:
        added = named([known], reserved, task)
    except ArgumentError as error:
        raise ArgumentError("score", error.text, score) from error
    return Scored(known, added[known].higher_is_better, {**metrics, **added})


def _warn_of_assumed_direction(score: Scored) -> None:
    """Warns of a score whose high values count as good only because nobody has said otherwise."""
    if score.metrics[score.name].is_direction_assumed:
        call = f"pfljax.metrics.metric({score.name}, higher_is_better=...)"
        warn("score", f"high values of {score.name} count as good; {call} says which do")


def _scored_by_function(
    function: Any, metrics: Mapping[str, Metric], reserved: set[str], task: str
) -> Scored:
    """The score that a function of the user's computes, under the name of the function."""
    inner = function.function if isinstance(function, Metric) else function
    for name, metric_of_run in metrics.items():
        if metric_of_run.function is inner:
            return Scored(name, metric_of_run.higher_is_better, metrics)
    name = getattr(inner, "__name__", type(inner).__name__)
    if name in metrics:
        text = f"is a function with the name of the metric {name}; accepted: the name, or another"
        raise ArgumentError("score", text)
    try:
        added = named({name: function}, reserved, task)
    except ArgumentError as error:
        text = f"{error.text}; or metrics={{NAME: function}} with score=NAME"
        raise ArgumentError("score", text, name) from error
    return Scored(name, added[name].higher_is_better, {**metrics, **added})


def check_name(name: str, reserved: set[str]) -> None:
    """Raises `ArgumentError` for a metric's name that is reserved, or that no column can have."""
    is_free = name not in reserved and not str(name).startswith(BEGINNINGS)
    if is_free and str(name).isidentifier():
        return
    beginnings = [f"{beginning}..." for beginning in BEGINNINGS]
    others = ", ".join(sorted(reserved) + beginnings)
    text = f"accepted: names such as my_metric, other than {others}"
    raise ArgumentError("metrics", text, name)


def metric_for_task(name: str, task: str) -> Metric:
    """The metric of a name, in any case, for a task. Raises `ArgumentError` if there is none."""
    name = in_their_case(name, METRICS)
    if name not in METRICS:
        text = f"is no function, and unknown; {nearest(name, METRICS)}"
        raise ArgumentError("metrics", text, name)
    known = METRICS[name]
    accepted = names_for_task(task)
    if name not in accepted:
        missing = "classes" if task == "regression" else "values"
        text = f"needs {missing}; accepted for {task}: {', '.join(accepted)}, or a function"
        raise ArgumentError("metrics", text, name)
    if task == "regression":
        return known
    if task != "multilabel":
        return known
    if known.function is perplexity:
        text = "needs one class per place; accepted for several labels: the others"
        raise ArgumentError("metrics", text, name)
    function = f1_of_labels if known.function is f1 else over_labels(known.function)
    return dataclasses.replace(known, function=function)


OUTPUTS = ("outputs", "y", "size")


def outputs_of(
    problem: Problem, algorithm: Algorithm, prediction: Prediction, split: Split
) -> dict[str, PyTree]:
    """A client's outputs for its own examples (`OUTPUTS`): outputs (n_max, ...), y (n_max, ...) and size ()."""

    def block_outputs(x: PyTree, y: Array) -> dict[str, Array]:
        return {"outputs": outputs(problem, algorithm, prediction, x), "y": y}

    return over_examples(block_outputs, split) | {"size": split.size}


def row_bytes(problem: Problem, num_examples: int) -> int:
    """Bytes of a client's predictions."""
    return 4 * num_examples * math.prod(problem.model.output_shape[1:])


def probabilities(logits: np.ndarray, task: str) -> np.ndarray:
    """What users' metrics get in place of logits: probabilities of classes or labels, float64; values as they are."""
    from scipy import special  # slow to import

    if task == "regression":
        return logits
    if task == "multilabel":
        return special.expit(logits.astype(np.float64))
    return special.softmax(logits.astype(np.float64), axis=-1)


def number(value: Any) -> float:
    """What a metric returned, as a number. Raises an error if it is none."""
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"it returned {type(value).__name__}")
    return float(array.item())


def measured(
    metrics: Mapping[str, Metric], clients: Mapping[str, np.ndarray], task: str
) -> dict[str, np.ndarray]:
    """Computes metrics of `clients`, whose outputs `outputs_of` returned, in NumPy arrays.

    Returns one float32 for each client, by name; NaN for clients without examples or with outputs that are not finite.
    Raises `ArgumentError` if a function
    raises an error, or returns anything but a number.
    """
    sizes = clients["size"]
    values = {name: np.full(len(sizes), np.nan, np.float32) for name in metrics}
    for client in np.flatnonzero(sizes):
        size = sizes[client]
        logits = clients["outputs"][client, :size]
        y = clients["y"][client, :size]
        # After a divergence, nothing is defined; tuning goes on with other points.
        if not np.isfinite(logits).all():
            continue
        predicted = probabilities(logits, task)
        for name, function in metrics.items():
            outputs = logits if function.takes_logits else predicted
            try:
                values[name][client] = number(function(outputs, y))
            except Exception as error:  # a user's function
                line, _, _ = str(error).partition("\n")
                text = f"for outputs {outputs.shape} and y {y.shape}, raised {type(error).__name__}: {line}"
                text += "; accepted: functions that return a number"
                raise ArgumentError("metrics", text, name) from error
    return values
