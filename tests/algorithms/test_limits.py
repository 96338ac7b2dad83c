"""Limits: with its knob off, a method is a simpler one; what it does with its knob on, each file has by hand."""

import numpy as np
import optax
import pytest
import toys
from quadratics import MINI, RATE, SIZES, play, vectors

SIX, EQUAL = (2, 5, 1, 3, 4, 2), (3, 3, 3, 3)
SCORED_ON_OTHERS = ("fedala", "fedexp", "l2sgd")  # clients' own copies, a mean over two rounds, own models


def models_of(name, sizes=SIZES, knobs=None):
    """The state's models after some rounds in mini-batches."""
    return vectors(play(name, sizes=sizes, knobs=knobs, **MINI)[2][-1].models)


def scored_of(name, sizes=SIZES, knobs=None):
    """The models that the clients predict with then, (K, d)."""
    return vectors(play(name, sizes=sizes, knobs=knobs, **MINI)[4].models)[:, 0]


@pytest.mark.parametrize(
    ("name", "off", "sizes"),
    [
        ("fedprox", {"mu": 0.0}, SIZES),
        ("fedsam", {"rho": 0.0}, SIZES),
        ("fedavg_data", {"share": 0.0}, SIZES),
        ("lg_fedavg", {"shared_layers": 1}, SIZES),
        ("per_fedavg", {"alpha": 0.0}, SIZES),
        ("clustered", {"eps1": 0.0}, SIZES),
        ("fedavgm", {"momentum": 0.0}, SIZES),
        ("scaffold", {"correction": 0.0}, SIZES),
        ("q_ffl", {"q": 0.0}, EQUAL),  # whose constant is one over the learning rate by default
        ("ifca", {"clusters": 1}, SIX),
        ("fedper", {"personal_layers": 0}, SIZES),
        ("apfl", {"alpha": 0.0, "rate": 0.0}, SIZES),
        ("fedala", {"layers": 0}, SIZES),
        ("fedexp", {"eps": 1e9}, SIZES),
        ("pfedmb", {"branches": 1}, SIZES),
        ("l2sgd", {"pull": 1.0}, SIZES),
        ("fedasync", {"alpha": 1.0, "rho": 0.0, "max_staleness": 0}, SIZES),
    ],
)
def test_with_its_knob_off_it_is_fedavg(name, off, sizes):
    mean, models = models_of("fedavg", sizes)[0], models_of(name, sizes, off)
    if name == "pfedmb":
        models = models[:, 0]  # of its one branch
    np.testing.assert_allclose(models, np.broadcast_to(mean, models.shape), rtol=1e-5, atol=1e-6)
    if name not in SCORED_ON_OTHERS:
        scored = scored_of(name, sizes, off)
        np.testing.assert_allclose(scored, np.broadcast_to(mean, scored.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("fedper", {"personal_layers": 1}),
        ("apfl", {"alpha": 1.0, "rate": 0.0}),
        ("ditto", {"strength": 0.0}),
        ("l2sgd", {"pull": 0.0}),
        ("fedamp", {"attention": 0.0, "strength": 0.0}),
    ],
)
def test_with_its_knob_off_it_is_local(name, off):
    alone = scored_of("local")
    np.testing.assert_allclose(scored_of(name, knobs=off), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [("feddyn", {}), ("fednova", {}), ("fedexp", {"eps": 1e-6}), ("scaffold", {"rate": 2.0}), ("q_ffl", {"q": 0.0})],
)
def test_batch_statistics_are_averaged_as_in_fedavg(name, knobs):
    """Also by a server whose rate is not 1; q-FFL weights clients equally where q is 0."""
    sizes = (3, 3, 3) if name == "q_ffl" else SIZES
    federation = toys.make_federation(sizes, "regression")
    options = {"model": toys.Normalized, "batch_size": 2, "epochs": 8}
    found = [
        toys.play(each, federation, 3, optax.sgd(RATE), knobs if each == name else {}, **options).states[-1].models
        for each in ("fedavg", name)
    ]
    toys.assert_trees_close(found[0]["batch_stats"], found[1]["batch_stats"], rtol=1e-5, atol=1e-6)
    moved = np.abs(found[0]["Dense_0"]["kernel"] - found[1]["Dense_0"]["kernel"]).max()
    assert moved > 1e-3 or name == "q_ffl"  # which takes FedAvg's step there
