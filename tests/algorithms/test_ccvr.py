"""CCVR by hand on networks with one hidden layer: its Gaussians, its draws, its head, and FedAvg as its limit."""

import jax
import jax.numpy as jnp
import networks
import numpy as np
import toys
from networks import BODY, HEAD, RATE, examples, features, row, softmax

from pfljax.algorithms.ccvr import drawn, gaussians, square_root
from pfljax.algorithms.common import classes

SIZES, CLASSES, WIDTH = (9, 5, 0, 8, 1), 3, 6


def pooled(federation, theta):
    """The features and classes of all clients' examples."""
    x, y = (np.concatenate(parts) for parts in zip(*(examples(federation, k) for k in range(5)), strict=True))
    return features(theta, x), y


def test_the_gaussians_are_those_of_all_examples():
    federation, problem, _, states, _ = networks.play("ccvr", 1, SIZES)
    theta = states[0].models
    sums = [
        classes.feature_sums(problem, jax.tree.map(lambda leaf: leaf[0], theta), split, CLASSES, products=True)
        for split in (jax.tree.map(lambda leaf, k=k: jnp.asarray(leaf[k]), federation.train) for k in range(5))
    ]
    total = jax.tree.map(lambda *leaves: sum(leaves), *sums)
    mean, covariance, count = gaussians({"count": total.pop("counts"), **total})
    z, y = pooled(federation, row(theta, 0))
    np.testing.assert_array_equal(count, np.bincount(y, minlength=CLASSES))
    assert count.min() > 1
    for c in range(CLASSES):
        np.testing.assert_allclose(mean[c], z[y == c].mean(axis=0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(covariance[c], np.cov(z[y == c].T), rtol=1e-5, atol=1e-5)


def test_square_roots_of_covariances():
    """Of full and of lower rank, and of 0."""
    factor = np.random.default_rng(2).normal(size=(3, 6, 6))
    factor[1, :, 3:], factor[2] = 0, 0
    covariance = factor @ factor.transpose(0, 2, 1)
    root = np.asarray(square_root(jnp.float32(covariance)))
    np.testing.assert_allclose(root @ root.transpose(0, 2, 1), covariance, atol=0.01)
    assert np.abs(covariance[:2]).max() > 1


def test_a_matrix_with_negative_eigenvalues_counts_as_its_diagonal():
    matrices = np.array([[[1.0, 2.0], [2.0, 1.0]], [[4.0, 0.0], [0.0, -0.2]], [[2.0, 1.0], [1.0, 2.0]]])
    found = np.asarray(square_root(jnp.float32(matrices)))
    np.testing.assert_allclose(found[:2], [np.eye(2), np.diag([2.0, 0.0])], atol=1e-5)
    np.testing.assert_allclose(found[2] @ found[2], matrices[2], atol=1e-4)


def test_draws_have_the_mean_and_covariance_of_their_class():
    rng = np.random.default_rng(0)
    mean, root = rng.normal(size=(3, 2)), rng.normal(size=(3, 2, 2))
    root[1] = np.diag([1.0, 0.0])  # a singular covariance
    covariance = root @ root.transpose(0, 2, 1)
    given = jnp.float32(mean), jnp.float32(covariance), jnp.array([4.0, 2.0, 0.0])
    z, real = drawn(jax.random.key(0), given, 20_000)
    assert real.reshape(3, -1).all(axis=1).tolist() == [True, True, False] and not real[-20_000:].any()
    for c, found in enumerate(np.asarray(z).reshape(3, -1, 2)):
        np.testing.assert_allclose(found.mean(axis=0), mean[c], atol=0.05)
        np.testing.assert_allclose(np.cov(found.T), covariance[c], atol=0.1)


def test_the_head_is_trained_on_the_draws(monkeypatch):
    """With these given, by NumPy, from the head of the model that clients received."""
    rng = np.random.default_rng(1)
    z, real = rng.normal(size=(CLASSES * 4, WIDTH)), np.repeat([True, False, True], 4)
    monkeypatch.setattr("pfljax.algorithms.ccvr.drawn", lambda *_: (jnp.float32(z), jnp.asarray(real)))
    federation, problem, algorithm, states, _ = networks.play("ccvr", 2, SIZES, knobs={"virtual": 4, "steps": 5})
    theta = row(states[1].models, 0)
    head, y = theta[HEAD], np.repeat(range(CLASSES), 4)
    for _ in range(5):
        slope = (softmax(z @ head["kernel"] + head["bias"]) - np.eye(CLASSES)[y]) * real[:, None] / real.sum()
        head = {"kernel": head["kernel"] - RATE * z.T @ slope, "bias": head["bias"] - RATE * slope.sum(axis=0)}
    used = toys.predict(algorithm, problem, jax.random.key(0), states[2], federation.client_data).models
    for k in range(5):
        toys.assert_trees_close(row(row(used, k), 0), {BODY: theta[BODY], HEAD: head}, rtol=1e-5, atol=1e-5)


def test_training_is_fedavg_s_and_without_steps_so_is_the_model():
    options = {"rounds": 3, "sizes": SIZES, "batch_size": 2, "epochs": 2}
    fedavg = networks.play("fedavg", **options).states
    found = networks.play("ccvr", **options, knobs={"steps": 0}).states
    toys.assert_trees_close(found[-1].models, fedavg[-1].models, rtol=1e-5, atol=1e-6)
    toys.assert_trees_close(found[-1].server, fedavg[-2].models, rtol=1e-5, atol=1e-6)


def test_sums_travel_up_alone():
    *_, records = networks.play("ccvr", 1, SIZES)
    model = 4 * (3 * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES)
    assert records[0].down == 5 * model
    assert records[0].up == 4 * (model + 4 + 4 * CLASSES * (1 + WIDTH + WIDTH**2))  # and n_k
