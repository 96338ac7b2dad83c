"""SCAFFOLD by hand on quadratics, under sampling, and its fixed point."""

import jax
import numpy as np
import pytest
import toys
from by_hand import by_hand
from quadratics import RATE, SIZES, play, quadratic, vectors


def scaffold(rate, option, mean):
    """Algorithm 1, with the means weighted as `mean` says."""

    def reference(rounds):
        weights = rounds.sizes if mean == "weighted" else None
        x = rounds.start("models")[0]
        c = np.zeros_like(x)
        control = np.zeros((4, len(x)))

        for _ in rounds:
            trained = []
            change = []
            for k in rounds.clients:
                y = rounds.descend(k, x, c - control[k])
                gradient_there = rounds.gradient(k, x)
                mean_gradient = control[k] - c + (x - y) / (rounds.epochs * RATE)
                new = gradient_there if option == "I" else mean_gradient
                trained.append(y)
                change.append(new - control[k])
                control[k] = new

            x = x + rate * (rounds.mean(trained, weights) - x)
            c = c + rounds.mean(change, weights)
            yield {"models": [x], "server.state.control_variate": c, "rows": control}

    return reference


@pytest.mark.parametrize(
    ("option", "mean"), [("II", "weighted"), ("I", "weighted"), ("I", "uniform")]
)
def test_scaffold_by_hand(option, mean):
    hyperparameters = {"server_learning_rate": 0.5, "option": option, "mean": mean}
    by_hand("scaffold", scaffold(0.5, option, mean), hyperparameters=hyperparameters)


def test_scaffold_s_variates_sum_to_the_server_s_under_sampling():
    states = play("scaffold", rounds=4, cohort=2, epochs=2)[2]
    control = vectors(states[-1].rows)
    server = vectors(states[-1].server.state.control_variate)
    np.testing.assert_allclose(np.average(control, axis=0, weights=SIZES), server, atol=1e-5)


@pytest.mark.slow
def test_scaffold_ends_where_the_weighted_objective_is_least():
    """However many local steps there are, unlike FedAvg."""
    sizes = (6, 3, 5, 4)
    options = {"sizes": sizes, "rounds": 300, "epochs": 5}
    federation, _, states, _, _ = play("scaffold", **options)
    parts = [quadratic(federation, k) for k in range(4)]
    matrix = np.average([part[0] for part in parts], axis=0, weights=sizes)
    vector = np.average([part[1] for part in parts], axis=0, weights=sizes)
    best = np.linalg.solve(matrix, vector)
    np.testing.assert_allclose(vectors(states[-1].models)[0], best, atol=1e-4)

    fedavg = vectors(play("fedavg", **options)[2][-1].models)[0]
    assert np.abs(fedavg - best).max() > 0.01


def test_control_variates_have_no_part_in_batch_statistics():
    options = {
        "hyperparameters": {"server_learning_rate": 2.0},
        "model": toys.Normalized,
        "batch_size": 2,
        "epochs": 2,
    }
    states = play("scaffold", rounds=3, **options)[2]
    for control in (states[-1].server.state.control_variate, states[-1].rows):
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(control["batch_stats"]))
        assert any(np.any(leaf) for leaf in jax.tree.leaves(control["Dense_0"]))
    for state in states:
        assert np.min(state.models["batch_stats"]["BatchNorm_0"]["var"]) > 0
