"""MOON by hand on networks with one hidden layer, and FedAvg as its limit."""

import flax.linen as nn
import jax
import networks
import numpy as np
import optax
import pytest
import toys
from networks import RATE, assert_row_close, examples, features, gradient, mean, row, step

from pfljax.algorithms.moon import cosine
from pfljax.exchange.rounds import cohort_of

SIZES = (2, 5, 0, 3, 4)
MINI = {"rounds": 3, "sizes": SIZES, "batch_size": 2, "epochs": 2}


def slope_of_cosine(z, other):
    """The gradient of sim(z, other) in z, row by row, and sim itself."""
    length, others = (np.linalg.norm(v, axis=1, keepdims=True) for v in (z, other))
    sim = (z * other).sum(axis=1, keepdims=True) / (length * others)
    return other / (length * others) - sim * z / length**2, sim


def contrast(z, z_glob, z_prev, tau):
    """The gradient of Eq. 3 in z, a row for each example."""
    (to_glob, near), (to_prev, far) = slope_of_cosine(z, z_glob), slope_of_cosine(z, z_prev)
    missed = np.exp(far / tau) / (np.exp(near / tau) + np.exp(far / tau))
    return -missed * (to_glob - to_prev) / tau


@pytest.mark.parametrize("cohort", [2, 5])
def test_by_hand(cohort):
    mu, tau = 3.0, 0.4
    options = {"knobs": {"mu": mu, "tau": tau}, "epochs": 3, "cohort": cohort}
    federation, _, _, states, records = networks.play("moon", 4, SIZES, **options)
    theta, previous = row(states[0].models, 0), {}
    for number in range(4):
        ids = np.asarray(cohort_of(jax.random.key(0), number, 5, cohort).ids)
        trained = {}
        for k in ids[np.array(SIZES)[ids] > 0]:
            x, y = examples(federation, k)
            own, before = theta, previous.get(k, theta)
            for _ in range(3):
                z = [features(weights, x) for weights in (own, theta, before)]
                assert all((np.linalg.norm(v, axis=1) > 1e-3).all() for v in z)
                slope = mu * contrast(*z, tau) / len(y)
                own = step(own, gradient(own, x, y, pull=slope), RATE)
            trained[k] = previous[k] = own
        sizes = [SIZES[k] for k in trained]
        theta = mean([*trained.values()], sizes)
        state = states[number + 1]
        assert_row_close(state.models, theta)
        for k, own in previous.items():
            assert_row_close(state.clients.previous, own, k)
        assert set(np.flatnonzero(state.clients.trained)) == set(previous)
    size = 3 * 6 + 6 + 6 * 3 + 3
    assert records[0].down == cohort * size * 4  # what a client trained before stays with it


def test_a_linear_model_has_no_features_to_train():
    fedavg = networks.play("fedavg", hidden=(), **MINI)[3][-1].models
    toys.assert_trees_close(networks.play("moon", hidden=(), **MINI)[3][-1].models, fedavg, rtol=1e-6, atol=1e-6)


def test_features_of_zero_have_a_gradient():
    zero, other = np.zeros((1, 4), np.float32), np.ones((1, 4), np.float32)
    assert np.isfinite(jax.grad(lambda z: cosine(z, other).sum())(zero)).all() and cosine(zero, other) == 0
    np.testing.assert_allclose(cosine(3 * other, other), 1, rtol=1e-6)


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
        toys.play(name, federation, 3, optax.sgd(0.1), knobs, **options).states[-1].models
        for name, knobs in (("fedavg", {}), ("moon", {"mu": 5.0}))
    ]
    toys.assert_trees_close(last[0]["batch_stats"], last[1]["batch_stats"], rtol=1e-5, atol=1e-6)
    assert np.abs(last[0]["Dense_0"]["kernel"] - last[1]["Dense_0"]["kernel"]).max() > 1e-3
