"""GPFL by hand on networks with one hidden layer, with slopes by finite differences; newcomers, and what travels."""

import jax
import networks
import numpy as np
import pytest
import toys
from networks import BODY, HEAD, RATE, examples, features, mean, row, softmax

from pfljax.algorithms.gpfl import ADDED
from pfljax.evaluation import metrics

SIZES, CLASSES, WIDTH, STEP = (2, 5, 0, 4), 3, 4, 1e-6
ACTIVE = [0, 1, 3]


def valve(added, z, context):
    def conditional(layer):
        h = np.maximum(context @ layer["weight"] + layer["bias"], 0)
        return (h - h.mean()) / np.sqrt(h.var() + 1e-5) * layer["gain"] + layer["offset"]

    return np.maximum((1 + conditional(added["gamma"])) * z + conditional(added["beta"]), 0)


def context_of(embeddings, y):
    return embeddings[y].mean(axis=0)  # the mean of the examples' embeddings is that by shares


def classified(params, context, x):
    z = valve(params[ADDED], features(params, x), context)
    return softmax(z @ params[HEAD]["kernel"] + params[HEAD]["bias"])


def entropy(p, y):
    return -np.log(p[range(len(y)), y]).mean()


def objective(params, x, y, received, strength, mu):
    added = params[ADDED]
    generic = valve(added, features(params, x), received.mean(axis=0))
    unit = lambda rows: rows / np.linalg.norm(rows, axis=1, keepdims=True)
    found = entropy(classified(params, context_of(received, y), x), y)
    found += entropy(softmax(unit(generic) @ unit(added["embeddings"]).T), y)
    found += strength * np.linalg.norm(generic - received[y], axis=1).mean()
    return found + mu / 2 * sum(np.square(leaf).sum() for leaf in jax.tree.leaves(added))


def moved(value, params):
    """The parameters after a step along the slopes of value(params), by central differences."""
    leaves, structure = jax.tree.flatten(params)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    flat = np.concatenate([leaf.ravel() for leaf in leaves])
    of = lambda flat: jax.tree.unflatten(
        structure, [part.reshape(leaf.shape) for part, leaf in zip(np.split(flat, ends), leaves, strict=True)]
    )
    steps = STEP * np.eye(flat.size)
    slope = np.array([(value(of(flat + step)) - value(of(flat - step))) / (2 * STEP) for step in steps])
    return of(flat - RATE * slope)


@pytest.mark.parametrize(("strength", "mu"), [(0.5, 0.1), (0.0, 0.0)])
def test_rounds_by_hand(strength, mu):
    knobs = {"strength": strength, "mu": mu}
    federation, problem, algorithm, states, records = networks.play(
        "gpfl", 2, SIZES, knobs=knobs, hidden=(WIDTH,), epochs=2
    )
    shared = row(states[0].models, 0)
    own = [row(states[0].clients.own.model[HEAD], k) for k in range(4)]
    shared = {BODY: shared[BODY], ADDED: shared[ADDED]}
    for state, record in zip(states[1:], records, strict=True):
        trained, values = [], []
        for k in ACTIVE:
            x, y = examples(federation, k)
            value = lambda params, x=x, y=y, e=shared[ADDED]["embeddings"]: objective(params, x, y, e, strength, mu)
            params, of_steps = shared | {HEAD: own[k]}, []
            for _ in range(2):
                of_steps.append(value(params))
                params = moved(value, params)
            own[k] = params.pop(HEAD)
            trained.append(params)
            values.append(np.mean(of_steps))
        sizes = [SIZES[k] for k in ACTIVE]
        shared = mean(trained, sizes)
        found = row(state.models, 0)
        toys.assert_trees_close({name: found[name] for name in shared}, shared, rtol=1e-4, atol=1e-5)
        for k in range(4):
            toys.assert_trees_close(row(state.clients.own.model[HEAD], k), own[k], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(record.train_loss, np.average(values, weights=sizes), rtol=1e-5)
    x = federation.test.x[0]
    use = lambda prediction, _: metrics.predict(problem, algorithm, prediction, x)
    found = toys.serve(algorithm, problem, use, jax.random.key(0), states[-1], federation.client_data).found
    for k in ACTIVE:
        context = context_of(shared[ADDED]["embeddings"], examples(federation, k)[1])
        expected = classified(shared | {HEAD: own[k]}, context, np.float64(x))
        np.testing.assert_allclose(found[k], expected, rtol=1e-4, atol=1e-5)


def test_newcomers_train_a_head_alone():
    _, problem, algorithm, states, _ = networks.play("gpfl", 1, SIZES, hidden=(WIDTH,), epochs=2)
    newcomers, key = toys.make_federation((3, 4), seed=5), jax.random.key(4)
    found = toys.adapt(algorithm, problem, key, states[-1], newcomers.client_data).inputs[0][HEAD]
    shared = row(states[-1].models, 0)
    for k in range(2):
        (x, y), start = examples(newcomers, k), problem.model.init(jax.random.split(jax.random.fold_in(key, k))[0])
        head = jax.tree.map(np.float64, start[HEAD])
        context = context_of(shared[ADDED]["embeddings"], y)
        for _ in range(2 * problem.rounds):
            value = lambda head, x=x, y=y, context=context: entropy(classified(shared | {HEAD: head}, context, x), y)
            head = moved(value, head)
        toys.assert_trees_close(row(found, k), head, rtol=1e-4, atol=1e-5)


def test_the_head_stays():
    *_, records = networks.play("gpfl", 1, SIZES, hidden=(WIDTH,))
    shared = 4 * (3 * WIDTH + WIDTH + CLASSES * WIDTH + 2 * (WIDTH**2 + 3 * WIDTH))
    assert records[0].down == 4 * shared and records[0].up == 3 * (shared + 4)  # and n_k
