"""FedAvgM, FedAdam, FedYogi and FedAdagrad by hand on quadratics."""

import numpy as np
import pytest
import toys
from by_hand import by_hand
from quadratics import OPTIMIZER


def fedavgm(rounds):
    """The server descends by momentum 0.5, at rate 0.7."""
    w = rounds.start("models")[0]
    velocity = 0.0
    for _ in rounds:
        velocity = 0.5 * velocity + w - rounds.mean([rounds.descend(k, w) for k in rounds.clients])
        w = w - 0.7 * velocity
        yield {"models": [w]}


def test_fedavgm_by_hand():
    by_hand(
        "fedavgm", fedavgm, hyperparameters={"server_momentum": 0.5, "server_learning_rate": 0.7}
    )


def adaptive(optimizer, beta1, beta2, rate, tau):
    """Algorithm 2 of Reddi et al.: no bias correction, v starts at tau^2."""

    def reference(rounds):
        w = rounds.start("models")[0]
        m = 0.0
        v = tau**2
        for _ in rounds:
            slope = w - rounds.mean([rounds.descend(k, w) for k in rounds.clients])
            m = beta1 * m + (1 - beta1) * slope
            if optimizer == "adagrad":
                v = v + slope**2
            elif optimizer == "yogi":
                v = v - (1 - beta2) * slope**2 * np.sign(v - slope**2)
            else:
                v = beta2 * v + (1 - beta2) * slope**2
            w = w - rate * m / (np.sqrt(v) + tau)
            yield {"models": [w]}

    return reference


@pytest.mark.parametrize(
    ("optimizer", "given", "betas"),
    [
        ("adam", {}, (0.9, 0.99)),
        ("yogi", {"beta1": 0.5, "beta2": 0.7}, (0.5, 0.7)),
        ("adagrad", {}, (0.0, None)),
        pytest.param("adam", {"beta1": 0.5, "beta2": 0.7}, (0.5, 0.7), marks=pytest.mark.long),
        pytest.param("yogi", {"beta2": 0.7}, (0.9, 0.7), marks=pytest.mark.long),
        pytest.param("adagrad", {"beta1": 0.5}, (0.5, None), marks=pytest.mark.slow),
    ],
)
def test_adaptive_servers_by_hand(optimizer, given, betas):
    rate = 0.2
    tau = 0.3
    hyperparameters = {
        "server_learning_rate": rate,
        "tau": tau,
        "server_optimizer": optimizer,
        **given,
    }
    by_hand("fedadam", adaptive(optimizer, *betas, rate, tau), hyperparameters=hyperparameters)


@pytest.mark.parametrize("name", [pytest.param("fedavgm", marks=pytest.mark.slow), "fedadam"])
def test_a_server_takes_no_step_where_nothing_came_back(name):
    federation = toys.make_federation((3, 0, 0, 0), "regression")
    *_, states, records = toys.play(name, federation, 12, OPTIMIZER, cohort=1)
    came = [float(record.up) > 0 for record in records]
    assert any(came[:-1]) and not all(came[came.index(True) :])
    for before, after, moved in zip(states, states[1:], came, strict=False):
        assert toys.same_trees(before.server, after.server) == (not moved)
