"""How a grid of numbers goes on beyond its edges."""

import itertools
from typing import Any

import pytest

from pfljax.settings.fields import Field, hyperparameter
from pfljax.settings.grids import beyond, beyond_edges

ANY = Field("any", float, 0.0, hyperparameter().metadata)


def field(kind: Any = float, **limits):
    return ANY._replace(hint=kind, limits=hyperparameter(**limits).metadata)


@pytest.mark.parametrize(
    ("values", "edge", "of", "expected"),
    [
        ((0.01, 0.1, 1.0), 1.0, field(), 10.0),  # the ratio
        ((0.01, 0.1, 1.0), 0.01, field(above=0), 0.001),
        ((1.0, 3.0), 3.0, field(), 9.0),  # two values may be either; positive ones have a ratio
        ((0.01, 0.03, 0.1), 0.01, field(above=0), 0.00333),  # 0.01^2 / 0.03
        ((3.0, 0.1, 1.0, 0.3), 3.0, field(), 9.0),  # in any order
        ((0.25, 0.5, 0.75), 0.75, field(), 1.0),  # the step
        ((0.0, 0.001, 0.005), 0.005, field(), 0.009),
        ((0.0, 0.1), 0.0, field(), -0.1),
        ((0.0, 0.1), 0.0, field(at_least=0), None),  # the bound itself
        ((0.3, 0.6, 0.9), 0.9, field(at_most=1), 1.0),  # a step leads beyond the bound
        ((0.5, 0.7, 0.9), 0.9, field(below=1), 0.95),  # half of the way to a bound that is no value
        ((0.2, 0.4, 0.6), 0.2, field(at_least=0), 0.1),  # positive values stay positive
        ((2, 3, 4, 5), 5, field(int), 6),
        ((2, 3, 4, 5), 2, field(int, at_least=1), 1),
        ((1, 2, 3), 1, field(int, at_least=0), None),
        ((1, 2, 3, 4), 4, field(int, at_most=4), None),
        ((5, 10, 20), 5, field(int | None, at_least=1), 2),  # 2.5, whole
        ((1, 10, 100), 1, field(above=0), 0.1),  # whole values of a number that need not be
    ],
)
def test_a_grid_goes_on_as_it_began_within_its_bounds(values, edge, of, expected):
    found = beyond(values, edge, of)
    assert found == (expected if expected is None else pytest.approx(expected))
    assert found is None or isinstance(found, int if of.hint in (int, int | None) else float)


def test_numbers_at_the_edge_of_their_grid_go_on():
    """One in between, one of a kind, words and switches do not, nor does one at its bound."""
    options = {
        "rate": [0.1, 1.0],
        "mu": [1.0, 2.0, 3.0],
        "one": [4.0],
        "none": [None, 5.0, 6.0],
        "share": [0.0, 0.5],
    }
    options |= {"linkage": ["single", "complete"], "switch": [False, True]}
    tried = [
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]
    best = {
        "rate": 1.0,
        "mu": 2.0,
        "one": 4.0,
        "none": 5.0,
        "share": 0.0,
        "linkage": "single",
        "switch": True,
    }
    fields = dict.fromkeys(options, ANY) | {"share": field(at_least=0)}
    found = beyond_edges(tried, best, fields)
    # 1 / 0.1 and 5^2 / 6
    assert found == {"rate": pytest.approx(10.0), "none": pytest.approx(4.17)}
