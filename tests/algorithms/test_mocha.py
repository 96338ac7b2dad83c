"""MOCHA: the relationship between tasks, rounds by hand, and its limits."""

import jax.numpy as jnp
import numpy as np
import scipy.linalg
from quadratics import descend, play, vectors

from pfljax.algorithms import mocha
from pfljax.contract import tree


def test_mocha_s_relationship_of_two_tasks():
    products = jnp.diag(jnp.array([25.0, 25.0]))
    np.testing.assert_allclose(mocha.relationship(products), [[0.5, 0], [0, 0.5]], atol=1e-6)  # orthogonal, both 5 long
    rows = np.array([[1.0, 2.0, -1.0], [2.0, 1.0, 0.5]])
    root = scipy.linalg.sqrtm(rows @ rows.T)
    weights = {"kernel": jnp.asarray(rows[:, :2]), "bias": jnp.asarray(rows[:, 2])}
    omega = mocha.relationship(tree.inner_products(weights, weights))
    np.testing.assert_allclose(omega, root / np.trace(root), rtol=1e-5)
    # It minimizes tr(W' Omega^-1 W) among positive matrices of trace 1.
    objective = lambda omega: np.trace(rows.T @ np.linalg.solve(omega, rows))
    least, rng = objective(np.float64(omega)), np.random.default_rng(0)
    for _ in range(50):
        other = rng.normal(size=(2, 2))
        other = other @ other.T
        assert objective(other / np.trace(other)) >= least - 1e-6


def test_mocha_by_hand():
    strength, ridge = 0.05, 0.2
    federation, _, states, records, predictions = play(
        "mocha", rounds=3, epochs=2, knobs={"strength": strength, "ridge": ridge}
    )
    weights = vectors(states[0].clients.model)
    omega = np.eye(4) / 4
    for number in range(3):
        precision = np.linalg.inv(omega + ridge / 4 * np.eye(4))
        trained = weights.copy()
        for k in range(4):
            weight, others = precision[k, k], precision[k] @ weights - precision[k, k] * weights[k]
            pull = lambda own, weight=weight, others=others: strength * (weight * own + others)
            trained[k] = descend(federation, k, weights[k], 2, pull)
        weights = trained
        root = np.real(scipy.linalg.sqrtm(weights @ weights.T))
        omega = root / np.trace(root)
        state = states[number + 1]
        np.testing.assert_allclose(vectors(state.clients.model), weights, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(state.server.omega, omega, rtol=1e-2, atol=1e-3)
        assert records[number].up == 4 * 4 * 4 and records[number].down == 4 * (4 + 1) * 4
    np.testing.assert_allclose(vectors(predictions.models)[:, 0], weights, rtol=1e-3, atol=1e-4)


def test_of_a_network_mocha_relates_the_last_layer():
    states = play("mocha", hidden=(5,), rounds=1)[2]
    assert states[-1].server.weights["Dense_0"] == {"bias": None, "kernel": None}
    assert states[-1].server.weights["Dense_1"]["kernel"].shape == (4, 5, 1)
