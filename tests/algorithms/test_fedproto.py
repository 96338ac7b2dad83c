"""FedProto by hand on networks with one hidden layer, and predictions."""

import networks
import numpy as np
import pytest
import toys
from by_hand import by_hand, play
from networks import RATE, features, gradient, step

SIZES = (2, 5, 0, 3, 4)
CLASSES = 3
WIDTH = 6
STRENGTH = 2.0
OPTIONS = {"sizes": SIZES, "hidden": (WIDTH,), "epochs": 3}


def train(rounds, k, params, mean, known):
    """Client k's steps, with features pulled toward the prototypes of their classes."""
    x, y = rounds.examples(k)
    for _ in range(rounds.epochs):
        z = features(params, x)
        pull = STRENGTH * 2 * (z - mean[y]) / WIDTH / len(y) * known[y][:, None]
        params = step(params, gradient(params, x, y, pull=pull), RATE)
    return params


def nearest(params, x, mean, known):
    """Probabilities of classes by the distances of features to their prototypes."""
    distance = np.square(features(params, x)[:, None] - mean).sum(axis=-1)
    raised = np.exp(-distance) * known
    return raised / raised.sum(axis=1, keepdims=True)


def fedproto(weigh):
    """Algorithm 1: only prototypes travel."""

    def reference(rounds):
        own = [networks.row(rounds.start("rows.params"), k) for k in rounds.clients]
        mean = np.zeros((CLASSES, WIDTH))
        known = np.zeros(CLASSES, bool)
        for number in rounds:
            sums = np.zeros((CLASSES, WIDTH))
            counts = np.zeros(CLASSES)
            for k in rounds.active(number):
                own[k] = train(rounds, k, own[k], mean, known)
                x, y = rounds.examples(k)
                for z, c in zip(features(own[k], x), y, strict=True):
                    # Uniform: a client's examples of c count as one
                    weight = 1 if weigh == "weighted" else 1 / (y == c).sum()
                    sums[c] += weight * z
                    counts[c] += weight
            for c in np.flatnonzero(counts):
                mean[c] = sums[c] / counts[c]  # Eq. 6
                known[c] = True

            after = rounds.states[number + 1].models
            np.testing.assert_array_equal(after.count[0] > 0, known)
            x = np.float64(rounds.federation.test.x[0])
            yield {
                "models.mean": [mean],
                "rows.params": own,
                "predictions": [[params] for params in own],
                "probabilities": [nearest(params, x, mean, known) for params in own],
            }

    return reference


@pytest.mark.parametrize(
    ("cohort", "weigh"),
    [
        (2, "weighted"),
        pytest.param(5, "weighted", marks=pytest.mark.long),
        pytest.param(5, "uniform", marks=pytest.mark.slow),
    ],
)
def test_by_hand(cohort, weigh):
    hyperparameters = {"alignment": STRENGTH, "mean": weigh}
    by_hand(
        "fedproto",
        fedproto(weigh),
        rounds=4,
        cohort=cohort,
        hyperparameters=hyperparameters,
        rtol=1e-3,
        atol=2e-5,
        **OPTIONS,
    )


def test_without_prototypes_all_classes_are_alike():
    hyperparameters = {"alignment": STRENGTH, "mean": "weighted"}
    rounds = play("fedproto", rounds=0, cohort=2, hyperparameters=hyperparameters, **OPTIONS)
    np.testing.assert_allclose(rounds.probabilities(), 1 / CLASSES, rtol=1e-6)


def test_it_can_predict_with_its_own_head():
    problem = toys.make_problem(toys.make_federation(SIZES), hidden=(WIDTH,))
    assert toys.make_algorithm("fedproto", problem, predict="head").apply is None
    assert toys.make_algorithm("fedproto", problem, predict="nearest").apply is not None


@pytest.mark.slow
def test_without_its_pull_and_with_its_own_head_it_is_local():
    options = {"rounds": 3, "sizes": SIZES, "batch_size": 2, "epochs": 2}
    found = networks.play(
        "fedproto", hyperparameters={"alignment": 0.0, "predict": "head"}, **options
    )
    local = networks.play("local", **options)
    toys.assert_trees_close(found.states[-1].rows.params, local.states[-1].models, atol=1e-6)
