"""Who gains and who is hurt: single clients' scores with one method instead of another; and trends at the end.

A method may raise the mean and hurt some clients. Each client of each run that both methods have counts once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from pfljax.evaluation import rounding
from pfljax.evaluation.statistics import RunSummary, Trial, interval

FAR = 0.05  # a loss of accuracy that is counted separately, as a fraction
LATE = 0.25  # the share of the rounds in which a trend is looked for
FEWEST = 3  # evaluations that a trend is fitted to

# verdicts
IMPROVING = "still improving"
WORSE = "getting worse"
NEITHER = "no trend"

ClientScores = Mapping[Trial, np.ndarray]  # of one method, (K,) by run


class Effect(NamedTuple):
    """What clients gain with a method, compared with a reference; NaN without clients."""

    helped: float  # share of the clients whose score is better than with the reference
    hurt: float  # share of those whose score is worse
    far: float  # share of those who lose more than `FAR`, which is 5 points of accuracy
    worst: float  # the smallest gain; negative if a client loses
    median: float  # the median gain
    clients: int  # number of clients, added up over runs

    @classmethod
    def from_scores(cls, scores: Float[np.ndarray, "n 2"], sign: int = 1) -> Effect:
        """Summarizes clients' scores with the reference and with the method, one row per client and run.

        `sign` is 1 if high scores are good, -1 if low ones are.
        """
        if not len(scores):
            return cls(math.nan, math.nan, math.nan, math.nan, math.nan, 0)
        gains = gains_of(scores, sign)
        errors = rounding.error_of(scores[:, 0], scores[:, 1])

        def share(is_counted: np.ndarray) -> float:
            return float(is_counted.mean())

        return cls(
            helped=share(gains > 0),
            hurt=share(gains < 0),
            far=share(gains < -FAR - errors),
            worst=float(gains.min()),
            median=float(np.median(gains)),
            clients=len(gains),
        )


class Trend(NamedTuple):
    """How much a method's mean score changes in the last quarter of its rounds."""

    # the change along the fitted lines, mean over runs; NaN with fewer than `FEWEST` evaluations
    change: float
    low: float  # lower end of its 95 % interval; NaN for fewer than two runs
    high: float  # upper end

    def verdict(self, sign: int = 1) -> str:
        """Returns `IMPROVING` or `WORSE`, if the interval says so, else `NEITHER`; "-" if there is no interval.

        `sign` is 1 if high scores are good, -1 if low ones are.
        """
        if math.isnan(self.low):
            return "-"
        if self.low <= 0 <= self.high:
            return NEITHER
        return IMPROVING if sign * self.change > 0 else WORSE


def pairs(scores: ClientScores, others: ClientScores) -> Float[np.ndarray, "n 2"]:
    """Returns clients' scores in all runs that two methods have in common: with the other, and with the method.

    Clients without test examples are left out, and runs that scored different numbers of clients.
    """
    pairs_of_runs = [np.empty((0, 2))]
    for trial in common_trials(scores, others):
        pairs_of_runs.append(np.stack([others[trial], scores[trial]], axis=1))
    joined = np.concatenate(pairs_of_runs)
    return joined[np.isfinite(joined).all(axis=1)]


def gains_of(scores: Float[np.ndarray, "n 2"], sign: int = 1) -> Float[np.ndarray, " n"]:
    """Returns the gains of `pairs`: positive is better, and exactly 0 where scores are equal up to rounding."""
    return sign * rounding.subtract(scores[:, 1], scores[:, 0])


def common_trials(scores: ClientScores, others: ClientScores) -> list[Trial]:
    """Runs in which both methods scored the same number of clients."""
    trials = []
    for trial, values in scores.items():
        if trial in others and values.shape == others[trial].shape:
            trials.append(trial)
    return trials


def mean_gain(
    scores: ClientScores, others: ClientScores, data: Mapping[Trial, Any], sign: int = 1
) -> tuple[float, float, float]:
    """Returns clients' mean gain with one method instead of another, and the ends of its 95 % t interval over clients.

    A client counts once: its gains are averaged over the runs with the same data. So the interval is about other
    clients of the same kind, with these runs' first models and mini-batches.

    Args:
        scores: Scores with the method.
        others: Scores with the other method.
        data: What identifies the clients and examples of a run.
        sign: 1 if high scores are good, -1 if low ones are.
    """
    # Each client's gain in each run, by data.
    gains_by_data: dict[Any, list[np.ndarray]] = {}
    for trial in common_trials(scores, others):
        gains = sign * rounding.subtract(scores[trial], others[trial])
        gains_by_data.setdefault(data[trial], []).append(gains)

    # Its mean over the runs with the same data.
    client_means = [np.empty(0)]
    for run_gains in gains_by_data.values():
        client_means.append(np.mean(run_gains, axis=0))
    means = np.concatenate(client_means)
    means = means[np.isfinite(means)]

    low, high = interval(means)
    return RunSummary.from_values(means).mean, low, high


def trend(rounds: Sequence[int], curves: Float[np.ndarray, "runs T"]) -> Trend:
    """Fits a line to each run's scores in the last quarter of the evaluated rounds (T,), at least the last three."""
    times = np.asarray(rounds, float)
    if len(times) < FEWEST or not np.isfinite(curves[:, -FEWEST:]).all():
        return Trend(math.nan, math.nan, math.nan)

    # Fit a line to the last quarter.
    begin = times[0] + (1 - LATE) * (times[-1] - times[0])
    first = min(len(times) - FEWEST, int(np.searchsorted(times, begin)))
    late = times[first:]
    slopes = np.polyfit(late, curves[:, first:].T, 1)[0]

    # Scores that are equal up to rounding have no trend.
    changes = slopes * (late[-1] - late[0])
    largest = np.abs(curves[:, first:]).max(axis=1)
    changes = np.where(np.abs(changes) <= rounding.error_of(largest, 0), 0.0, changes)
    low, high = interval(changes)
    return Trend(float(changes.mean()), low, high)
