"""pFedFDA by hand on networks with one hidden layer: heads of Gaussians, cross validation, newcomers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from by_hand import assert_close, by_hand, entry, newcomers_by_hand, play, stack
from networks import BODY, HEAD, RATE, features, gradient, row, softmax, step

from pfljax.algorithms import pfedfda

CLASSES = 3
WIDTH = 5
EPSILON = 1e-4
OPTIONS = {"sizes": (2, 7, 0, 4, 12), "hidden": (WIDTH,), "rounds": 2, "epochs": 2, "cohort": 4}
HYPERPARAMETERS = {"ridge": 0.5}


def shares_of(y):
    """pi of a client."""
    shares = np.array([(y == c).mean() if len(y) else 0 for c in range(CLASSES)]) + EPSILON
    return shares / shares.sum()


def head_of(gaussians, shares):
    """The network's head that compares Gaussians."""
    means, covariance = gaussians
    shrunk = (1 - EPSILON) * covariance + EPSILON * np.trace(covariance) / WIDTH * np.eye(WIDTH)
    inverse = np.linalg.inv(shrunk)
    bias = np.array([np.log(shares[c]) - means[c] @ inverse @ means[c] / 2 for c in range(CLASSES)])
    return {"kernel": inverse @ means.T, "bias": bias}


def estimate(z, y, received, ridge, few):
    """The client's own Gaussians; classes of few examples have the received means."""
    means = received[0].copy()
    for c in range(CLASSES):
        if (y == c).sum() > few:
            means[c] = z[y == c].mean(axis=0)
    centered = z - means[y]
    return means, centered.T @ centered / max(len(y) - 1, 1) + ridge * np.eye(WIDTH)


def mix(own, received, a, b):
    """Means by a, and covariances by b."""
    return a * own[0] + (1 - a) * received[0], b * own[1] + (1 - b) * received[1]


def entropy(gaussians, shares, z, y):
    """The mean cross entropy of a head of Gaussians."""
    head = head_of(gaussians, shares)
    return -np.log(softmax(z @ head["kernel"] + head["bias"])[range(len(y)), y]).mean()


def halves_of(y):
    """Two halves of the examples whose class has several."""
    several = [i for i in range(len(y)) if (y == y[i]).sum() > 1]
    return [[i for i in several if (y[:i] == y[i]).sum() % 2 == part] for part in (0, 1)]


def validated(z, y, received, hyperparameters):
    """The a and b of least cross entropy in two-fold cross validation."""
    halves = halves_of(y)
    best = np.inf
    weights = (0.0, 0.0)
    for b in np.linspace(0, 1, 11):
        for a in [b] if hyperparameters.get("coefficients") == "one" else np.linspace(0, 1, 11):
            total = 0.0
            for kept, held in (halves, halves[::-1]):
                if held:
                    own = estimate(z[kept], y[kept], received, hyperparameters["ridge"], 0)
                    total += entropy(mix(own, received, a, b), shares_of(y), z[held], y[held])
            if total < best - 1e-9:
                best = total
                weights = (a, b)
    return weights


def adapt(z, y, received, hyperparameters):
    """mu' and Sigma' of a client with features z, and its a and b."""
    beta = hyperparameters.get("beta")
    a, b = validated(z, y, received, hyperparameters) if beta is None else (beta, beta)
    return mix(estimate(z, y, received, hyperparameters["ridge"], 2), received, a, b), (a, b)


def expected_head(body, gaussians, x, y, hyperparameters):
    """The head of a client that has the body and the Gaussians of the server."""
    adapted, _ = adapt(features({BODY: body}, x), y, gaussians, hyperparameters)
    return head_of(adapted, shares_of(y))


def head_of_state(state, x, y, hyperparameters):
    """The weights and offsets of the head of a client with these examples, in a state of the server."""
    body = row(entry(state, f"models.body.{BODY}"), 0)
    gaussians = (
        entry(state, "models.gaussians.means")[0],
        entry(state, "models.gaussians.covariance")[0],
    )
    head = expected_head(body, gaussians, x, y, hyperparameters)
    return head["kernel"], head["bias"]


