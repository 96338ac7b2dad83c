"""How scores recover after the clients' data have changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

AFTER = (5, 20, 60)  # rounds after a change, in which runs are evaluated
TOLERANCE = 0.01  # largest loss of a score that has recovered
ROUNDING = 1e-6  # of scores in float32


class Recovery(NamedTuple):
    """How the scores on test examples recover after the clients' data have changed.

    Attributes:
        round: The last round before the change.
        change: The change, such as "labels".
        clients: Numbers of the clients that change. Shape (m,).
        before: Each client's score after that round, on the earlier data; NaN if it had none. Shape (K,), or (n,) with
            `eval_clients`.
        after: The scores 5, 20 and 60 rounds later, on the new data, by number of rounds; without those that are later
            than the next change or the last round.
        rounds: The number of rounds until each client's score was back, as of the evaluated rounds; inf if it was not
            before the next change or the last round, NaN without a score before or afterwards. Shape (K,) or (n,).
    """

    round: int
    change: str
    clients: np.ndarray
    before: np.ndarray
    after: dict[int, np.ndarray]
    rounds: np.ndarray


def pauses(starts: Sequence[int]) -> list[int]:
    """Returns the rounds in which runs are evaluated, given the last rounds before changes."""
    rounds = set(starts)
    for start in starts:
        rounds |= {start + later for later in AFTER}
    return sorted(rounds)


def recovery(
    rounds: Int[np.ndarray, " T"],
    scores: Float[np.ndarray, "T K"],
    start: int,
    end: float,
    sign: int,
    tolerance: float = TOLERANCE,
) -> tuple[np.ndarray, dict[int, np.ndarray], np.ndarray]:
    """Returns scores before a change and some rounds after it, and numbers of rounds until they are back.

    Args:
        rounds: The evaluated rounds.
        scores: Scores of clients, or of their mean.
        start: The last round before the change.
        end: The last round before the next change; infinity: there is none.
        sign: 1 if high scores are good, -1 if low ones are.
        tolerance: Scores are back if they are worse than before by at most so much.
    """
    scores = np.asarray(scores, float)
    before = np.full(scores.shape[1], np.nan)
    if start in rounds:
        before = scores[np.flatnonzero(rounds == start)[0]]
    after: dict[int, np.ndarray] = {}
    for later in AFTER:
        positions = np.flatnonzero(rounds == start + later)
        if len(positions) and start + later <= end:
            after[later] = scores[positions[0]]

    # The first evaluation in which a score is back.
    is_after = (rounds > start) & (rounds <= end)
    times = rounds[is_after] - start
    changes = sign * (scores[is_after] - before)
    is_back = changes >= -tolerance - ROUNDING
    until = np.where(is_back, times[:, None].astype(float), np.inf).min(axis=0, initial=np.inf)
    is_known = np.isfinite(changes).any(axis=0)
    return before, after, np.where(is_known, until, np.nan)


def mean_recovery(
    rounds: Int[np.ndarray, " T"],
    scores: Float[np.ndarray, "T K"],
    start: int,
    end: float,
    sign: int,
) -> dict[str, float | dict[str, float] | None]:
    """Returns `recovery` of the mean over clients with a score before and after a change, as JSON; None: unknown.

    The number of rounds is None if the mean is not back, too. "clients" counts those in the mean.
    """
    scores = np.asarray(scores, float)
    is_known = np.isfinite(scores)
    is_before = (rounds == start)[:, None]
    is_after = ((rounds > start) & (rounds <= end))[:, None]
    counted = (is_known & is_before).any(axis=0) & (is_known & is_after).any(axis=0)
    if not counted.any():
        return {"clients": 0, "before": None, "after": {}, "rounds": None}
    mean = scores[:, counted].mean(axis=1, keepdims=True)
    before, after, until = recovery(rounds, mean, start, end, sign)
    return {
        "clients": int(counted.sum()),
        "before": float(before[0]),
        "after": {str(later): float(values[0]) for later, values in after.items()},
        "rounds": float(until[0]) if np.isfinite(until[0]) else None,
    }
