"""Clients that never train: how many are expected, what they predict with, and how they score."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from pfljax.contract.types import Algorithm, State
from pfljax.evaluation import metrics as evaluation
from pfljax.folder.history import History
from pfljax.run.experiment import Experiment

LATECOMERS = "latecomers"  # name of the stage by which clients predict as newcomers
LEAST = 0.5  # expected clients from which the plan speaks of them


class Served(NamedTuple):
    """What clients predict with that have never trained.

    Attributes:
        name: In the summary, a noun.
        verb_phrase: In a sentence.
    """

    name: str
    verb_phrase: str


GLOBAL = Served("global model", "predict with the global model")
AS_OTHERS = Served("as others", "predict as the others do")
AS_NEWCOMERS = Served("as newcomers", "predict as newcomers do")
INITIAL = Served("initial model", "predict with what they began with")


def served(algorithm: Algorithm, state: State) -> Served:
    """What clients predict with that have never trained.

    Args:
        algorithm: The run's method.
        state: The shapes of its state.
    """
    if algorithm.global_model is not None:
        return GLOBAL
    server = state.server.state
    if LATECOMERS in getattr(server, "notes", {}):
        return AS_NEWCOMERS
    row = state.rows
    method_row = getattr(row, "state", row)  # without the stages' notes
    if not jax.tree.leaves((method_row, state.clients.model)):
        return AS_OTHERS
    return INITIAL


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
    phrase = served(algorithm, state).verb_phrase
    return (
        f"about {num:.0f} of {experiment.problem.num_clients:,} clients never train; they {phrase}"
    )


def summarized(
    experiment: Experiment, algorithm: Algorithm, state: State, history: History
) -> dict[str, Any] | None:
    """Returns the summary's "never_trained"; None if an earlier version did not record who trained.

    Returns:
        "count": number of clients that have never trained.
        "num_clients": number of all clients.
        "metric": "accuracy", or the score of another task.
        "score": its mean over these clients, weighted by their test examples; None without any.
        "others": its mean over the other clients.
        "served": what these clients predict with.
    """
    if history.trained is None:
        return None
    never = history.trained == 0
    federation = experiment.federation
    metric = evaluation.score_of_task(federation.task)
    values = np.asarray(history.results[f"{metric}_test"][-1])
    sizes = np.asarray(federation.test.size)
    never_of_scored = never
    if experiment.scored is not None:
        sizes = sizes[experiment.scored]
        never_of_scored = never[experiment.scored]
    return {
        "count": int(never.sum()),
        "num_clients": len(never),
        "metric": metric,
        "score": weighted_mean(values, sizes, never_of_scored),
        "others": weighted_mean(values, sizes, ~never_of_scored),
        "served": served(algorithm, state).name,
    }


def weighted_mean(values: np.ndarray, sizes: np.ndarray, chosen: np.ndarray) -> float | None:
    """The mean of some clients' scores, weighted by their test examples; None if there are none."""
    chosen = chosen & (sizes > 0) & np.isfinite(values)
    if not chosen.any():
        return None
    return float(np.average(values[chosen], weights=sizes[chosen]))


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
    return f"{count} ({summary['served']}): {', '.join(scores)}" if scores else count


def shown(score: float, metric: str) -> str:
    """A score as text."""
    return f"{100 * score:.1f} %" if metric == "accuracy" else f"{metric} {score:.4g}"
