"""Samples of the campaigns: the default suite plays a few cases, CI 5 % of them, and the nightly script all.

Which cases these are follows from their names, so that a sample hardly changes when cases are added.
"""

import collections
import math
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest

SHARE = 0.05  # of a campaign, that CI plays
Kind = Callable[[Any], Hashable]


def order(case: Hashable) -> int:
    """The place of a case in its campaign, which follows from its name."""
    return zlib.crc32(str(case).encode())


def sample(cases: Sequence[Hashable], *kinds: Kind, share: float = SHARE) -> list[Any]:
    """A sample with a share of the cases of each kind, at least one.

    Args:
        cases: The cases, whose texts are their names.
        kinds: What gives a case its kind. Several: a sample by each of them is taken.
        share: The share of the cases of each kind.
    """
    chosen = set()
    for kind in kinds:
        groups = collections.defaultdict(list)
        for case in sorted(cases, key=order):
            groups[kind(case)].append(case)
        for group in groups.values():
            chosen.update(group[: max(1, math.ceil(share * len(group)))])
    return [case for case in cases if case in chosen]


def params(cases: Sequence[tuple], few: Sequence[tuple], some: Sequence[tuple]) -> list[Any]:
    """Parameters of a test: the `few` cases are played by default, `some` in CI, and the others every night."""
    found = []
    for case in cases:
        suite = (
            [] if case in few else [pytest.mark.campaign] if case in some else [pytest.mark.long]
        )
        name = " ".join(map(str, case[:2]))[:80]
        found.append(pytest.param(*case, marks=suite, id=name))
    return found


def check(cases: Sequence[Hashable], chosen: Sequence[Hashable], *kinds: Kind) -> None:
    """Fails if a sample has less than 5 % of the cases, or lacks a kind."""
    assert {*chosen} <= {*cases}
    assert 20 * len(chosen) >= len(cases)
    for kind in kinds:
        assert {*map(kind, chosen)} == {*map(kind, cases)}
