"""FedSAM and MoFedSAM by hand on a network; a limit, a minimum, and batch statistics."""

import jax
import networks
import numpy as np
import optax
import pytest
import quadratics
import toys
from networks import RATE, examples, mean, row, step

SIZES = (2, 5, 0, 3, 4)


def sharp(params, x, y, rho):
    """The gradient at the point of ascent."""
    g = networks.gradient(params, x, y)
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(g)))
    return networks.gradient(step(params, g, -rho / norm), x, y)


@pytest.mark.parametrize(
    ("name", "knobs"), [("fedsam", {"rho": 0.05}), ("fedsam", {"rho": 0.5}), ("mofedsam", {"rho": 0.5, "beta": 0.3})]
)
def test_rounds_by_hand(name, knobs):
    federation, _, _, states, _ = networks.play(name, 3, SIZES, knobs=knobs, epochs=3)
    theta, beta = row(states[0].models, 0), knobs.get("beta", 1.0)
    direction = jax.tree.map(np.zeros_like, theta)
    for state in states[1:]:
        trained, means = [], []
        for k in (0, 1, 3, 4):
            (x, y), own, steps = examples(federation, k), theta, []
            for _ in range(3):
                steps.append(mean([sharp(own, x, y, knobs["rho"]), direction], [beta, 1 - beta]))
                own = step(own, steps[-1], RATE)
            trained.append(own)
            means.append(mean(steps, None))
        sizes = [size for size in SIZES if size]
        theta, direction = mean(trained, sizes), mean(means, sizes)
        toys.assert_trees_close(row(state.models, 0), theta, rtol=1e-5, atol=1e-5)
        if name == "mofedsam":
            toys.assert_trees_close(row(state.server, 0), direction, rtol=1e-5, atol=1e-5)


def test_with_its_own_gradient_alone_mofedsam_is_fedsam():
    """With batch statistics, and with momentum in the clients' optimizer."""
    options = {"model": toys.Normalized, "batch_size": 2, "epochs": 2}
    federation = toys.make_federation((2, 5, 3))
    last = lambda name, **knobs: (
        toys.play(name, federation, 2, optax.sgd(0.3, momentum=0.9), knobs, **options).states[-1].models
    )
    toys.assert_trees_close(last("mofedsam", beta=1.0), last("fedsam"), rtol=1e-5, atol=1e-6)


def test_the_direction_is_the_update_over_rate_and_steps():
    """With SGD, where all clients take as many steps; it travels both ways."""
    _, _, _, states, records = networks.play("mofedsam", 2, SIZES, epochs=3)
    moved = jax.tree.map(lambda a, b: (a - b) / (3 * RATE), states[1].models, states[2].models)
    toys.assert_trees_close(states[2].server, moved, rtol=1e-4, atol=1e-5)
    model = 4 * (3 * 6 + 6 + 6 * 3 + 3)
    assert records[0].down == 5 * 2 * model and records[0].up == 4 * (2 * model + 4)  # and n_k


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
