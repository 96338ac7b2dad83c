"""FedSAM and MoFedSAM by hand on a network; a minimum, and batch statistics."""

import jax
import networks
import numpy as np
import optax
import pytest
import quadratics
import toys
from by_hand import by_hand, entry, stack
from networks import RATE, examples, mean, row, step

SIZES = (2, 5, 0, 3, 4)


def sharp(params, x, y, rho):
    """The gradient at the point of ascent."""
    g = networks.gradient(params, x, y)
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(g)))
    return networks.gradient(step(params, g, -rho / norm), x, y)


def fedsam(rho, beta=1.0):
    """Clients step along beta s + (1 - beta) d, s the gradient at the point of ascent and d the last direction."""

    def reference(rounds):
        theta = row(rounds.start("models"), 0)
        direction = jax.tree.map(np.zeros_like, theta)

        for number in rounds:
            trained = []
            directions = []
            active = rounds.active(number)
            for k in active:
                own = theta
                steps = []
                for _ in range(rounds.epochs):
                    slope = sharp(own, *rounds.examples(k), rho)
                    steps.append(mean([slope, direction], [beta, 1 - beta]))
                    own = step(own, steps[-1], RATE)
                trained.append(own)
                directions.append(mean(steps, None))

            weights = rounds.sizes[active]
            theta = mean(trained, weights)
            direction = mean(directions, weights)
            expected = {"models": stack([theta])}
            if beta < 1:
                expected["server.state"] = direction
            yield expected

    return reference


@pytest.mark.parametrize(
    ("name", "hyperparameters"),
    [
        ("fedsam", {"rho": 0.0}),
        ("fedsam", {"rho": 0.5}),
        ("mofedsam", {"rho": 0.5, "beta": 0.3}),
    ],
)
def test_rounds_by_hand(name, hyperparameters):
    """With radius 0, FedSAM is FedAvg."""
    by_hand(
        name,
        fedsam(**hyperparameters),
        hyperparameters=hyperparameters,
        sizes=SIZES,
        hidden=(6,),
        epochs=3,
        rtol=1e-5,
    )


def test_at_a_minimum_there_is_no_way_up():
    """A client whose gradient is 0 stays where it is."""
    federation = toys.make_federation((3,), "regression")
    federation.train.x[...] = 0
    federation.train.y[...] = 0  # and the bias starts at 0
    states = quadratics.play("fedsam", 1, federation=federation)[2]
    first, last = (quadratics.vectors(state.models) for state in states)
    np.testing.assert_allclose(last, first, atol=1e-6)


@pytest.mark.parametrize("name", ["fedsam", "mofedsam"])
def test_batch_statistics_are_those_of_the_inputs(name):
    """Written once a step, however many gradients it takes."""
    federation = toys.make_federation((5, 5, 5))
    options = {"model": toys.Normalized, "epochs": 2}
    states = toys.play(name, federation, 2, networks.OPTIMIZER, **options).states
    inputs = [examples(federation, k)[0].mean(axis=0) for k in range(3)]
    mean = np.mean(inputs, axis=0)
    before, after = (entry(state, "models.batch_stats.BatchNorm_0.mean")[0] for state in states[1:])
    np.testing.assert_allclose(after, 0.7**2 * before + (1 - 0.7**2) * mean, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_with_its_own_gradient_alone_mofedsam_is_fedsam():
    """With batch statistics, and with momentum in the clients' optimizer."""
    federation = toys.make_federation((2, 5, 3))
    options = {
        "optimizer": optax.sgd(0.3, momentum=0.9),
        "model": toys.Normalized,
        "batch_size": 2,
        "epochs": 2,
    }
    fedsam = toys.play("fedsam", federation, 2, **options).states[-1].models
    options["hyperparameters"] = {"beta": 1.0}
    mofedsam = toys.play("mofedsam", federation, 2, **options).states[-1].models
    toys.assert_trees_close(mofedsam, fedsam, rtol=1e-5, atol=1e-6)
