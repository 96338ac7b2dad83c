"""LG-FedAvg: what travels, and its limits."""

import jax
import numpy as np
import optax
import pytest
import toys
from quadratics import MINI, RATE, play


@pytest.mark.slow
def test_of_lg_fedavg_only_upper_layers_travel():
    federation, algorithm, states, records, predictions = play("lg_fedavg", hidden=(6,), **MINI)
    assert set(states[-1].models) == {"Dense_0", "Dense_1"} and states[-1].models["Dense_0"] == {
        "bias": None,
        "kernel": None,
    }
    upper = 6 + 1
    assert records[0].down == 4 * 4 * upper and records[0].up == 4 * 4 * (upper + 1)  # n_k beside each
    lower = np.asarray(predictions.models["Dense_0"]["kernel"])
    assert (np.abs(lower - lower[:1]).reshape(4, -1).max(axis=1)[1:] > 1e-3).all()
    last = np.asarray(predictions.models["Dense_1"]["kernel"])
    np.testing.assert_array_equal(last, np.broadcast_to(last[:1], last.shape))
    # One client is one network, trained as in Local.
    one = {"sizes": (5,), "hidden": (6,), **MINI}
    toys.assert_trees_close(play("lg_fedavg", **one)[4].models, play("local", **one)[4].models, rtol=1e-5, atol=1e-6)
    # Newcomers get their own lower layers; the shared layers stay.
    newcomers = toys.make_federation((3, 4), "regression", seed=5)
    problem = toys.make_problem(federation, optax.sgd(RATE), hidden=(6,))
    adapted = toys.adapt(algorithm, problem, jax.random.key(0), states[-1], newcomers.client_data)
    np.testing.assert_array_equal(adapted.models["Dense_1"]["kernel"], last[:2])
    assert np.abs(np.diff(adapted.models["Dense_0"]["kernel"], axis=0)).max() > 1e-3
