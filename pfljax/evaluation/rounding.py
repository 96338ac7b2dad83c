"""Equality of scores up to rounding: the only place that decides it.

Scores are means in float32. Two clients, runs or methods with equal numbers of right answers may have scores that
differ by 1e-9, as the examples are added up in another order. Their difference is no gain, and a sum of such
differences is as extreme as another if both differ by rounding only.

Scores are equal if they differ by at most `ROUNDING` of the larger one. Numbers of right answers of up to eight million
examples are told apart. Differences and sums are compared with the errors of their terms, which are relative to the
scores, and not to the differences: these may be much smaller than the scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ROUNDING = 2.0**-23  # 1.2e-7; each of two numbers in float32 may be half of it off


def error_of(scores: Any, others: Any) -> np.ndarray:
    """Returns the largest difference of scores (...) and others (...) that rounding may make; 0 if one is infinite."""
    larger = np.maximum(np.abs(scores), np.abs(others))
    return np.where(np.isinf(larger), 0.0, ROUNDING * larger)


def is_equal(scores: Any, others: Any) -> np.ndarray:
    """Whether scores (...) equal others (...) up to rounding; False where one is NaN."""
    scores = np.asarray(scores, float)
    others = np.asarray(others, float)
    with np.errstate(invalid="ignore"):  # the difference of two infinite scores
        is_close = np.abs(scores - others) <= error_of(scores, others)
    return is_close | (scores == others)


def subtract(scores: Any, others: Any) -> np.ndarray:
    """Returns scores (...) minus others (...): exactly 0 where they are equal up to rounding."""
    scores = np.asarray(scores, float)
    others = np.asarray(others, float)
    with np.errstate(invalid="ignore"):
        difference = scores - others
    return np.where(is_equal(scores, others), 0.0, difference)


def comparable(scores: Any) -> np.ndarray:
    """Returns scores (n,) in which those that are equal up to rounding are the same number, the smallest of them."""
    values = np.array(scores, float)
    ascending = np.argsort(values, kind="stable")
    smallest = np.nan  # of the equal scores
    for position in ascending:
        if is_equal(values[position], smallest):
            values[position] = smallest
        smallest = values[position]
    return values


def is_best(scores: Any) -> np.ndarray:
    """Whether scores (n,) equal the highest one up to rounding; False for NaN."""
    values = np.asarray(scores, float)
    highest = np.max(values, where=~np.isnan(values), initial=-np.inf)
    return is_equal(values, highest)
