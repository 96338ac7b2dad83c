"""pFedFDA by hand on networks with one hidden layer: heads of Gaussians, cross validation, newcomers."""

import jax
import networks
import numpy as np
import pytest
import toys
from networks import BODY, HEAD, RATE, examples, features, gradient, mean, row, softmax, step

from pfljax.evaluation import metrics
from pfljax.exchange.rounds import cohort_of

SIZES, CLASSES, WIDTH, EPSILON = (2, 7, 0, 4, 12), 3, 5, 1e-4


def shares_of(y):
    found = np.array([(y == c).mean() if len(y) else 0 for c in range(CLASSES)]) + EPSILON
    return found / found.sum()


def head_of(means, covariance, shares):
    """The network's head that compares Gaussians."""
    shrunk = (1 - EPSILON) * covariance + EPSILON * np.trace(covariance) / WIDTH * np.eye(WIDTH)
    inverse = np.linalg.inv(shrunk)
    bias = np.array([np.log(shares[c]) - means[c] @ inverse @ means[c] / 2 for c in range(CLASSES)])
    return {"kernel": inverse @ means.T, "bias": bias}


def estimate(z, y, received, ridge, few):
    means = np.array([z[y == c].mean(axis=0) if (y == c).sum() > few else received[0][c] for c in range(CLASSES)])
    scatter = sum((np.outer(a - means[c], a - means[c]) for a, c in zip(z, y, strict=True)), np.zeros((WIDTH, WIDTH)))
    return means, scatter / max(len(y) - 1, 1) + ridge * np.eye(WIDTH)


def mix(own, received, a, b):
    return a * own[0] + (1 - a) * received[0], b * own[1] + (1 - b) * received[1]


def entropy(gaussians, shares, z, y):
    head = head_of(*gaussians, shares)
    return -np.log(softmax(z @ head["kernel"] + head["bias"])[range(len(y)), y]).mean()


def adapt(z, y, received, knobs):
    """mu' and Sigma' of a client with features z."""
    a = b = knobs.get("beta")
    if a is None:
        several = [i for i in range(len(y)) if (y == y[i]).sum() > 1]
        halves = [[i for i in several if (y[:i] == y[i]).sum() % 2 == part] for part in (0, 1)]
        best, a, b = np.inf, 0.0, 0.0
        for to in np.linspace(0, 1, 11):
            for of in [to] if knobs.get("coefficients") == "one" else np.linspace(0, 1, 11):
                total = 0.0
                for kept, held in (halves, halves[::-1]):
                    if held:
                        own = estimate(z[kept], y[kept], received, knobs["ridge"], 0)
                        total += entropy(mix(own, received, of, to), shares_of(y), z[held], y[held])
                if total < best - 1e-9:
                    best, a, b = total, of, to
    return mix(estimate(z, y, received, knobs["ridge"], 2), received, a, b), (a, b)


@pytest.mark.parametrize(
    ("cohort", "knobs"),
    [
        (3, {"ridge": 0.5}),
        (5, {"ridge": 0.02, "coefficients": "one"}),
        (5, {"ridge": 1.0, "beta": 1.0}),
        (5, {"ridge": 1.0, "beta": 0.0}),
    ],
)
def test_rounds_by_hand(cohort, knobs):
    federation, problem, algorithm, states, records = networks.play(
        "pfedfda", 3, SIZES, knobs=knobs, hidden=(WIDTH,), epochs=2, cohort=cohort
    )
    body = row(states[0].models.body[BODY], 0)
    gaussians = tuple(np.float64(leaf[0]) for leaf in states[0].models.gaussians)
    np.testing.assert_array_equal(gaussians[1], np.eye(WIDTH))
    found_weights = set()
    for number, state in enumerate(states[1:]):
        bodies, adapted, sizes = [], [], []
        for k in np.asarray(cohort_of(jax.random.key(0), number, 5, cohort).ids):
            if not SIZES[k]:
                continue
            x, y = examples(federation, k)
            model = {BODY: body, HEAD: head_of(*gaussians, shares_of(y))}
            for _ in range(2):
                model = step(model, gradient(model, x, y), RATE, (BODY,))
            new, weights = adapt(features(model, x), y, gaussians, knobs)
            found_weights.add(weights)
            bodies.append(model[BODY])
            adapted.append(new)
            sizes.append(SIZES[k])
        body = mean(bodies, sizes)
        gaussians = tuple(np.average(leaves, axis=0, weights=sizes) for leaves in zip(*adapted, strict=True))
        toys.assert_trees_close(row(state.models.body[BODY], 0), body, rtol=1e-5, atol=1e-5)
        for found, expected in zip(state.models.gaussians, gaussians, strict=True):
            np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-5)
    assert len(found_weights) > 1 or "beta" in knobs
    check_predictions(problem, algorithm, states[-1], federation, (body, gaussians, knobs))
    newcomers = toys.make_federation((3, 8), seed=5)
    check_newcomers(problem, algorithm, states[-1], newcomers, (body, gaussians, knobs))
    size = 4 * (3 * WIDTH + WIDTH + CLASSES * WIDTH + WIDTH**2)
    assert records[0].down == cohort * size and records[-1].up <= cohort * (size + 4)  # and n_k


def expected_head(x, y, known):
    body, gaussians, knobs = known
    return head_of(*adapt(features({BODY: body}, x), y, gaussians, knobs)[0], shares_of(y))


def check_predictions(problem, algorithm, state, federation, known):
    x = federation.test.x[0]
    use = lambda prediction, _: metrics.predict(problem, algorithm, prediction, x)
    found = toys.serve(algorithm, problem, use, jax.random.key(0), state, federation.client_data).found
    for k in range(5):
        head = expected_head(*examples(federation, k), known)
        expected = softmax(features({BODY: known[0]}, np.float64(x)) @ head["kernel"] + head["bias"])
        np.testing.assert_allclose(found[k], expected, rtol=1e-4, atol=1e-5)


def check_newcomers(problem, algorithm, state, newcomers, known):
    weights, offsets = toys.adapt(algorithm, problem, jax.random.key(4), state, newcomers.client_data).inputs
    for k in range(2):
        head = expected_head(*examples(newcomers, k), known)
        np.testing.assert_allclose(weights[k], head["kernel"], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(offsets[k], head["bias"], rtol=1e-4, atol=1e-4)
