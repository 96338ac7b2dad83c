"""MOCHA: the relationship between tasks, rounds by hand, and its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import toys
from by_hand import by_hand

from pfljax.algorithms import mocha
from pfljax.contract import tree

STRENGTH = 0.05
RIDGE = 0.2


def test_mocha_s_relationship_of_two_tasks():
    relationship = jax.jit(mocha.relationship)
    products = jnp.diag(jnp.array([25.0, 25.0]))
    np.testing.assert_allclose(
        relationship(products), [[0.5, 0], [0, 0.5]], atol=1e-6
    )  # orthogonal, both 5 long
    rows = np.array([[1.0, 2.0, -1.0], [2.0, 1.0, 0.5]])
    root = scipy.linalg.sqrtm(rows @ rows.T)
    weights = {"kernel": jnp.asarray(rows[:, :2]), "bias": jnp.asarray(rows[:, 2])}
    omega = relationship(tree.inner_products(weights, weights))
    np.testing.assert_allclose(omega, root / np.trace(root), rtol=1e-5)

    # It minimizes tr(W' Omega^-1 W) among positive matrices of trace 1.
    def objective(omega):
        return np.trace(rows.T @ np.linalg.solve(omega, rows))

    least = objective(np.float64(omega))
    rng = np.random.default_rng(0)
    for _ in range(50):
        other = rng.normal(size=(2, 2))
        other = other @ other.T
        assert objective(other / np.trace(other)) >= least - 1e-6


def multitask(rounds):
    """Clients' models W under the relationship Omega = (W W')^1/2 / tr (W W')^1/2."""
    weights = rounds.start("clients.row.params")
    omega = np.eye(4) / 4
    for number in rounds:
        precision = np.linalg.inv(omega + RIDGE / 4 * np.eye(4))
        trained = []
        for k in rounds.clients:
            others = precision[k] @ weights - precision[k, k] * weights[k]

            def pull(own, k=k, others=others, by=precision):
                return STRENGTH * (by[k, k] * own + others)

            trained.append(rounds.descend(k, weights[k], pull))
        weights = np.array(trained)
        root = np.real(scipy.linalg.sqrtm(weights @ weights.T))
        omega = root / np.trace(root)
        np.testing.assert_allclose(
            rounds.states[number + 1].server.state.omega, omega, rtol=1e-2, atol=1e-3
        )
        yield {"clients.row.params": weights, "predictions": weights[:, None]}


def test_mocha_by_hand():
    hyperparameters = {"mu": STRENGTH, "ridge": RIDGE}
    by_hand("mocha", multitask, hyperparameters=hyperparameters, rtol=1e-3, atol=1e-4)


def test_of_a_network_mocha_relates_the_last_layer():
    federation = toys.make_federation((2, 5, 1, 3), "regression")
    problem = toys.make_problem(federation, hidden=(5,))
    algorithm = toys.make_algorithm("mocha", problem)
    state = jax.eval_shape(
        lambda: toys.init(algorithm, problem, jax.random.key(0), federation.client_data)
    )
    assert state.server.state.weights["Dense_0"] == {"bias": None, "kernel": None}
    assert state.server.state.weights["Dense_1"]["kernel"].shape == (4, 5, 1)
