"""CCVR by hand on networks with one hidden layer: its Gaussians, its draws, its head, and FedAvg as its limit."""

import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest
import toys
from by_hand import by_hand, stack
from networks import HEAD, RATE, descend, examples, features, row, softmax

from pfljax.algorithms.ccvr import Gaussians, draw, estimate, square_root
from pfljax.algorithms.common import classes

SIZES = (9, 5, 0, 8, 1)
CLASSES = 3
WIDTH = 6
VIRTUAL = 4
STEPS = 5


def test_the_gaussians_are_those_of_all_examples():
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, networks.OPTIMIZER, hidden=(WIDTH,))
    models = problem.init_models(jax.random.key(0), 1)

    @jax.jit
    def of_all(params, clients):
        sums = jax.lax.map(
            lambda split: classes.feature_sums(problem, params, split, CLASSES, products=True),
            clients,
        )
        total = jax.tree.map(lambda leaf: leaf.sum(axis=0), sums)
        return estimate(total.sums, total.products, total.counts)

    mean, covariance, count = of_all(jax.tree.map(lambda leaf: leaf[0], models), federation.train)
    parts = [examples(federation, k) for k in range(5)]
    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    z = features(row(models, 0), x)
    np.testing.assert_array_equal(count, np.bincount(y, minlength=CLASSES))
    assert count.min() > 1
    for c in range(CLASSES):
        np.testing.assert_allclose(mean[c], z[y == c].mean(axis=0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(covariance[c], np.cov(z[y == c].T), rtol=1e-5, atol=1e-5)


def test_square_roots_of_covariances():
    """Of full and of lower rank, and of 0; a matrix with negative eigenvalues counts as its diagonal."""
    factor = np.random.default_rng(2).normal(size=(3, 6, 6))
    factor[1, :, 3:] = 0
    factor[2] = 0
    covariance = factor @ factor.transpose(0, 2, 1)
    assert np.abs(covariance[:2]).max() > 1

    others = np.zeros((3, 6, 6))
    others[:, :2, :2] = [
        [[1.0, 2.0], [2.0, 1.0]],
        [[4.0, 0.0], [0.0, -0.2]],
        [[2.0, 1.0], [1.0, 2.0]],
    ]
    matrices = np.float32(np.concatenate([covariance, others]))
    roots = np.asarray(jax.jit(square_root)(matrices))
    np.testing.assert_allclose(roots[:3] @ roots[:3].transpose(0, 2, 1), covariance, atol=0.01)
    np.testing.assert_allclose(roots[3], np.diag([1.0, 1.0, 0, 0, 0, 0]), atol=1e-5)
    np.testing.assert_allclose(roots[4], np.diag([2.0, 0, 0, 0, 0, 0]), atol=1e-5)
    np.testing.assert_allclose(roots[5] @ roots[5], others[2], atol=1e-4)


def test_draws_have_the_mean_and_covariance_of_their_class():
    rng = np.random.default_rng(0)
    mean = rng.normal(size=(3, 2))
    root = rng.normal(size=(3, 2, 2))
    root[1] = np.diag([1.0, 0.0])  # a singular covariance
    covariance = root @ root.transpose(0, 2, 1)
    gaussians = Gaussians(jnp.float32(mean), jnp.float32(covariance), jnp.array([4.0, 2.0, 0.0]))
    z, real = jax.jit(draw, static_argnums=2)(jax.random.key(0), gaussians, 20_000)
    assert real.reshape(3, -1).all(axis=1).tolist() == [True, True, False]
    assert not real[-20_000:].any()
    for c, found in enumerate(np.asarray(z).reshape(3, -1, 2)):
        np.testing.assert_allclose(found.mean(axis=0), mean[c], atol=0.05)
        np.testing.assert_allclose(np.cov(found.T), covariance[c], atol=0.1)


def ccvr(z, real):
    """The model is FedAvg's; clients predict with the one that they received, whose head is trained on the draws."""

    def calibrated(head):
        y = np.repeat(range(CLASSES), VIRTUAL)
        for _ in range(STEPS):
            probabilities = softmax(z @ head["kernel"] + head["bias"])
            slope = (probabilities - np.eye(CLASSES)[y]) * real[:, None] / real.sum()
            head = {
                "kernel": head["kernel"] - RATE * z.T @ slope,
                "bias": head["bias"] - RATE * slope.sum(axis=0),
            }
        return head

    def reference(rounds):
        theta = row(rounds.start("models"), 0)
        for number in rounds:
            served = theta | {HEAD: calibrated(theta[HEAD])}
            active = rounds.active(number)
            trained = [descend(theta, *rounds.examples(k), RATE, rounds.epochs) for k in active]
            theta = rounds.mean(trained, rounds.sizes[active])
            yield {
                "models": stack([theta]),
                "server.state": stack([served]),
                "predictions": [[served] for _ in rounds.clients],
            }

    return reference


def test_ccvr_by_hand(monkeypatch):
    """With given draws; those of the second class have no examples."""
    rng = np.random.default_rng(1)
    z = rng.normal(size=(CLASSES * VIRTUAL, WIDTH))
    real = np.repeat([True, False, True], VIRTUAL)

    def draw_given(key, gaussians, num):
        return jnp.float32(z), jnp.asarray(real)

    monkeypatch.setattr("pfljax.algorithms.ccvr.draw", draw_given)
    monkeypatch.setattr(toys, "COMPILED", {})  # programs with these draws are nobody else's
    hyperparameters = {"virtual": VIRTUAL, "server_steps": STEPS}
    by_hand(
        "ccvr",
        ccvr(z, real),
        hyperparameters=hyperparameters,
        sizes=SIZES,
        hidden=(WIDTH,),
        rounds=2,
        rtol=1e-5,
    )


@pytest.mark.slow
def test_without_steps_the_model_is_fedavg_s():
    options = {"rounds": 3, "sizes": SIZES, "batch_size": 2, "epochs": 2}
    fedavg = networks.play("fedavg", **options).states
    found = networks.play("ccvr", **options, hyperparameters={"server_steps": 0}).states
    toys.assert_trees_close(found[-1].models, fedavg[-1].models, rtol=1e-5, atol=1e-6)
    toys.assert_trees_close(found[-1].server.state, fedavg[-2].models, rtol=1e-5, atol=1e-6)
