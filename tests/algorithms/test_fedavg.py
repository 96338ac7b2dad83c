"""FedAvg and FedAvg+ by hand, and their limits."""

import jax
import numpy as np
import optax
import pytest
import toys
from quadratics import MINI, RATE, SIZES, check_averages, descend, play, vectors


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_mean_is_weighted_by_examples(epochs):
    federation, _, states, records, _ = play("fedavg", epochs=epochs)
    check_averages(states, lambda k, theta: descend(federation, k, theta, epochs))
    for record in records:
        assert record.down == record.up - 4 * 4 == 4 * 4 * 4  # four models; up, n_k beside each


def test_only_the_cohort_is_averaged():
    federation, algorithm, _, _, _ = play("fedavg", rounds=0)
    problem = toys.make_problem(federation, optax.sgd(RATE), cohort=2)
    seen = set()
    watched = toys.watched(algorithm, lambda number, client, ids: seen.add(int(client)))
    states, _ = toys.train(watched, problem, federation.client_data, 1)
    jax.effects_barrier()
    assert len(seen) == 2
    trained = [descend(federation, k, vectors(states[0].models)[0], 1) for k in seen]
    expected = np.average(trained, axis=0, weights=[SIZES[k] for k in seen])
    np.testing.assert_allclose(vectors(states[1].models)[0], expected, rtol=2e-4, atol=1e-6)


def test_with_one_client_it_is_local_training():
    average, local = (play(name, sizes=(5,), **MINI)[2][-1].models for name in ("fedavg", "local"))
    toys.assert_trees_close(average, local, rtol=1e-5, atol=1e-6)
    average, local = (vectors(play(name, **MINI)[2][-1].models)[0] for name in ("fedavg", "local"))
    assert np.abs(average - local).max() > 0.01


@pytest.mark.parametrize("tune_epochs", [0, 2])
def test_tuning_starts_from_the_global_model(tune_epochs):
    federation, algorithm, states, _, _ = play("fedavg_plus", knobs={"tune_epochs": tune_epochs})
    toys.assert_trees_close(states, play("fedavg")[2])
    problem, theta = toys.make_problem(federation, optax.sgd(RATE)), vectors(states[-1].models)[0]
    for give in (toys.predict, toys.adapt):
        found = give(algorithm, problem, jax.random.key(0), states[-1], federation.client_data)
        for k in range(4):
            tuned = descend(federation, k, theta, tune_epochs)
            np.testing.assert_allclose(vectors(found.models)[k], [tuned], rtol=2e-4, atol=1e-6)
