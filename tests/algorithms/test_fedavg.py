"""FedAvg and FedAvg+ by hand, and their limits."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
import toys

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Split

SIZES = (2, 5, 1, 3)
RATE = 0.1


def client_steps(theta, split: Split, k, steps):
    """Gradient descent on client k's mean squared error; the intercept is the last parameter."""
    size = split.size[k]
    x = np.append(np.float64(split.x[k, :size]), np.ones((size, 1)), axis=1)
    for _ in range(steps):
        theta = theta - RATE * 2 * x.T @ (x @ theta - split.y[k, :size]) / size
    return theta


def vector(models, row=0):
    layer = models["Dense_0"]
    return np.append(np.float64(layer["kernel"])[row, :, 0], np.float64(layer["bias"])[row, 0])


def play(name, sizes=SIZES, rounds=2, **options):
    """(federation, problem, algorithm, states, records)."""
    knobs = options.pop("knobs", {})
    federation = toys.make_federation(sizes, "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE), **options)
    algorithm = toys.make_algorithm(name, problem, **knobs)
    return federation, problem, algorithm, *toys.train(algorithm, problem, federation.client_data, rounds)


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_mean_is_weighted_by_examples(epochs):
    federation, _, _, states, records = play("fedavg", epochs=epochs)
    theta = vector(states[0].models)
    for number in range(2):
        trained = [client_steps(theta, federation.train, k, epochs) for k in range(4)]
        theta = np.average(trained, axis=0, weights=SIZES)
        np.testing.assert_allclose(vector(states[number + 1].models), theta, rtol=2e-4, atol=1e-6)
        assert records[number].down == records[number].up - 4 * 4 == 4 * 4 * 4  # four models; up, n_k beside each


def test_only_the_cohort_is_averaged():
    federation, _, algorithm, _, _ = play("fedavg", rounds=0)
    problem = toys.make_problem(federation, optax.sgd(RATE), cohort=2)
    seen = []
    init_download = algorithm.download

    def download(context, row, cohort):
        jax.debug.callback(lambda ids: seen.append(np.asarray(ids)), cohort.ids)
        return init_download(context, row, cohort)

    states, _ = toys.train(dataclasses.replace(algorithm, download=download), problem, federation.client_data, 1)
    jax.effects_barrier()
    theta = vector(states[0].models)
    trained = [client_steps(theta, federation.train, k, 1) for k in seen[0]]
    expected = np.average(trained, axis=0, weights=np.array(SIZES)[seen[0]])
    np.testing.assert_allclose(vector(states[1].models), expected, rtol=2e-4, atol=1e-6)


def test_with_one_client_it_is_local_training():
    options = {"sizes": (5,), "rounds": 3, "batch_size": 2, "epochs": 2}
    average, local = play("fedavg", **options)[3], play("local", **options)[3]
    toys.assert_trees_close(average[-1].models, local[-1].models, rtol=1e-5, atol=1e-6)
    average, local = play("fedavg", batch_size=2)[3], play("local", batch_size=2)[3]
    assert np.abs(vector(average[-1].models) - vector(local[-1].models)).max() > 0.01


@pytest.mark.parametrize("tune_epochs", [0, 2])
def test_tuning_starts_from_the_global_model(tune_epochs):
    federation, problem, algorithm, states, _ = play("fedavg_plus", knobs={"tune_epochs": tune_epochs})
    toys.assert_trees_close(states, play("fedavg")[3])
    theta = vector(states[-1].models)
    for give in (toys.predict, toys.adapt):
        found = give(algorithm, problem, jax.random.key(0), states[-1], federation.client_data)
        assert found.weights.shape == (4, 1)
        models = jax.tree.map(lambda leaf: leaf[:, 0], found.models)
        for k in range(4):
            tuned = client_steps(theta, federation.train, k, tune_epochs)
            np.testing.assert_allclose(vector(models, k), tuned, rtol=2e-4, atol=1e-6)


def test_negative_tuning_is_refused():
    with pytest.raises(ArgumentError, match=r"^fedavg_plus\.tune_epochs=-1: accepted: 0 or more$"):
        play("fedavg_plus", knobs={"tune_epochs": -1})
