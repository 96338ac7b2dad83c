"""What clients that come after training predict with, by hand: one function of NumPy for each method.

A newcomer that trains alone does so from the method's models, for as many steps as the method's listing says.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from by_hand import entry, newcomers_by_hand


class Newcomer(NamedTuple):
    """A method, and what its newcomers predict with.

    Attributes:
        method: The name of the method.
        reference: (rounds, newcomers, k) -> the models (J, ...) of newcomer k, where `rounds` are those of training and
            `newcomers` has the same functions for the newcomers' own data.
        options: As of `by_hand.play`.
    """

    method: str
    reference: Callable[..., Any]
    options: dict[str, Any] = {}


def ditto(rounds, newcomers, k):
    """Trains a model from w, regularized toward w, for as many rounds as the run has."""
    w = entry(rounds.states[-1], "models")[0]
    steps = rounds.problem.rounds * rounds.epochs
    return [newcomers.descend(k, w, lambda v: 2.0 * (v - w), steps)]


NEWCOMERS = [
    Newcomer("ditto", ditto, {"knobs": {"strength": 2.0}}),
]


@pytest.mark.parametrize("row", NEWCOMERS, ids=[row.method for row in NEWCOMERS])
def test_newcomers_by_hand(row):
    newcomers_by_hand(row.method, row.reference, **row.options)
