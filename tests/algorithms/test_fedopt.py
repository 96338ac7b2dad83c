"""FedAvgM, FedAdam, FedYogi and FedAdagrad by hand on quadratics."""

import numpy as np
import optax
import pytest
import toys
from quadratics import RATE, SIZES, descend, play, vectors


def test_fedavgm_by_hand():
    federation, _, states, _, _ = play("fedavgm", rounds=3, knobs={"momentum": 0.5, "rate": 0.7})
    mean_of = lambda w: np.average([descend(federation, k, w, 1) for k in range(4)], axis=0, weights=SIZES)
    w, velocity = vectors(states[0].models)[0], 0.0
    for number in range(3):
        velocity = 0.5 * velocity + w - mean_of(w)
        w = w - 0.7 * velocity
        np.testing.assert_allclose(vectors(states[number + 1].models)[0], w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "given", "betas"),
    [
        ("adam", {}, (0.9, 0.99)),
        ("adam", {"beta1": 0.5, "beta2": 0.7}, (0.5, 0.7)),
        ("yogi", {"beta2": 0.7}, (0.9, 0.7)),
        ("adagrad", {}, (0.0, None)),
        ("adagrad", {"beta1": 0.5}, (0.5, None)),
    ],
)
def test_adaptive_servers_by_hand(optimizer, given, betas):
    """Algorithm 2 of Reddi et al.: no bias correction, v starts at tau^2."""
    rate, tau = 0.2, 0.3
    knobs = {"rate": rate, "tau": tau, "optimizer": optimizer, **given}
    federation, _, states, _, _ = play("fedadam", rounds=3, knobs=knobs)
    (beta1, beta2), w, m, v = betas, vectors(states[0].models)[0], 0.0, tau**2
    for number in range(3):
        trained = [descend(federation, k, w, 1) for k in range(4)]
        slope = w - np.average(trained, axis=0, weights=SIZES)
        m = beta1 * m + (1 - beta1) * slope
        if optimizer == "adagrad":
            v = v + slope**2
        elif optimizer == "yogi":
            v = v - (1 - beta2) * slope**2 * np.sign(v - slope**2)
        else:
            v = beta2 * v + (1 - beta2) * slope**2
        w = w - rate * m / (np.sqrt(v) + tau)
        np.testing.assert_allclose(vectors(states[number + 1].models)[0], w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["fedavgm", "fedadam"])
def test_a_server_takes_no_step_where_nothing_came_back(name):
    federation = toys.make_federation((3, 0, 0, 0), "regression")
    *_, states, records = toys.play(name, federation, 12, optax.sgd(RATE), cohort=1)
    came = [float(record.up) > 0 for record in records]
    assert any(came[:-1]) and not all(came[came.index(True) :])
    for before, after, moved in zip(states, states[1:], came, strict=False):
        assert toys.same_trees((before.models, before.optimizer), (after.models, after.optimizer)) == (not moved)
