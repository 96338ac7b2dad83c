"""FedExP by hand on quadratics."""

import jax
import numpy as np
import pytest
import toys
from by_hand import by_hand, entry

EMPTY = (2, 0, 5, 1, 3)
EPS = 0.01


def fedexp(mean):
    """Algorithm 1, with the means weighted as `mean` says; clients predict with the mean of the last two models."""

    def reference(rounds):
        weights = np.float64(rounds.sizes if mean == "weighted" else rounds.sizes > 0)
        share = weights / weights.sum()
        theta = rounds.start("models")[0]
        rates = []
        for _ in rounds:
            moved = np.zeros((len(share), len(theta)))
            for k in np.flatnonzero(share):
                moved[k] = rounds.descend(k, theta) - theta
            step = share @ moved
            rates.append(max(1, share @ np.square(moved).sum(axis=1) / (2 * (step @ step + EPS))))
            before = theta
            theta = theta + rates[-1] * step
            yield {
                "models": [theta],
                "server.state": [before],
                "record.metrics.server_rate": rates[-1],
                "predictions": np.tile((before + theta) / 2, (len(share), 1, 1)),
            }
        assert rates[0] == 1 < 1.5 < max(rates)

    return reference


@pytest.mark.parametrize("mean", ["weighted", "uniform"])
def test_by_hand(mean):
    options = {
        "rounds": 4,
        "epochs": 8,
        "sizes": EMPTY,
        "hyperparameters": {"eps": EPS, "mean": mean},
    }
    by_hand("fedexp", fedexp(mean), atol=2e-5, **options)


def test_clients_may_predict_with_the_last_model():
    problem = toys.make_problem(toys.make_federation(EMPTY, "regression"))
    algorithm = toys.make_algorithm("fedexp", problem, predict="last")
    clients = toys.make_federation(EMPTY, "regression").client_data
    state = toys.zeros(algorithm, problem, clients)
    state.models["Dense_0"]["bias"][...] = 1.0
    found = toys.predict(algorithm, problem, jax.random.key(0), state, clients)
    np.testing.assert_array_equal(entry(found, "models")[:, 0], np.tile([0, 0, 0, 1], (5, 1)))