def pfedfda_of(hyperparameters, chosen):
    """Clients train the body under the head of the global Gaussians, and then adapt these; `chosen` gets a and b."""

    def reference(rounds):
        body = row(rounds.start(f"models.body.{BODY}"), 0)
        gaussians = (
            rounds.start("models.gaussians.means")[0],
            rounds.start("models.gaussians.covariance")[0],
        )
        np.testing.assert_array_equal(gaussians[1], np.eye(WIDTH))

        for number in rounds:
            bodies = []
            adapted = []
            active = rounds.active(number)
            for k in active:
                x, y = rounds.examples(k)
                model = {BODY: body, HEAD: head_of(gaussians, shares_of(y))}
                for _ in range(rounds.epochs):
                    model = step(model, gradient(model, x, y), RATE, (BODY,))
                new, weights = adapt(features(model, x), y, gaussians, hyperparameters)
                chosen.add(weights)
                bodies.append(model[BODY])
                adapted.append(new)

            weights = rounds.sizes[active]
            body = rounds.mean(bodies, weights)
            gaussians = tuple(rounds.mean(leaves, weights) for leaves in zip(*adapted, strict=True))
            expected = {
                f"models.body.{BODY}": stack([body]),
                "models.gaussians.means": gaussians[0][None],
                "models.gaussians.covariance": gaussians[1][None],
            }
            if number == len(rounds.records) - 1:
                z = features({BODY: body}, np.float64(rounds.federation.test.x[0]))
                expected["probabilities"] = []
                for k in rounds.clients:
                    head = expected_head(body, gaussians, *rounds.examples(k), hyperparameters)
                    expected["probabilities"].append(softmax(z @ head["kernel"] + head["bias"]))
            yield expected

    return reference


@pytest.mark.parametrize(
    "hyperparameters",
    [
        HYPERPARAMETERS,
        pytest.param({"ridge": 1.0, "beta": 1.0}, marks=pytest.mark.slow),
        pytest.param({"ridge": 0.02, "coefficients": "one"}, marks=pytest.mark.slow),
    ],
)
def test_pfedfda_by_hand(hyperparameters):
    chosen = set()
    by_hand(
        "pfedfda", pfedfda_of(hyperparameters, chosen), hyperparameters=hyperparameters, **OPTIONS
    )
    assert len(chosen) > 1 or "beta" in hyperparameters


def test_clients_may_be_given_their_coefficient():
    """Of the initial Gaussians; 1 are the client's own, and 0 the received ones."""
    rounds = play("pfedfda", hyperparameters=HYPERPARAMETERS, **OPTIONS)
    models = rounds.states[0].models
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[4]), rounds.federation.client_data)

    @jax.jit
    def head(beta):
        algorithm = toys.make_algorithm("pfedfda", rounds.problem, ridge=0.5, beta=beta)
        return algorithm.adapt(None, models, data).inputs

    for beta in (1.0, 0.0, 0.3):
        expected = head_of_state(
            rounds.states[0], *rounds.examples(4), HYPERPARAMETERS | {"beta": beta}
        )
        assert_close(head(beta), expected, f"beta {beta}", 1e-4, 1e-4)


def test_the_best_coefficients_are_those_of_the_least_entropy():
    """The table has b along its rows and a along its columns; for one coefficient, only its diagonal counts."""
    table = np.random.default_rng(0).uniform(1, 2, size=(11, 11)).astype(np.float32)
    table[3, 8] = 0.0
    table[6, 6] = 0.5
    np.testing.assert_allclose(pfedfda.best(table, equal=False), (0.8, 0.3), rtol=1e-6)
    np.testing.assert_allclose(pfedfda.best(table, equal=True), (0.6, 0.6), rtol=1e-6)


def newcomer(rounds, newcomers, k):
    """A newcomer adapts the Gaussians, and trains nothing."""
    return head_of_state(rounds.states[-1], *newcomers.examples(k), HYPERPARAMETERS)


def test_newcomers_adapt_the_gaussians():
    newcomers_by_hand(
        "pfedfda", newcomer, part="inputs", hyperparameters=HYPERPARAMETERS, atol=1e-4, **OPTIONS
    )
