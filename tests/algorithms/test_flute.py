"""FLUTE by hand on networks with one hidden layer, with the head's slopes by finite differences; and its limit."""

import jax
import networks
import numpy as np
import pytest
import toys
from networks import BODY, HEAD, RATE, descend, examples, features, gradient, mean, row, step

from pfljax.exchange.rounds import cohort_of

SIZES, CLASSES, STEP = (2, 5, 0, 3, 4), 3, 1e-6


def distance(kernel, present):
    """The distance of a head's products, of unit norm, from those of the simplex's corners that a client has."""
    total = kernel.T @ kernel
    corners = (np.eye(CLASSES) - np.full((CLASSES, CLASSES), 1 / CLASSES)) / np.sqrt(CLASSES - 1)
    return np.sqrt(np.square(total / np.sqrt(np.square(total).sum()) - corners * np.outer(present, present)).sum())


def slope_of(kernel, present):
    """By central differences."""
    found = np.zeros_like(kernel)
    for place in np.ndindex(kernel.shape):
        ends = [kernel.copy(), kernel.copy()]
        ends[0][place] += STEP
        ends[1][place] -= STEP
        found[place] = (distance(ends[0], present) - distance(ends[1], present)) / (2 * STEP)
    return found


def train(model, x, y, present, knobs, layers):
    """A step on the loss with its three further terms."""
    z, kernel = features(model, x), model[HEAD]["kernel"]
    slopes = gradient(model, x, y, pull=2 * knobs["features"] * z / len(y))
    further = knobs["collapse"] * slope_of(kernel, present) + 2 * knobs["decay"] * kernel
    slopes[HEAD]["kernel"] = slopes[HEAD]["kernel"] + further
    return step(model, slopes, RATE, layers)


@pytest.mark.parametrize(
    ("cohort", "knobs"),
    [
        (2, {"collapse": 0.5, "decay": 0.1, "features": 0.2, "server_rate": 1.5}),
        (5, {"collapse": 0.0, "decay": 0.0, "features": 0.05, "server_rate": 0.5}),
    ],
)
def test_rounds_by_hand(cohort, knobs):
    federation, problem, algorithm, states, records = networks.play(
        "flute", 2, SIZES, knobs=knobs | {"head_epochs": 2, "epochs": 3}, cohort=cohort
    )
    body = row(states[0].models[BODY], 0)
    heads = [row(states[0].clients.own[HEAD], k) for k in range(5)]
    for number, state in enumerate(states[1:]):
        bodies, sizes = [], []
        for k in np.asarray(cohort_of(jax.random.key(0), number, 5, cohort).ids):
            if not SIZES[k]:
                continue
            x, y = examples(federation, k)
            present = np.isin(range(CLASSES), y).astype(float)
            model = {BODY: body, HEAD: heads[k]}
            for _ in range(2):
                model = train(model, x, y, present, knobs, (HEAD,))
            for _ in range(3):
                model = train(model, x, y, present, knobs, (BODY, HEAD))
            bodies.append(model[BODY])
            sizes.append(SIZES[k])
            kernel = model[HEAD]["kernel"]
            kernel = kernel - knobs["server_rate"] / cohort * slope_of(kernel, present)
            heads[k] = model[HEAD] | {"kernel": kernel}
        body = mean(bodies, sizes)
        toys.assert_trees_close(row(state.models[BODY], 0), body, rtol=1e-5, atol=1e-5)
        for k in range(5):
            toys.assert_trees_close(row(state.clients.own[HEAD], k), heads[k], rtol=1e-5, atol=1e-5)
    found = toys.predict(algorithm, problem, jax.random.key(0), states[-1], federation.client_data).models
    for k in range(5):
        toys.assert_trees_close(row(row(found, k), 0), {BODY: body, HEAD: heads[k]}, rtol=1e-5, atol=1e-5)
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(body))
    assert records[0].down == cohort * size and records[-1].up <= cohort * (size + 4)  # and n_k


def test_without_its_terms_it_trains_a_head_and_then_both_layers():
    knobs = {"collapse": 0.0, "decay": 0.0, "features": 0.0, "server_rate": 0.0, "head_epochs": 3}
    federation, _, _, states, _ = networks.play("flute", 1, SIZES, knobs=knobs, epochs=2)
    start = row(states[0].models, 0)
    for k in (0, 1, 3, 4):
        x, y = examples(federation, k)
        model = {BODY: start[BODY], HEAD: row(states[0].clients.own[HEAD], k)}
        model = descend(descend(model, x, y, RATE, 3, layers=(HEAD,)), x, y, RATE, 2)
        toys.assert_trees_close(row(states[1].clients.own[HEAD], k), model[HEAD], rtol=1e-5, atol=1e-5)


def test_newcomers_train_a_head():
    _, problem, algorithm, states, _ = networks.play("flute", 1, SIZES, knobs={"head_epochs": 2})
    newcomers, key = toys.make_federation((3, 4), seed=5), jax.random.key(4)
    found = toys.adapt(algorithm, problem, key, states[-1], newcomers.client_data).models
    for k in range(2):
        start = problem.model.init(jax.random.split(jax.random.fold_in(key, k))[0])
        model = {BODY: row(states[-1].models, 0)[BODY], HEAD: jax.tree.map(np.float64, start[HEAD])}
        model = descend(model, *examples(newcomers, k), RATE, 2 * problem.rounds, layers=(HEAD,))
        toys.assert_trees_close(row(row(found, k), 0), model, rtol=1e-4, atol=1e-5)
