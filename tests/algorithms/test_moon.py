"""MOON by hand on networks with one hidden layer, and what the contrast leaves alone."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
import toys
from by_hand import by_hand, stack
from networks import RATE, features, gradient, row, step

from pfljax.algorithms.moon import cosine

SIZES = (2, 5, 0, 3, 4)


def slope_of_cosine(z, other):
    """The gradient of sim(z, other) in z, row by row, and sim itself."""
    length, others = (np.linalg.norm(v, axis=1, keepdims=True) for v in (z, other))
    sim = (z * other).sum(axis=1, keepdims=True) / (length * others)
    return other / (length * others) - sim * z / length**2, sim


def contrast(z, z_glob, z_prev, tau):
    """The gradient of Eq. 3 in z, a row for each example."""
    to_glob, near = slope_of_cosine(z, z_glob)
    to_prev, far = slope_of_cosine(z, z_prev)
    missed = np.exp(far / tau) / (np.exp(near / tau) + np.exp(far / tau))
    return -missed * (to_glob - to_prev) / tau


def moon(mu, temperature):
    """Algorithm 1, where a client that was never trained has the global model as its previous one."""

    def reference(rounds):
        theta = row(rounds.start("models"), 0)
        previous = [jax.tree.map(np.zeros_like, theta) for _ in rounds.clients]
        known = np.zeros(len(rounds.sizes), bool)

        for number in rounds:
            trained = []
            for k in rounds.cohort(number):
                x, y = rounds.examples(k)
                own = theta
                before = previous[k] if known[k] else theta
                for _ in range(rounds.epochs if len(y) else 0):
                    z, z_glob, z_prev = (features(params, x) for params in (own, theta, before))
                    pull = mu * contrast(z, z_glob, z_prev, temperature) / len(y)
                    own = step(own, gradient(own, x, y, pull=pull), RATE)
                trained.append(own)
                previous[k] = own
                known[k] |= len(y) > 0
            theta = rounds.mean(trained, rounds.sizes[rounds.cohort(number)])
            yield {
                "models": stack([theta]),
                "clients.row.has_trained": known,
                "clients.row.previous": previous,
            }

    return reference


def test_moon_by_hand():
    """Clients return after rounds without them."""
    hyperparameters = {"mu": 3.0, "temperature": 0.4}
    options = {"sizes": SIZES, "hidden": (6,), "rounds": 4, "epochs": 3, "cohort": 3}
    by_hand(
        "moon",
        moon(**hyperparameters),
        hyperparameters=hyperparameters,
        rtol=2e-4,
        atol=2e-5,
        **options,
    )


def test_features_of_zero_have_a_gradient():
    """The gradient is finite, and the similarity is 0; that of parallel features is 1."""
    other = np.ones((1, 4), np.float32)
    similarity = jax.jit(jax.value_and_grad(lambda z: cosine(z, other).sum()))
    of_zero, slope = similarity(np.zeros_like(other))
    assert of_zero == 0
    assert np.isfinite(slope).all()
    np.testing.assert_allclose(similarity(3 * other)[0], 1, rtol=1e-6)


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.7)(x)
        return nn.Dense(3)(nn.relu(nn.Dense(5)(x)))


@pytest.mark.slow
def test_the_contrast_moves_no_batch_statistics():
    federation = toys.make_federation(SIZES)
    options = {"model": Normalized(), "batch_size": 2, "epochs": 2}
    last = [
        toys.play(name, federation, 3, optax.sgd(0.1), hyperparameters, **options).states[-1].models
        for name, hyperparameters in (("fedavg", {}), ("moon", {"mu": 5.0}))
    ]
    toys.assert_trees_close(last[0]["batch_stats"], last[1]["batch_stats"], rtol=1e-5, atol=1e-6)
    assert np.abs(last[0]["Dense_0"]["kernel"] - last[1]["Dense_0"]["kernel"]).max() > 1e-3
