"""FedExP by hand on quadratics."""

import jax
import numpy as np
import pytest
import toys
from quadratics import descend, play, vectors

EMPTY = (2, 0, 5, 1, 3)


@pytest.mark.parametrize("mean", ["weighted", "uniform"])
def test_by_hand(mean):
    eps = 0.01
    federation, algorithm, states, records, predictions = play(
        "fedexp", rounds=4, epochs=8, sizes=EMPTY, knobs={"eps": eps, "mean": mean}
    )
    share = np.float64(EMPTY) if mean == "weighted" else np.float64(np.array(EMPTY) > 0)
    share /= share.sum()
    models, rates = [vectors(states[0].models)[0]], []
    for number in range(4):
        theta, moved = models[-1], np.zeros((5, 4))
        for k in np.flatnonzero(EMPTY):
            moved[k] = descend(federation, k, theta, 8) - theta
        step = share @ moved
        rates.append(max(1, share @ np.square(moved).sum(axis=1) / (2 * (step @ step + eps))))
        models.append(theta + rates[-1] * step)
        np.testing.assert_allclose(records[number].metrics["server_rate"], rates[-1], rtol=1e-4)
        np.testing.assert_allclose(vectors(states[number + 1].models)[0], models[-1], rtol=1e-4, atol=2e-5)
    assert rates[0] == 1 < 1.5 < max(rates)
    expected = (models[-1] + models[-2]) / 2
    expected = np.tile(expected, (5, 1, 1))
    np.testing.assert_allclose(vectors(predictions.models), expected, rtol=1e-4, atol=2e-5)
    problem, key, clients = toys.make_problem(federation), jax.random.key(0), federation.client_data
    last = toys.predict(toys.make_algorithm("fedexp", problem, predict="last"), problem, key, states[-1], clients)
    np.testing.assert_array_equal(vectors(last.models)[:, 0], np.tile(vectors(states[-1].models), (5, 1)))
    newcomers = toys.adapt(algorithm, problem, key, states[-1], clients)
    toys.assert_trees_close(newcomers.models, predictions.models, rtol=1e-6)
    # The norm of an update is a scalar, and the second-to-last model stays at the server.
    assert records[0].down == 5 * 4 * 4 and records[0].up == 4 * (4 + 1) * 4
