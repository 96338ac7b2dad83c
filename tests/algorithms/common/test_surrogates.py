"""The general form, with a surrogate that a user would write."""

import jax
import numpy as np
import optax
import pytest
import toys

from pfljax.algorithms import METHODS
from pfljax.algorithms.common import surrogates


@pytest.fixture(scope="module")
def example():
    yield toys.load_example("own_surrogate")
    METHODS.pop("moreau")  # no method of the tests after these


def test_a_round_of_pfedme_by_hand(example):
    rate, strength = 0.1, 3.0
    federation = toys.make_federation((4, 3), "regression", features=2)
    problem = toys.make_problem(federation, optax.sgd(rate), epochs=2)
    algorithm = example.Moreau(strength=strength).build(problem)
    states, _ = toys.train(algorithm, problem, federation.client_data, 1)
    start = np.float64(states[0].models["Dense_0"]["kernel"][0, :, 0]), np.float64(states[0].models["Dense_0"]["bias"])
    thetas, sums = [], np.zeros(2)
    for k, n in enumerate(federation.train.size):
        x, y = np.float64(federation.train.x[k, :n]), np.float64(federation.train.y[k, :n])
        w, b = start[0].copy(), start[1][0, 0]
        for _ in range(2):  # local steps on the loss and the proximal term
            error = 2 * (x @ w + b - y) / n
            w, b = (
                w - rate * (x.T @ error + strength * (w - start[0])),
                b - rate * (error.sum() + strength * (b - start[1][0, 0])),
            )
        thetas.append(w)
        u = start[0].copy()
        for _ in range(2):  # local steps in u on strength / 2 |theta - u|^2
            u = u - rate * strength * (u - w)
        sums += n * u
    found = states[1].clients.v["Dense_0"]["kernel"][..., 0]
    np.testing.assert_allclose(found, thetas, rtol=1e-4)
    np.testing.assert_allclose(states[1].models["Dense_0"]["kernel"][0, :, 0], sums / 7, rtol=1e-4)


def test_both_settings_agree_on_the_complete_graph(example):
    federation = toys.make_federation((4, 4, 4), "regression", features=2)
    problem = toys.make_problem(federation, optax.sgd(0.1))
    surrogate = example.Moreau(strength=1.0).surrogate(problem)
    with_server, _ = toys.train(surrogates.client_server(problem, surrogate), problem, federation.client_data, 3)
    without = surrogates.decentralized(problem, surrogate, surrogates.CommunicationGraph(graph="complete"))
    states, _ = toys.train(without, problem, federation.client_data, 3)
    for k in range(3):
        own = jax.tree.map(lambda leaf, k=k: leaf[k], states[-1].models)
        toys.assert_trees_close(own, with_server[-1].models, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_example_learns(example):
    assert example.main(rounds=8).accuracy > 0.6
