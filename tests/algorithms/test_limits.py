"""Limits: with its knob off, a method is a simpler one."""

import numpy as np
import optax
import pytest
import toys
from quadratics import MINI, RATE, SIZES, play, vectors

SIX, EQUAL = (2, 5, 1, 3, 4, 2), (3, 3, 3, 3)
SCORED_ON_OTHERS = ("fedala", "fedexp")  # clients' own copies, and a mean over two rounds
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


def models_of(name, sizes=SIZES, knobs=None):
    """The state's models after some rounds in mini-batches."""
    return vectors(play(name, sizes=sizes, knobs=knobs, **MINI)[2][-1].models)


def scored_of(name, sizes=SIZES, knobs=None):
    """The models that the clients predict with then, (K, d)."""
    return vectors(play(name, sizes=sizes, knobs=knobs, **MINI)[4].models)[:, 0]


@pytest.mark.parametrize(
    ("name", "off", "on", "sizes"),
    [
        ("fedprox", {"mu": 0.0}, {"mu": 3.0}, SIZES),
        ("fedavg_data", {"share": 0.0}, {"share": 0.5}, SIZES),
        ("lg_fedavg", {"shared_layers": 1}, None, SIZES),
        ("per_fedavg", {"alpha": 0.0}, {"alpha": 0.2}, SIZES),
        slow("per_fedavg", {"alpha": 0.0, "form": "hessian_free"}, {"alpha": 0.2, "form": "hessian_free"}, SIZES),
        ("clustered", {"eps1": 0.0}, {"eps1": 1e9, "eps2": 0.0, "gamma": 0.0}, SIZES),
        ("fedavgm", {"momentum": 0.0}, {"momentum": 0.9}, SIZES),
        ("scaffold", {"correction": 0.0}, {"correction": 1.0}, SIZES),
        ("q_ffl", {"q": 0.0}, {"q": 2.0}, EQUAL),  # whose constant is one over the learning rate by default
        slow("afl", {"rate": 0.0}, {"rate": 0.5}, SIZES),
        ("ifca", {"clusters": 1}, {"clusters": 3}, SIX),
        slow("hypcluster", {"clusters": 1}, {"clusters": 3}, SIX),
        ("fedper", {"personal_layers": 0}, {"personal_layers": 1}, SIZES),
        ("apfl", {"alpha": 0.0, "rate": 0.0}, {"alpha": 0.5}, SIZES),
        ("fedala", {"layers": 0}, {}, SIZES),
        slow("fedala", {"rate": 0.0}, {}, SIZES),
        ("fedexp", {"eps": 1e9}, None, SIZES),
        ("pfedmb", {"branches": 1}, {"branches": 2}, SIZES),
        slow("pfedmb", {"branches": 1, "simplex": "projection", "averaging": "plain"}, {"branches": 3}, SIZES),
    ],
)
def test_with_its_knob_off_it_is_fedavg(name, off, on, sizes):
    mean, models = models_of("fedavg", sizes)[0], models_of(name, sizes, off)
    if name == "pfedmb":
        models = models[:, 0]  # of its one branch
    np.testing.assert_allclose(models, np.broadcast_to(mean, models.shape), rtol=1e-5, atol=1e-6)
    if name not in SCORED_ON_OTHERS:
        scored = scored_of(name, sizes, off)
        np.testing.assert_allclose(scored, np.broadcast_to(mean, scored.shape), rtol=1e-5, atol=1e-6)
    if on is not None:
        found = scored_of if name in ("fedper", "apfl") else models_of  # which change what clients keep
        assert np.abs(found(name, sizes, on) - mean).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("fedper", {"personal_layers": 1}, {"personal_layers": 0}),
        ("apfl", {"alpha": 1.0, "rate": 0.0}, {"alpha": 0.5}),
        ("ditto", {"strength": 0.0}, {"strength": 1.0}),
        ("l2sgd", {"pull": 0.0}, {"pull": 0.5}),
        ("fedamp", {"attention": 0.0, "strength": 0.0}, {"attention": 0.5, "strength": 0.0}),
        slow("fedamp", {"attention": 0.0, "strength": 0.0}, {"attention": 0.0, "strength": 1.0}),
    ],
)
def test_with_its_knob_off_it_is_local(name, off, on):
    alone = scored_of("local")
    np.testing.assert_allclose(scored_of(name, knobs=off), alone, rtol=1e-5, atol=1e-6)
    assert np.abs(scored_of(name, knobs=on) - alone).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "knobs"), [("feddyn", {}), ("fednova", {}), ("scaffold", {"rate": 2.0}), ("q_ffl", {"q": 0.0})]
)
def test_batch_statistics_are_averaged_as_in_fedavg(name, knobs):
    """Also by a server whose rate is not 1; q-FFL weights clients equally where q is 0."""
    sizes = (3, 3, 3) if name == "q_ffl" else SIZES
    federation, found = toys.make_federation(sizes, "regression"), []
    options = {"model": toys.Normalized, "batch_size": 2, "epochs": 2}
    problem = toys.make_problem(federation, optax.sgd(RATE), **options)
    for each in ("fedavg", name):
        algorithm = toys.make_algorithm(each, problem, **knobs if each == name else {})
        found.append(toys.train(algorithm, problem, federation.client_data, 1)[0][-1].models)
    toys.assert_trees_close(found[0]["batch_stats"], found[1]["batch_stats"], rtol=1e-5, atol=1e-6)
    moved = np.abs(found[0]["Dense_0"]["kernel"] - found[1]["Dense_0"]["kernel"]).max()
    assert moved > 1e-3 or name == "q_ffl"  # which takes FedAvg's step there
