"""Clients that never train: how many are expected, what they predict with, and how they score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pfljax.contract.types import Algorithm, State
from pfljax.folder.history import History
from pfljax.run.experiment import Experiment
from pfljax.training import dependence

LATECOMERS = "latecomers"  # name of the stage by which clients predict as newcomers
WEIGHTED = ("accuracy", "loss")  # scores whose means are weighted by test examples
LEAST = 0.5  # expected clients from which the plan speaks of them


# What clients predict with that have never trained, as the summary says it.
GLOBAL = "the global model"
AS_OTHERS = "the server's models, as the others"
AS_NEWCOMERS = "others' models, as newcomers"
INITIAL = "what they began with"
PARTLY_INITIAL = "the server's models and what they began with"


def served(experiment: Experiment, algorithm: Algorithm, state: State) -> str:
    """What clients predict with that have never trained.

    Args:
        experiment: The run.
        algorithm: The run's method.
        state: The shapes of its state.
    """
    if algorithm.global_model is not None:
        return GLOBAL
    server = state.server.state
    if LATECOMERS in getattr(server, "notes", {}):
        return AS_NEWCOMERS
    depends = dependence.trace_predictions(experiment)
    if depends is None:
        return INITIAL
    if not depends.on_own_arrays:
        return AS_OTHERS
    return PARTLY_INITIAL if depends.on_server_models else INITIAL


def expected(experiment: Experiment, algorithm: Algorithm) -> float | None:
    """Expected number of clients that never train in the planned rounds; None: it depends on the training.

    It is K (1 - p)^R for K clients that take part in a round with probability p, and those without
    training examples.
    """
    problem = experiment.problem
    by_method = algorithm.sample is not None
    if by_method or problem.clock is not None or experiment.faults.active:
        return None
    share = problem.cohort_size / problem.num_clients if problem.chance is None else problem.chance
    num_with_examples = int((np.asarray(experiment.federation.train.size) > 0).sum())
    num_without = problem.num_clients - num_with_examples
    return num_without + num_with_examples * (1 - share) ** problem.rounds


def forecast(experiment: Experiment, algorithm: Algorithm, state: State) -> str:
    """What the plan says of clients that will never train; "" if hardly any are expected."""
    num = expected(experiment, algorithm)
    if num is None or num < LEAST:
        return ""
    models = served(experiment, algorithm, state)
    clients = f"about {num:.0f} of {experiment.problem.num_clients:,} clients"
    return f"{clients} never train and predict with {models}"


def summarized(
    experiment: Experiment, algorithm: Algorithm, state: State, history: History, rows: list[dict]
) -> dict[str, Any] | None:
    """Returns the summary's "never_trained"; None if an earlier version did not record who trained.

    Args:
        experiment: The run.
        algorithm: Its method.
        state: The shapes of its state.
        history: Its history.
        rows: The summary's "per_client", with "rounds_trained".

    Returns:
        "count": number of clients that have never trained.
        "num_clients": number of all clients.
        "served": what these clients predict with; "" if there are none.
        And the entries of `scores`.
    """
    if history.trained is None:
        return None
    count = int((history.trained == 0).sum())
    entry = {
        "count": count,
        "num_clients": len(history.trained),
        "served": served(experiment, algorithm, state) if count else "",
    }
    return entry | scores(rows, experiment.score_name)


def scores(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """Returns how the clients that have never trained score, and the others.

    Accuracy and loss are weighted by test examples, as in the history; means of other metrics are plain.

    Args:
        rows: The summary's "per_client", with "rounds_trained".
        metric: The name of the run's score.

    Returns:
        "metric": `metric`.
        "score": its mean over the clients that have never trained; None if it is undefined for all.
        "others": its mean over the other clients; None if it is undefined for all.
    """
    values = np.array([row[metric] for row in rows], float)
    sizes = np.array([row["n_test"] for row in rows], float)
    never = np.array([row["rounds_trained"] == 0 for row in rows], bool)
    weights = sizes if metric in WEIGHTED else np.ones_like(sizes)
    is_scored = (sizes > 0) & np.isfinite(values)
    return {
        "metric": metric,
        "score": mean(values, weights, never & is_scored),
        "others": mean(values, weights, ~never & is_scored),
    }


def mean(values: np.ndarray, weights: np.ndarray, chosen: np.ndarray) -> float | None:
    """The weighted mean of the chosen values; None if there are none."""
    if not chosen.any():
        return None
    return float(np.average(values[chosen], weights=weights[chosen]))


def line(summary: dict[str, Any] | None) -> str:
    """One line for the user after training; "" if all clients have trained.

    Args:
        summary: What `summarized` returned.
    """
    if not summary or not summary["count"]:
        return ""
    count = f"{summary['count']:,} of {summary['num_clients']:,} clients never trained"
    scores = []
    for name, subject in (("score", "they score"), ("others", "the others")):
        if summary[name] is not None:
            scores.append(f"{subject} {shown(summary[name], summary['metric'])}")
    count += f" and predict with {summary['served']}"
    return f"{count}: {', '.join(scores)}" if scores else count


def shown(score: float, metric: str) -> str:
    """A score as text."""
    return f"{100 * score:.1f} %" if metric == "accuracy" else f"{metric} {score:.4g}"
