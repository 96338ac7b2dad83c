"""FedGH by hand on networks with one hidden layer."""

import jax
import networks
import numpy as np
import pytest
import toys
from by_hand import as_numpy, assert_close, by_hand
from networks import BODY, HEAD, RATE, features, softmax

SIZES = (2, 5, 0, 3, 4)
CLASSES = 3
STEPS = 4
HYPERPARAMETERS = {"server_steps": STEPS, "predict": "global"}
OPTIONS = {"sizes": SIZES, "hidden": (6,), "epochs": 3}


def train_head(head, z, y):
    """Full-batch steps on the mean cross entropy."""
    for _ in range(STEPS):
        slope = (softmax(z @ head["kernel"] + head["bias"]) - np.eye(CLASSES)[y]) / len(y)
        head = {
            "kernel": head["kernel"] - RATE * z.T @ slope,
            "bias": head["bias"] - RATE * slope.sum(axis=0),
        }
    return head


def fedgh(rounds):
    """Clients train from the global head, which the server trains on their class means."""
    head = networks.row(rounds.states[0].models[HEAD], 0)
    own = [networks.row(rounds.states[0].rows.params, k) for k in rounds.clients]
    for number in rounds:
        for k in rounds.cohort(number):
            own[k] = {BODY: own[k][BODY], HEAD: head}
        pairs = []
        for k in rounds.active(number):
            x, y = rounds.examples(k)
            own[k] = rounds.descend(k, own[k])
            pairs += [(features(own[k], x[y == c]).mean(axis=0), c) for c in np.unique(y)]
        z, labels = map(np.array, zip(*pairs, strict=True))
        head = train_head(head, z, labels)
        yield {
            f"models.{HEAD}": jax.tree.map(lambda leaf: leaf[None], head),
            "rows.params": own,
            "predictions": [[{BODY: model[BODY], HEAD: head}] for model in own],
        }


@pytest.mark.parametrize("cohort", [2, pytest.param(0, marks=pytest.mark.long)])
def test_rounds_by_hand(cohort):
    rounds = by_hand(
        "fedgh", fedgh, hyperparameters=HYPERPARAMETERS, cohort=cohort, rtol=1e-5, **OPTIONS
    )

    # With its own head
    algorithm = toys.make_algorithm("fedgh", rounds.problem, **HYPERPARAMETERS | {"predict": "own"})
    clients = rounds.federation.client_data
    found = toys.predict(
        algorithm, rounds.problem, jax.random.key(0), rounds.states[-1], clients
    ).models
    own = [[networks.row(rounds.states[-1].rows.params, k)] for k in rounds.clients]
    assert_close(as_numpy(found), own, "predictions", 1e-6, 1e-6)


@pytest.mark.long
def test_without_steps_the_head_stays():
    states = networks.play("fedgh", 2, SIZES, hyperparameters={"server_steps": 0}).states
    toys.assert_trees_close(states[-1].models, states[0].models)
