"""FedCP by hand on networks with one hidden layer, with slopes by finite differences; newcomers, and what travels."""

import jax
import networks
import numpy as np
import pytest
import toys
from networks import BODY, HEAD, RATE, examples, features, mean, row, softmax

from pfljax.algorithms.fedcp import POLICY
from pfljax.evaluation import metrics

SIZES, CLASSES, WIDTH, STEP = (2, 5, 0, 4), 3, 4, 1e-6
ACTIVE, OWN = [0, 1, 3], "own"


def gumbel(shape):
    """In place of random numbers."""
    return np.sin(np.arange(np.prod(shape))).reshape(shape)


def direction(head):
    total = head["kernel"].sum(axis=1)
    return total / np.linalg.norm(total)


def logits(params, v, x, noise=0.0):
    z, layer = features(params, x), params[POLICY]
    h = (z * v) @ layer["weight"] + layer["bias"]
    h = np.array([(each - each.mean()) / np.sqrt(each.var() + 1e-5) for each in h])
    u = np.maximum(h * layer["gain"] + layer["offset"], 0)
    u = np.stack([u[:, :WIDTH], u[:, WIDTH:]], axis=1)
    u = np.exp(u + noise * gumbel(u.shape))
    r, s = u[:, 0] / u.sum(axis=1), u[:, 1] / u.sum(axis=1)
    dense = lambda layer, z: z @ layer["kernel"] + layer["bias"]
    return dense(params[OWN], r * z) + dense(params[HEAD], s * z)


def entropy(outputs, y):
    return -np.log(softmax(outputs)[range(len(y)), y]).mean()


def discrepancy(a, b):
    kernel = lambda p, q: sum(np.exp(-np.square(p - q).sum() / (2 * width)) for width in (10, 15, 20, 50))
    pairs = [(i, j) for i in range(len(a)) for j in range(len(a))]
    return np.mean([kernel(a[i], a[j]) + kernel(b[i], b[j]) - 2 * kernel(a[i], b[j]) for i, j in pairs])


def moved(value, params, parts):
    """The parameters after a step in some parts along the slopes of value(params), by central differences."""
    leaves, structure = jax.tree.flatten({part: params[part] for part in parts})
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    flat = np.concatenate([leaf.ravel() for leaf in leaves])

    def of(flat):
        split = [part.reshape(leaf.shape) for part, leaf in zip(np.split(flat, ends), leaves, strict=True)]
        return params | jax.tree.unflatten(structure, split)

    steps = STEP * np.eye(flat.size)
    return of(flat - RATE * np.array([(value(of(flat + s)) - value(of(flat - s))) / (2 * STEP) for s in steps]))


@pytest.mark.parametrize(("strength", "noise"), [(3.0, 0.0), (0.5, 0.7)])
def test_rounds_by_hand(strength, noise, monkeypatch):
    monkeypatch.setattr(jax.random, "gumbel", lambda key, shape: np.float32(gumbel(shape)))
    knobs = {"strength": strength, "noise": noise}
    federation, problem, algorithm, states, records = networks.play(
        "fedcp", 2, SIZES, knobs=knobs, hidden=(WIDTH,), epochs=2
    )
    shared, own = row(states[0].models, 0), [row(states[0].clients.own.model[HEAD], k) for k in range(4)]
    for state, record in zip(states[1:], records, strict=True):
        trained, values = [], []
        for k in ACTIVE:
            x, y = examples(federation, k)
            before, v = features(shared, x), direction(own[k])
            value = lambda params, x=x, y=y, v=v, before=before: (
                entropy(logits(params, v, x, noise), y) + (strength * discrepancy(features(params, x), before))
            )
            params, of_steps = shared | {OWN: own[k]}, []
            for _ in range(2):
                of_steps.append(value(params))
                params = moved(value, params, (BODY, POLICY, OWN))
            own[k] = params.pop(OWN)
            half = jax.tree.map(lambda mine, psi: (mine + psi) / 2, own[k], shared[HEAD])
            trained.append(params | {HEAD: half})
            values.append(np.mean(of_steps))
        sizes = [SIZES[k] for k in ACTIVE]
        shared = mean(trained, sizes)
        toys.assert_trees_close(row(state.models, 0), shared, rtol=1e-5, atol=1e-5)
        for k in range(4):
            toys.assert_trees_close(row(state.clients.own.model[HEAD], k), own[k], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(record.train_loss, np.average(values, weights=sizes), rtol=1e-5)
    x = federation.test.x[0]
    use = lambda prediction, _: metrics.predict(problem, algorithm, prediction, x)
    found = toys.serve(algorithm, problem, use, jax.random.key(0), states[-1], federation.client_data).found
    for k in range(4):
        expected = softmax(logits(shared | {OWN: own[k]}, direction(own[k]), np.float64(x)))
        np.testing.assert_allclose(found[k], expected, rtol=1e-5, atol=1e-5)
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(shared))
    assert records[0].down == 4 * size and records[0].up == 3 * (size + 4)  # and n_k


def test_newcomers_train_a_head_alone():
    _, problem, algorithm, states, _ = networks.play("fedcp", 1, SIZES, hidden=(WIDTH,), epochs=2)
    newcomers, key = toys.make_federation((3, 4), seed=5), jax.random.key(4)
    found = toys.adapt(algorithm, problem, key, states[-1], newcomers.client_data).inputs[HEAD]
    for k in range(2):
        (x, y), start = examples(newcomers, k), problem.model.init(jax.random.split(jax.random.fold_in(key, k))[0])
        params = row(states[-1].models, 0) | {OWN: jax.tree.map(np.float64, start[HEAD])}
        for _ in range(2 * problem.rounds):
            v = direction(params[OWN])
            params = moved(lambda params, x=x, y=y, v=v: entropy(logits(params, v, x), y), params, (OWN,))
        toys.assert_trees_close(row(found, k), params[OWN], rtol=1e-4, atol=1e-5)
