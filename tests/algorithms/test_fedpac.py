"""FedPAC: rounds by hand with the paper's quadratic solved by scipy, and sampled clients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from by_hand import by_hand, play
from networks import BODY, HEAD, RATE, descend, features, gradient, row, step

from pfljax.algorithms.fedpac import head_weights
from pfljax.exchange.plan import make_plan

SIZES = (4, 6, 1, 5)
EPOCHS = 3
STRENGTH = 2.0


def statistics(params, x, y):
    """Per-class feature sums and counts, h and V / (n - 1); V is the trace of the covariance of z (x) e_y."""
    z = features(params, x)
    hot = np.eye(3)[y]
    outer = np.stack([np.outer(e, f).ravel() for e, f in zip(hot, z, strict=True)])
    return (
        hot.T @ z,
        hot.sum(axis=0),
        outer.mean(axis=0),
        outer.var(axis=0).sum() / max(len(y) - 1, 1),
    )


def quadratic(a, k, means, variance):
    """sum_j a_j^2 V_j / (n_j - 1) + |h_k - sum_j a_j h_j|^2."""
    return a**2 @ variance + np.square(means[k] - a @ means).sum()


def weights_by_hand(k, means, variance):
    """Its minimum over the simplex."""

    def value(a):
        return quadratic(a, k, means, variance)

    def slope(a):
        return 2 * a * variance - 2 * means @ (means[k] - a @ means)

    num = len(means)
    options = {"ftol": 1e-14, "maxiter": 1000}
    sums = {"type": "eq", "fun": lambda a: a.sum() - 1, "jac": np.ones_like}
    start = np.full(num, 1 / num)
    return scipy.optimize.minimize(
        value,
        start,
        jac=slope,
        bounds=[(0, 1)] * num,
        constraints=[sums],
        method="SLSQP",
        options=options,
    ).x


def train_body(params, x, y, centroids, seen):
    """A step of the body on the cross entropy and the pull to the centroids."""
    z = features(params, x)
    pull = STRENGTH * 2 * (z - centroids[y]) * seen[y][:, None] / z.size
    return step(params, gradient(params, x, y, pull=pull), RATE, [BODY])


def fedpac(rounds):
    """Heads first, then bodies pulled to the centroids; a client's head is the best combination of all heads."""
    theta = row(rounds.states[0].models[BODY], 0)
    heads = [row(rounds.states[0].clients.row[HEAD], k) for k in rounds.clients]
    centroids = np.zeros((3, 3))
    seen = np.zeros(3)
    for _ in rounds:
        trained = []
        before = []
        after = []
        for k in rounds.clients:
            x, y = rounds.examples(k)
            params = {BODY: theta, HEAD: heads[k]}
            before.append(statistics(params, x, y)[2:])
            params = descend(params, x, y, RATE, 2, [HEAD])
            for _ in range(EPOCHS):
                params = train_body(params, x, y, centroids, seen)
            after.append(statistics(params, x, y)[:2])
            trained.append(params)
        theta = rounds.mean([params[BODY] for params in trained])
        sums, counts = (np.sum(values, axis=0) for values in zip(*after, strict=True))
        centroids = sums / counts[:, None]
        seen = (counts > 0).astype(float)

        several = [0, 1, 3]  # client 2 has a single example
        means, variance = map(np.array, zip(*before, strict=True))
        shares = [weights_by_hand(place, means[several], variance[several]) for place in range(3)]
        heads = [params[HEAD] for params in trained]
        for k, share in zip(several, shares, strict=True):
            heads[k] = rounds.mean([trained[j][HEAD] for j in several], share)
        yield {
            f"models.{BODY}": jax.tree.map(lambda leaf: leaf[None], theta),
            "server.state.mean": centroids,
            f"clients.row.{HEAD}": heads,
            "record.metrics.weight_of_others": 1 - np.mean(np.diagonal(shares)),
            "predictions": [[{BODY: theta, HEAD: head}] for head in heads],
        }
    assert 0.05 < 1 - np.mean(np.diagonal(shares)) < 0.95


def test_rounds_by_hand():
    hyperparameters = {"alignment": STRENGTH, "head_epochs": 2, "body_epochs": EPOCHS}
    rounds = by_hand(
        "fedpac",
        fedpac,
        rtol=1e-3,
        atol=1e-4,
        sizes=SIZES,
        hidden=(3,),
        hyperparameters=hyperparameters,
        epochs=1,
    )
    assert rounds.algorithm.ledger.gradients == 1 and rounds.algorithm.ledger.passes == 2 + EPOCHS


combine = jax.jit(functools.partial(head_weights, make_plan("map", devices=1)))


@pytest.mark.parametrize(("num", "noise"), [(8, 0.02), (8, 1.0)])
def test_weights_solve_the_quadratic(num, noise):
    """Two kinds of clients; one client does not take part and has weight 0."""
    rng = np.random.default_rng(num)
    kinds = rng.normal(size=(2, 2, 3))
    means = kinds[np.arange(num) % 2] + 0.1 * rng.normal(size=(num, 2, 3))
    variance = noise * rng.uniform(0.5, 2, size=num)
    active = np.arange(num) != 1
    means[1] = 0
    variance[1] = 0
    as_float32 = [jnp.asarray(each, jnp.float32) for each in (means, variance)]
    found = combine(*as_float32, jnp.asarray(active))
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)
    assert (found[:, 1] == 0).all() and (np.asarray(found) >= 0).all()
    flat = means[active].reshape(num - 1, -1)
    for place, k in enumerate(np.flatnonzero(active)):
        expected = weights_by_hand(place, flat, variance[active])
        np.testing.assert_allclose(found[k, active], expected, atol=1e-2)
        value, least = (
            quadratic(np.float64(a), place, flat, variance[active])
            for a in (found[k, active], expected)
        )
        assert value <= least + 1e-5
    own = np.diagonal(found)[active]
    assert own.min() < 0.99 and (noise < 0.5 or own.max() < 0.7)


def test_clients_out_of_the_cohort_keep_head_and_classes_their_centroids():
    rounds = play("fedpac", rounds=5, sizes=SIZES, hidden=(3,), cohort=1, epochs=1)
    changed = []
    for before, after in itertools.pairwise(rounds.states):
        old, new = (np.asarray(state.clients.row[HEAD]["bias"]) for state in (before, after))
        (k,) = np.flatnonzero((old != new).any(axis=1))
        classes = np.bincount(rounds.examples(k)[1], minlength=3) > 0
        moved = (np.asarray(before.server.state.mean) != np.asarray(after.server.state.mean)).any(
            axis=1
        )
        assert not moved[~classes].any() and moved.any()
        changed.append(k)
    assert len(set(changed)) > 1
