"""FedPAC: rounds by hand with the paper's quadratic solved by scipy, its limit, newcomers, and what travels."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
import toys
from networks import BODY, HEAD, descend, examples, features, gradient, mean, row, step

from pfljax.algorithms.common.combining import combination
from pfljax.exchange.plan import make_plan

SIZES, RATE, EPOCHS, STRENGTH = (4, 6, 1, 5), 0.3, 3, 2.0
FEDERATION = toys.make_federation(SIZES)
PLAN = make_plan("map", devices=1)


@functools.cache
def play(name="fedpac", rounds=3, knobs=(), cohort=0, **options):
    """(problem, algorithm, states, records)."""
    options |= {"hidden": (3,), "cohort": cohort}
    return toys.play(name, FEDERATION, rounds, optax.sgd(RATE), dict(knobs), **options)[1:]


def statistics(params, x, y):
    """Per-class feature sums and counts, h and V / (n - 1); V is the trace of the covariance of z (x) e_y."""
    z, hot = features(params, x), np.eye(3)[y]
    outer = np.stack([np.outer(e, f).ravel() for e, f in zip(hot, z, strict=True)])
    return hot.T @ z, hot.sum(axis=0), outer.mean(axis=0), outer.var(axis=0).sum() / max(len(y) - 1, 1)


def quadratic(a, k, means, variance):
    """sum_j a_j^2 V_j / (n_j - 1) + |h_k - sum_j a_j h_j|^2."""
    return a**2 @ variance + np.square(means[k] - a @ means).sum()


def weights_by_hand(k, means, variance):
    """Its minimum over the simplex."""
    num, value = len(means), lambda a: quadratic(a, k, means, variance)
    slope = lambda a: 2 * a * variance - 2 * means @ (means[k] - a @ means)
    options = {"ftol": 1e-14, "maxiter": 1000}
    sums = {"type": "eq", "fun": lambda a: a.sum() - 1, "jac": np.ones_like}
    start = np.full(num, 1 / num)
    return scipy.optimize.minimize(
        value, start, jac=slope, bounds=[(0, 1)] * num, constraints=[sums], method="SLSQP", options=options
    ).x


def train_body(params, x, y, centroids, seen):
    """A step of the body on the cross entropy and the pull to the centroids."""
    z = features(params, x)
    pull = STRENGTH * 2 * (z - centroids[y]) * seen[y][:, None] / z.size
    return step(params, gradient(params, x, y, pull=pull), RATE, [BODY])


@pytest.mark.slow
def test_rounds_by_hand():
    knobs = (("alignment", STRENGTH), ("head_epochs", 2), ("body_epochs", EPOCHS))
    problem, algorithm, states, records = play(knobs=knobs)
    assert algorithm.ledger.gradients == 1 and algorithm.ledger.passes == 2 + EPOCHS
    theta = row(states[0].models.body[BODY], 0)
    heads = [row(states[0].clients.own[HEAD], k) for k in range(4)]
    centroids, seen = np.zeros((3, 3)), np.zeros(3)
    for state, record in zip(states[1:], records, strict=True):
        bodies, trained, before, after = [], [], [], []
        for k in range(4):
            x, y = examples(FEDERATION, k)
            params = {BODY: theta, HEAD: heads[k]}
            before.append(statistics(params, x, y)[2:])
            params = descend(params, x, y, RATE, 2, [HEAD])
            for _ in range(EPOCHS):
                params = train_body(params, x, y, centroids, seen)
            after.append(statistics(params, x, y)[:2])
            bodies.append(params[BODY])
            trained.append(params[HEAD])
        theta, (means, variance) = mean(bodies, SIZES), map(np.array, zip(*before, strict=True))
        sums, counts = (np.sum(found, axis=0) for found in zip(*after, strict=True))
        centroids, seen = sums / counts[:, None], (counts > 0).astype(float)
        several = [0, 1, 3]  # client 2 has a single example
        shares = [weights_by_hand(place, means[several], variance[several]) for place in range(3)]
        heads = trained.copy()
        for k, share in zip(several, shares, strict=True):
            heads[k] = mean([trained[j] for j in several], share)
        np.testing.assert_allclose(record.metrics["weight_of_others"], 1 - np.mean(np.diagonal(shares)), atol=1e-3)
        toys.assert_trees_close(row(state.models.body[BODY], 0), theta, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(state.models.centroids[0], centroids, rtol=1e-3, atol=1e-4)
        for k in range(4):
            toys.assert_trees_close(row(state.clients.own[HEAD], k), heads[k], rtol=2e-3, atol=1e-3)
    found = toys.predict(algorithm, problem, jax.random.key(0), states[-1], FEDERATION.client_data).models
    for k in range(4):
        toys.assert_trees_close(row(row(found, k), 0), {BODY: theta, HEAD: heads[k]}, rtol=2e-3, atol=1e-3)
    assert 0.05 < 1 - np.mean(np.diagonal(shares)) < 0.95


@pytest.mark.parametrize(("num", "noise"), [(3, 0.1), (8, 0.02), (8, 1.0)])
def test_weights_solve_the_quadratic(num, noise):
    """Two kinds of clients; one client does not take part and has weight 0."""
    rng = np.random.default_rng(num)
    kinds = rng.normal(size=(2, 2, 3))
    means = kinds[np.arange(num) % 2] + 0.1 * rng.normal(size=(num, 2, 3))
    variance, active = noise * rng.uniform(0.5, 2, size=num), np.arange(num) != 1
    means[1], variance[1] = 0, 0
    as_float32 = [jnp.asarray(each, jnp.float32) for each in (means, variance)]
    found = jax.jit(functools.partial(combination, PLAN))(*as_float32, jnp.asarray(active))
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)
    assert (found[:, 1] == 0).all() and (np.asarray(found) >= 0).all()
    flat = means[active].reshape(num - 1, -1)
    for place, k in enumerate(np.flatnonzero(active)):
        expected = weights_by_hand(place, flat, variance[active])
        np.testing.assert_allclose(found[k, active], expected, atol=1e-2)
        value, least = (quadratic(np.float64(a), place, flat, variance[active]) for a in (found[k, active], expected))
        assert value <= least + 1e-5
    own = np.diagonal(found)[active]
    assert own.min() < 0.99 and (noise < 0.5 or own.max() < 0.7)


def test_clients_out_of_the_cohort_keep_head_and_classes_their_centroids():
    _, _, states, _ = play(rounds=5, cohort=1)
    changed = []
    for before, after in itertools.pairwise(states):
        old, new = (np.asarray(state.clients.own[HEAD]["bias"]) for state in (before, after))
        (k,) = np.flatnonzero((old != new).any(axis=1))
        classes = np.bincount(FEDERATION.train.y[k, : SIZES[k]], minlength=3) > 0
        moved = (np.asarray(before.models.centroids) != np.asarray(after.models.centroids))[0].any(axis=1)
        assert not moved[~classes].any() and moved.any()
        changed.append(k)
    assert len(set(changed)) > 1


@pytest.mark.slow
def test_newcomers_train_a_head_on_the_body_as_it_is():
    newcomers, key = toys.make_federation((3, 4), seed=5), jax.random.key(0)
    problem, algorithm, states, _ = play(knobs=(("head_epochs", 4),))
    found = toys.adapt(algorithm, problem, key, states[-1], newcomers.client_data).models
    for k in range(2):
        start = problem.model.init(jax.random.split(jax.random.fold_in(key, k))[0])
        params = {BODY: row(states[-1].models.body[BODY], 0), HEAD: start[HEAD]}
        expected = descend(params, *examples(newcomers, k), RATE, 2 * 4, [HEAD])
        toys.assert_trees_close(row(row(found, k), 0), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_what_travels():
    """F = 3 features of C = 3 classes; scalars of a report are free."""
    *_, records = play()
    body, head, centroids, counts = 4 * (3 * 3 + 3), 4 * (3 * 3 + 3), 4 * 3 * 3, 4 * 3
    for record in records:
        assert record.down == 4 * (body + head + centroids + counts)
        assert record.up == 4 * (body + 4 + centroids + counts + head + centroids)  # n_k; the means h
    (record,) = play(rounds=1, knobs=(("heads", "own"),))[3]
    assert record.down == 4 * (body + centroids + counts)
    assert record.up == 4 * (body + 4 + centroids + counts)
