"""FedGH by hand on networks with one hidden layer; newcomers, and what travels."""

import jax
import networks
import numpy as np
import pytest
import toys
from networks import BODY, HEAD, RATE, descend, examples, features, row, softmax

from pfljax.exchange.rounds import cohort_of

SIZES, CLASSES, WIDTH = (2, 5, 0, 3, 4), 3, 6


def train_head(head, z, y, steps):
    """Full-batch steps on the mean cross entropy."""
    for _ in range(steps):
        slope = (softmax(z @ head["kernel"] + head["bias"]) - np.eye(CLASSES)[y]) / len(y)
        head = {"kernel": head["kernel"] - RATE * z.T @ slope, "bias": head["bias"] - RATE * slope.sum(axis=0)}
    return head


@pytest.mark.parametrize(("cohort", "predict"), [(2, "global"), (5, "own")])
def test_rounds_by_hand(cohort, predict):
    knobs = {"server_steps": 4, "predict": predict}
    federation, problem, algorithm, states, records = networks.play(
        "fedgh", 3, SIZES, knobs=knobs, epochs=3, cohort=cohort
    )
    head = row(states[0].models[HEAD], 0)
    own = [row(states[0].clients.model, k) for k in range(5)]
    for number, state in enumerate(states[1:]):
        pairs = []
        for k in np.asarray(cohort_of(jax.random.key(0), number, 5, cohort).ids):
            own[k] = {BODY: own[k][BODY], HEAD: head}
            if not SIZES[k]:
                continue
            x, y = examples(federation, k)
            own[k] = descend(own[k], x, y, RATE, 3)
            pairs += [(features(own[k], x[y == c]).mean(axis=0), c) for c in np.unique(y)]
        z, labels = map(np.array, zip(*pairs, strict=True))
        head = train_head(head, z, labels, 4)
        toys.assert_trees_close(row(state.models[HEAD], 0), head, rtol=1e-5, atol=1e-5)
        for k in range(5):
            toys.assert_trees_close(row(state.clients.model, k), own[k], rtol=1e-5, atol=1e-5)
    found = toys.predict(algorithm, problem, jax.random.key(0), states[-1], federation.client_data).models
    for k in range(5):
        expected = own[k] if predict == "own" else {BODY: own[k][BODY], HEAD: head}
        toys.assert_trees_close(row(row(found, k), 0), expected, rtol=1e-5, atol=1e-5)
    down, up = 4 * (WIDTH * CLASSES + CLASSES), 4 * CLASSES * WIDTH + CLASSES
    assert [(record.down, record.up) for record in records] == [(cohort * down, cohort * up)] * 3


def test_without_steps_the_head_stays():
    states = networks.play("fedgh", 2, SIZES, knobs={"server_steps": 0}).states
    toys.assert_trees_close(states[-1].models, states[0].models)


@pytest.mark.parametrize("predict", ["global", "own"])
def test_newcomers_train_alone_from_the_global_head(predict):
    _, problem, algorithm, states, _ = networks.play("fedgh", 2, SIZES, knobs={"predict": predict}, epochs=2)
    newcomers, key = toys.make_federation((3, 4), seed=5), jax.random.key(4)
    found = toys.adapt(algorithm, problem, key, states[-1], newcomers.client_data).models
    head = row(states[-1].models[HEAD], 0)
    for k in range(2):
        start = problem.model.init(jax.random.split(jax.random.fold_in(key, k))[0])
        own = {BODY: jax.tree.map(np.float64, start[BODY]), HEAD: head}
        own = descend(own, *examples(newcomers, k), RATE, 2 * problem.rounds)
        own = own if predict == "own" else own | {HEAD: head}
        toys.assert_trees_close(row(row(found, k), 0), own, rtol=1e-4, atol=1e-5)
