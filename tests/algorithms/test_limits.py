"""Limits: with its hyperparameter off, a method is a simpler one; what it does with its hyperparameter on, each file
has by hand.

Batches are full, and all rows have data of the same shape, so that they share the simpler methods' programs.
"""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import toys
from by_hand import as_numpy, assert_close, entry, play
from networks import examples
from quadratics import OPTIMIZER

EQUAL = (5, 5, 5, 5)
MODELS = ("models",)
PREDICTIONS = ("predictions",)


class Limit(NamedTuple):
    """A method that equals a simpler one.

    Attributes:
        method: The name of the method.
        off: Its hyperparameters.
        compared: What is the same after two rounds: "models" are the state's, "predictions" those that clients use.
        simpler: The name of the simpler method.
        options: As of `by_hand.play`, for both methods.
        slow: Whether the default suite leaves it out, as the method is played by hand with the hyperparameter that is
            off here.
    """

    method: str
    off: dict[str, Any]
    compared: tuple[str, ...] = MODELS
    simpler: str = "fedavg"
    options: Mapping[str, Any] = MappingProxyType({})
    slow: bool = False


LIMITS = [
    Limit("fedprox", {"mu": 0.0}, slow=True),
    Limit("fedsam", {"rho": 0.0}, slow=True),
    Limit("fedavg_data", {"share": 0.0}),
    Limit("lg_fedavg", {"shared_layers": 1}),
    Limit("per_fedavg", {"personal_learning_rate": 0.0}, ("models", "predictions"), slow=True),
    Limit("clustered", {"eps1": 0.0}, PREDICTIONS),
    Limit("fedavgm", {"server_momentum": 0.0}),
    Limit("fedbuff", {"max_staleness": 0}),
    Limit("scaffold", {"correction": 0.0}),
    # Its constant is one over the learning rate by default.
    Limit("q_ffl", {"q": 0.0}, options={"sizes": EQUAL}),
    Limit("ifca", {"clusters": 1}),
    Limit("fedper", {"personal_layers": 0}),
    Limit("apfl", {"alpha": 0.0, "alpha_learning_rate": 0.0}, PREDICTIONS),
    Limit("fedala", {"layers": 0}),
    Limit("fedexp", {"eps": 1e9}),
    Limit("pfedmb", {"branches": 1}, PREDICTIONS),
    Limit("l2sgd", {"pull": 1.0}),
    Limit("fedasync", {"alpha": 1.0, "mu": 0.0, "max_staleness": 0}),
    Limit("floco", {"endpoints": 1}, PREDICTIONS, slow=True),
    Limit("moon", {"mu": 5.0}, slow=True),  # a linear model has no features to train
    Limit("fedavg", {}, ("models", "predictions"), "local", {"sizes": (5,)}, slow=True),
    Limit("fedper", {"personal_layers": 1}, PREDICTIONS, "local"),
    Limit("apfl", {"alpha": 1.0, "alpha_learning_rate": 0.0}, PREDICTIONS, "local"),
    Limit("ditto", {"mu": 0.0}, PREDICTIONS, "local", slow=True),
    Limit("l2sgd", {"pull": 0.0}, PREDICTIONS, "local"),
    Limit("fedamp", {"attention": 0.0, "mu": 0.0}, PREDICTIONS, "local", slow=True),
]


def parameter(row):
    """A row as a parameter of a test."""
    marks = [pytest.mark.slow] if row.slow else []
    return pytest.param(row, id=f"{row.method}-{row.simpler}", marks=marks)


@functools.cache
def simple(name, *options):
    """Two rounds of a simpler method; the options are items of a dict."""
    return play(name, rounds=2, **dict(options))


def compared(rounds, name):
    """The state's models, or those that clients predict with."""
    if name == "models":
        return entry(rounds.states[-1], "models")
    return as_numpy(rounds.predict().models)


@pytest.mark.parametrize("row", [parameter(row) for row in LIMITS])
def test_with_its_hyperparameter_off_it_is_a_simpler_method(row):
    rounds = play(row.method, rounds=2, hyperparameters=row.off, **row.options)
    simpler = simple(row.simpler, *row.options.items())
    for name in row.compared:
        found = compared(rounds, name)
        assert_close(found, compared(simpler, name), f"{name} of {row.method}", 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("name", "hyperparameters"),
    [
        ("feddyn", {}),
        ("fedexp", {"eps": 1e-6}),
        ("q_ffl", {"q": 0.0}),
        pytest.param("fednova", {}, marks=pytest.mark.slow),
        pytest.param("scaffold", {"server_learning_rate": 2.0}, marks=pytest.mark.slow),
    ],
)
def test_batch_statistics_are_averaged_as_in_fedavg(name, hyperparameters):
    """Also by a server whose rate is not 1; q-FFL weights clients equally where q is 0."""
    federation = toys.make_federation(EQUAL, "regression")
    options = {"model": toys.Normalized, "epochs": 2}
    states = toys.play(name, federation, 2, OPTIMIZER, hyperparameters, **options).states
    # The inputs are normalized, so that all statistics are theirs; a step moves them by 0.3.
    inputs = [examples(federation, k)[0].mean(axis=0) for k in range(4)]
    before, after = (entry(state, "models.batch_stats.BatchNorm_0.mean")[0] for state in states[1:])
    assert np.abs(after - before).max() > 1e-2
    expected = 0.7**2 * before + (1 - 0.7**2) * np.mean(inputs, axis=0)
    np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-6)
