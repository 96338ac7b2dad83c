"""SCAFFOLD by hand on quadratics, under sampling, and its fixed point."""

import jax
import numpy as np
import pytest
import toys
from quadratics import RATE, SIZES, descend, gradient, play, quadratic, vectors


@pytest.mark.parametrize(("option", "mean"), [("II", "weighted"), ("I", "weighted"), ("I", "uniform")])
def test_scaffold_by_hand(option, mean):
    knobs = {"rate": 0.5, "option": option, "mean": mean}
    federation, _, states, records, _ = play("scaffold", rounds=3, epochs=2, knobs=knobs)
    shares = SIZES if mean == "weighted" else np.ones(4)
    x, c, own = vectors(states[0].models)[0], np.zeros(4), np.zeros((4, 4))
    for number in range(3):
        y = np.array([descend(federation, k, x, 2, c - own[k]) for k in range(4)])
        if option == "I":
            new = np.array([gradient(federation, k, x) for k in range(4)])
        else:  # as it is written: c_k - c + (x - y_k) / (steps rate)
            new = own - c + (x - y) / (2 * RATE)
        x = x + 0.5 * (np.average(y, axis=0, weights=shares) - x)
        c, own = c + np.average(new - own, axis=0, weights=shares), new
        after = states[number + 1]
        np.testing.assert_allclose(vectors(after.models)[0], x, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(vectors(after.server.control), c, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(vectors(after.clients.control), own, rtol=1e-4, atol=1e-5)
    assert records[0].down == 4 * 2 * 4 * 4 and records[0].up == 4 * (2 * 4 + 1) * 4


def test_scaffold_s_variates_sum_to_the_server_s_under_sampling():
    states = play("scaffold", rounds=4, cohort=2, epochs=2)[2]
    np.testing.assert_allclose(
        np.average(vectors(states[-1].clients.control), axis=0, weights=SIZES),
        vectors(states[-1].server.control),
        atol=1e-5,
    )


@pytest.mark.slow
def test_scaffold_ends_where_the_weighted_objective_is_least():
    """However many local steps there are, unlike FedAvg."""
    sizes = (6, 3, 5, 4)
    knobs = {"sizes": sizes, "rounds": 300, "epochs": 5}
    federation, _, states, _, _ = play("scaffold", **knobs)
    parts = [quadratic(federation, k) for k in range(4)]
    best = np.linalg.solve(*(np.average([part[i] for part in parts], axis=0, weights=sizes) for i in range(2)))
    np.testing.assert_allclose(vectors(states[-1].models)[0], best, atol=1e-4)
    assert np.abs(vectors(play("fedavg", **knobs)[2][-1].models)[0] - best).max() > 0.01


def test_control_variates_have_no_part_in_batch_statistics():
    options = {"knobs": {"rate": 2.0}, "model": toys.Normalized, "batch_size": 2, "epochs": 2}
    states = play("scaffold", rounds=3, **options)[2]
    for control in (states[-1].server.control, states[-1].clients.control):
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(control["batch_stats"]))
        assert any(np.any(leaf) for leaf in jax.tree.leaves(control["Dense_0"]))
    assert all(np.min(state.models["batch_stats"]["BatchNorm_0"]["var"]) > 0 for state in states)
