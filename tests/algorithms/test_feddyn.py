"""FedDyn by hand on quadratics, and what clients keep."""

import numpy as np
import pytest
from by_hand import by_hand
from quadratics import SIZES, play, vectors

EMPTY = (2, 0, 5, 1, 3)


def feddyn(alpha, mean):
    """Algorithm 1, with the means weighted as `mean` says; a client without examples does nothing."""

    def reference(rounds):
        weights = np.float64(rounds.sizes if mean == "weighted" else rounds.sizes > 0)
        theta = rounds.start("models")[0]
        gradients = np.zeros((len(weights), len(theta)))
        h = np.zeros_like(theta)

        for _ in rounds:
            trained = np.tile(theta, (len(weights), 1))
            for k in np.flatnonzero(weights):
                # The gradient of - g_k' own + alpha / 2 |own - theta|^2
                def further(own, k=k, theta=theta):
                    return alpha * (own - theta) - gradients[k]

                trained[k] = rounds.descend(k, theta, further)
                gradients[k] = gradients[k] - alpha * (trained[k] - theta)

            h = h - alpha * weights @ (trained - theta) / weights.sum()
            theta = weights @ trained / weights.sum() - h / alpha
            yield {"models": [theta], "rows": gradients, "server.state.h": h}

    return reference


@pytest.mark.parametrize("mean", ["weighted", "uniform"])
def test_by_hand(mean):
    hyperparameters = {"alpha": 0.7, "mean": mean}
    by_hand("feddyn", feddyn(0.7, mean), sizes=EMPTY, epochs=3, hyperparameters=hyperparameters)


@pytest.mark.parametrize("cohort", [2, 4])
def test_of_a_part_of_the_clients_h_takes_its_share(cohort):
    """h is the mean of all g_k, whoever took part."""
    states = play("feddyn", rounds=4, epochs=2, cohort=cohort, hyperparameters={"alpha": 0.5})[2]
    mean = np.average(vectors(states[-1].rows), axis=0, weights=SIZES)
    np.testing.assert_allclose(vectors(states[-1].server.state.h), mean, rtol=1e-3, atol=1e-6)
    assert np.abs(mean).max() > 1e-2
    moved = np.abs(vectors(states[1].rows)).max(axis=1) > 0
    assert moved.sum() == cohort
