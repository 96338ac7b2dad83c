"""FedDyn by hand on quadratics, and what clients send and keep."""

import numpy as np
import pytest
from quadratics import SIZES, descend, play, vectors

EMPTY = (2, 0, 5, 1, 3)


def weights_of(sizes, mean):
    return np.float64(sizes) if mean == "weighted" else np.float64(np.array(sizes) > 0)


@pytest.mark.parametrize("mean", ["weighted", "uniform"])
def test_by_hand(mean):
    alpha = 0.7
    knobs = {"alpha": alpha, "mean": mean}
    federation, _, states, records, _ = play("feddyn", rounds=3, epochs=3, sizes=EMPTY, knobs=knobs)
    weights = weights_of(EMPTY, mean)
    theta, slopes, h = vectors(states[0].models)[0], np.zeros((5, 4)), np.zeros(4)
    for number in range(3):
        trained = np.tile(theta, (5, 1))
        for k in np.flatnonzero(EMPTY):
            pull = lambda own, theta=theta, slope=slopes[k]: alpha * (own - theta) - slope
            trained[k] = descend(federation, k, theta, 3, pull)
            slopes[k] = slopes[k] - alpha * (trained[k] - theta)
        h = h - alpha * weights @ (trained - theta) / weights.sum()
        theta = weights @ trained / weights.sum() - h / alpha
        state = states[number + 1]
        np.testing.assert_allclose(vectors(state.models)[0], theta, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(vectors(state.clients.gradient), slopes, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(vectors(state.server.h)[0], h, rtol=1e-4, atol=1e-5)
    # h stays at the server, and g_k with its client; the one without examples sends nothing.
    assert records[0].down == 5 * 4 * 4 and records[0].up == 4 * 4 * (4 + 1)


@pytest.mark.parametrize("cohort", [2, 4])
def test_of_a_part_of_the_clients_h_takes_its_share(cohort):
    """h is the mean of all g_k, whoever took part."""
    states = play("feddyn", rounds=4, epochs=2, cohort=cohort, knobs={"alpha": 0.5})[2]
    mean = np.average(vectors(states[-1].clients.gradient), axis=0, weights=SIZES)
    np.testing.assert_allclose(vectors(states[-1].server.h)[0], mean, rtol=1e-3, atol=1e-6)
    assert np.abs(mean).max() > 1e-2
    moved = np.abs(vectors(states[1].clients.gradient)).max(axis=1) > 0
    assert moved.sum() == cohort
