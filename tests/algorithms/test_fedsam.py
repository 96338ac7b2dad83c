"""FedSAM by hand on quadratics and on a network, its limit, and its batch statistics."""

import jax
import networks
import numpy as np
import optax
import pytest
import quadratics
import toys
from networks import RATE, examples, mean, row, step

SIZES = (2, 5, 0, 3, 4)


@pytest.mark.parametrize("rho", [0.05, 0.5])
def test_rounds_by_hand(rho):
    federation, _, _, states, _ = networks.play("fedsam", 2, SIZES, knobs={"rho": rho}, epochs=3)
    theta = row(states[0].models, 0)
    for state in states[1:]:
        trained = []
        for k in (0, 1, 3, 4):
            (x, y), own = examples(federation, k), theta
            for _ in range(3):
                g = networks.gradient(own, x, y)
                norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(g)))
                above = step(own, g, -rho / norm)
                own = step(own, networks.gradient(above, x, y), RATE)
            trained.append(own)
        theta = mean(trained, [size for size in SIZES if size])
        toys.assert_trees_close(row(state.models, 0), theta, rtol=1e-5, atol=1e-5)


def test_at_a_minimum_there_is_no_way_up():
    """A client whose gradient is 0 stays where it is."""
    federation = toys.make_federation((3,), "regression")
    federation.train.x[...], federation.train.y[...] = 0, 0  # and the bias starts at 0
    first, last = (quadratics.vectors(s.models) for s in quadratics.play("fedsam", 1, federation=federation)[2])
    np.testing.assert_allclose(last, first, atol=1e-6)


def test_batch_statistics_are_those_of_fedavg():
    options = {"model": toys.Normalized, "batch_size": 2, "epochs": 2}
    federation = toys.make_federation((2, 5, 3))
    fedavg, fedsam = (
        toys.play(name, federation, 2, optax.sgd(0.3), **options).states[-1].models for name in ("fedavg", "fedsam")
    )
    toys.assert_trees_close(fedsam["batch_stats"], fedavg["batch_stats"], rtol=1e-5, atol=1e-6)
    assert np.abs(fedsam["Dense_0"]["kernel"] - fedavg["Dense_0"]["kernel"]).max() > 1e-3
