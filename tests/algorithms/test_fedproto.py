"""FedProto by hand on networks with one hidden layer; traffic and predictions."""

import jax
import networks
import numpy as np
import pytest
import toys
from networks import RATE, assert_row_close, examples, features, gradient, row, step

from pfljax.contract import tree
from pfljax.exchange.rounds import cohort_of

SIZES = (2, 5, 0, 3, 4)
CLASSES, WIDTH = 3, 6
MINI = {"rounds": 3, "sizes": SIZES, "batch_size": 2, "epochs": 2}


def trained_by_hand(weights, x, y, mean, known, strength, steps):
    for _ in range(steps):
        z = features(weights, x)
        pull = strength * 2 * (z - mean[y]) / WIDTH / len(y) * known[y][:, None]
        weights = step(weights, gradient(weights, x, y, pull=pull), RATE)
    return weights


def nearest(weights, x, mean, known):
    distance = np.square(features(weights, x)[:, None] - mean).sum(axis=-1)
    raised = np.exp(-distance) * known
    return raised / raised.sum(axis=1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize(("cohort", "weigh"), [(2, "weighted"), (5, "weighted"), (5, "uniform")])
def test_by_hand(cohort, weigh):
    strength = 2.0
    options = {"knobs": {"strength": strength, "mean": weigh}, "epochs": 3, "cohort": cohort}
    federation, problem, algorithm, states, records = networks.play("fedproto", 4, SIZES, **options)
    own = [row(states[0].clients.model, k) for k in range(5)]
    mean, known = np.zeros((CLASSES, WIDTH)), np.zeros(CLASSES, bool)
    for number in range(4):
        sums, counts = np.zeros((CLASSES, WIDTH)), np.zeros(CLASSES)
        ids = np.asarray(cohort_of(jax.random.key(0), number, 5, cohort).ids)
        for k in ids[np.array(SIZES)[ids] > 0]:
            x, y = examples(federation, k)
            own[k] = trained_by_hand(own[k], x, y, mean, known, strength, 3)
            for z, c in zip(features(own[k], x), y, strict=True):
                weight = 1 if weigh == "weighted" else 1 / (y == c).sum()  # a client's examples of c count as one
                sums[c], counts[c] = sums[c] + weight * z, counts[c] + weight
        for c in np.flatnonzero(counts):
            mean[c], known[c] = sums[c] / counts[c], True
        found = states[number + 1]
        np.testing.assert_allclose(found.models.mean[0], mean, rtol=1e-3, atol=2e-5)
        np.testing.assert_array_equal(found.models.count[0] > 0, known)
        for k in range(5):
            assert_row_close(found.clients.model, own[k], k)
    assert known.all()
    # Only prototypes and counts travel; the client without examples sends none.
    size = CLASSES * (WIDTH + 1) * 4
    with_examples = [
        np.count_nonzero(np.array(SIZES)[cohort_of(jax.random.key(0), n, 5, cohort).ids]) for n in range(4)
    ]
    assert [record.down for record in records] == [cohort * size] * 4
    assert [record.up for record in records] == [count * size for count in with_examples]
    # Clients predict with the prototypes and their own features.
    clients, test = federation.client_data, federation.test
    scores = toys.evaluate(algorithm, problem, jax.random.key(1), states[-1], clients, test)
    for k in range(5):
        predicted = nearest(own[k], np.float64(federation.test.x[k]), mean, known)
        y = federation.test.y[k]
        np.testing.assert_allclose(scores["loss"][k], -np.log(predicted[np.arange(4), y]).mean(), rtol=1e-3)
        assert scores["accuracy"][k] == pytest.approx((predicted.argmax(axis=1) == y).mean())


def test_without_its_pull_and_with_its_own_head_it_is_local():
    play = lambda name, **knobs: networks.play(name, **MINI, knobs=knobs)
    predict = lambda federation, problem, algorithm, states, _: toys.predict(
        algorithm, problem, jax.random.key(0), states[-1], federation.client_data
    )
    run = play("fedproto", strength=0.0, predict="head")
    assert run.algorithm.apply is None
    toys.assert_trees_close(predict(*run).models, predict(*play("local")).models, atol=1e-6)


def test_without_prototypes_all_classes_are_alike():
    federation, problem, algorithm, states, _ = networks.play("fedproto", 1, SIZES)
    clients, test = federation.client_data, federation.test
    scores = toys.evaluate(algorithm, problem, jax.random.key(0), states[0], clients, test)
    np.testing.assert_allclose(scores["loss"], np.log(CLASSES), rtol=1e-6)


def test_newcomers_train_alone_with_the_prototypes():
    options = {"epochs": 2, "knobs": {"strength": 3.0}}
    _, problem, algorithm, states, _ = networks.play("fedproto", 3, SIZES, **options)
    newcomers, key = toys.make_federation((3, 4), seed=5), jax.random.key(4)
    adapted = toys.adapt(algorithm, problem, key, states[-1], newcomers.client_data)
    mean, known = np.float64(states[-1].models.mean[0]), np.asarray(states[-1].models.count[0]) > 0
    for k in range(2):
        x, y = examples(newcomers, k)
        steps = problem.rounds * 2
        start = tree.stack_one(problem.model.init(jax.random.split(jax.random.fold_in(key, k))[0]))
        own = trained_by_hand(row(start, 0), x, y, mean, known, 3.0, steps)
        assert_row_close(jax.tree.map(lambda leaf: leaf[:, 0], adapted.models), own, k)
    toys.assert_trees_close(adapted.inputs.mean[1], states[-1].models.mean[0])
