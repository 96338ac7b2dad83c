"""FedAvg with data sharing: which examples are shared, and rounds by hand."""

import jax
import numpy as np
import pytest
import toys
from by_hand import by_hand
from quadratics import RATE, SIZES

HYPERPARAMETERS = {"share": 0.4}


def test_shared_data_are_a_uniform_part_of_all():
    federation = toys.make_federation(SIZES, "regression")
    algorithm = toys.make_algorithm("fedavg_data", toys.make_problem(federation), **HYPERPARAMETERS)
    everything = np.concatenate([federation.train.x[k, :size] for k, size in enumerate(SIZES)])
    targets = np.concatenate([federation.train.y[k, :size] for k, size in enumerate(SIZES)])
    drawn = np.zeros(len(everything))
    start = jax.jit(algorithm.start)
    for key in jax.random.split(jax.random.key(0), 200):
        pool = start(key, federation.client_data).state
        size = int(pool.size)
        assert size == 4  # 0.4 of 11 examples
        position = [
            int(np.flatnonzero((everything == x).all(axis=1))[0]) for x in np.asarray(pool.x[:size])
        ]
        assert len(set(position)) == size
        np.testing.assert_array_equal(np.asarray(pool.y[:size]), targets[position])
        drawn[position] += 1
    assert (np.abs(drawn - 200 * 4 / 11) < 30).all()  # standard deviation 6.8


def fedavg_data(rounds):
    """Everyone trains on the shared examples, too; these do not count in its weight n_k."""
    pool = rounds.states[0].server.state
    size = int(pool.size)
    theta = rounds.start("models")[0]
    for _ in rounds:
        trained = []
        for k in rounds.clients:
            x, y = rounds.examples(k)
            x = np.concatenate([x, np.float64(pool.x[:size])])
            x = np.append(x, np.ones((len(x), 1)), axis=1)
            y = np.concatenate([y, np.asarray(pool.y[:size])])
            trained.append(theta - RATE * 2 * x.T @ (x @ theta - y) / len(y))
        theta = rounds.mean(trained)
        yield {"models": [theta]}


def test_rounds_by_hand():
    by_hand("fedavg_data", fedavg_data, rounds=2, epochs=1, hyperparameters=HYPERPARAMETERS)


def test_its_cost_counts_the_shared_examples():
    """Steps in batches of two: of 5 and of 0.4 x 4 x 5 shared examples, in place of 5."""
    problem = toys.make_problem(toys.make_federation(SIZES, "regression"), batch_size=2)
    assert toys.make_algorithm(
        "fedavg_data", problem, **HYPERPARAMETERS
    ).ledger.passes == pytest.approx(7 / 3)
