"""FedAvg with data sharing: which examples are shared, a round by hand, and its traffic."""

import jax
import numpy as np
import optax
import toys
from quadratics import RATE, SIZES, vectors


def test_shared_data_are_a_uniform_part_of_all_and_everyone_trains_on_them():
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE))
    algorithm = toys.make_algorithm("fedavg_data", problem, share=0.4)
    everything = np.concatenate([federation.train.x[k, :size] for k, size in enumerate(SIZES)])
    targets = np.concatenate([federation.train.y[k, :size] for k, size in enumerate(SIZES)])
    drawn = np.zeros(len(everything))
    start = jax.jit(algorithm.start)
    for key in jax.random.split(jax.random.key(0), 200):
        pool = start(key, federation.client_data).server
        size = int(pool.size)
        assert size == 4  # 0.4 of 11 examples
        place = [int(np.flatnonzero((everything == x).all(axis=1))[0]) for x in np.asarray(pool.x[:size])]
        assert len(set(place)) == size
        np.testing.assert_array_equal(np.asarray(pool.y[:size]), targets[place])
        drawn[place] += 1
    assert (np.abs(drawn - 200 * 4 / 11) < 30).all()  # standard deviation 6.8

    states, _ = toys.train(algorithm, problem, federation.client_data, 1)
    pool = states[0].server
    size, theta = int(pool.size), vectors(states[0].models)[0]
    trained = []
    for k in range(4):
        x = np.concatenate([federation.train.x[k, : SIZES[k]], np.asarray(pool.x[:size])])
        x = np.append(np.float64(x), np.ones((len(x), 1)), axis=1)
        y = np.concatenate([federation.train.y[k, : SIZES[k]], np.asarray(pool.y[:size])])
        trained.append(theta - RATE * 2 * x.T @ (x @ theta - y) / len(y))
    expected = np.average(trained, axis=0, weights=SIZES)
    np.testing.assert_allclose(vectors(states[1].models)[0], expected, rtol=1e-4, atol=1e-6)


def test_shared_examples_are_sent_once():
    """Their bytes are spread over the rounds in which a client takes part."""
    federation = toys.make_federation((5, 5, 5, 5), "regression")
    problem = toys.make_problem(federation, cohort=2, rounds=10)  # 5 rounds each, in the mean
    algorithm = toys.make_algorithm("fedavg_data", problem, share=0.5)
    (record,) = toys.train(algorithm, problem, federation.client_data, 1)[1]
    model, examples = 4 * 4, 10 * (3 + 1) * 4
    assert record.down == 2 * (model + examples / 5)
