"""Floco by hand on networks with one hidden layer, given the points that are drawn; the projection and the draws."""

import jax
import jax.numpy as jnp
import networks
import numpy as np
import optax
import pytest
import toys
from networks import HEAD, RATE, examples, gradient, mean, row, step

from pfljax.algorithms.common import simplex
from pfljax.exchange.plan import make_plan
from pfljax.exchange.rounds import cohort_of

SIZES, ENDPOINTS, COHORT = (2, 5, 0, 3, 4), 3, 3
DRAWN = np.array([0.5, 0.2, 0.3])  # instead of a point of the whole simplex
PLAN = make_plan("map", devices=1)


def at(params, alpha):
    """The network at a point of the simplex."""
    return params | {HEAD: params[HEAD] | {"kernel": np.tensordot(alpha, params[HEAD]["kernel"], axes=1)}}


def train(params, alpha, x, y, steps):
    for _ in range(steps):
        slopes = gradient(at(params, alpha), x, y)
        slopes[HEAD]["kernel"] = np.multiply.outer(alpha, slopes[HEAD]["kernel"])
        params = step(params, slopes, RATE)
    return params


def onto_simplex(point, total):
    """Projects by bisecting the offset that makes the positive parts sum to `total`."""
    low, high = point.min() - total, point.max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(point - middle, 0).sum() > total else (low, middle)
    return np.maximum(point - low, 0)


def components(changes, num):
    """Principal components (K, num) by an SVD, padded with zeros."""
    u, s, v = np.linalg.svd(changes - changes.mean(axis=0), full_matrices=False)
    signs = np.sign(v[range(len(v)), np.abs(v).argmax(axis=1)])
    found = (u * s * signs)[:, :num]
    return np.pad(found, ((0, 0), (0, num - found.shape[1])))


def check_points(found, changes):
    """The points are the projections for a z of least energy, up to rounding."""
    kappa, energies, far = components(changes, found.shape[1]), [], []
    for z in np.linspace(1e-4, 1, 1000):
        points = np.array([onto_simplex(each, z) / z for each in kappa])
        distances = np.sqrt(np.square(points[:, None] - points).sum(axis=-1))[np.triu_indices(len(points), 1)]
        energies.append((1 / np.maximum(distances, 1e-4) ** 2).sum())
        far.append(np.abs(points - found).max())
    assert min(far) < 1e-5 and energies[np.argmin(far)] < 1.0001 * min(energies)
    return np.argmin(far)


def test_rounds_by_hand(monkeypatch):
    drawn = lambda key, point, radius: jnp.where(jnp.isinf(radius), jnp.float32(DRAWN), point)
    monkeypatch.setattr(simplex, "draw", drawn)
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, optax.sgd(RATE), cohort=COHORT, hidden=(6,), rounds=4, epochs=3)
    algorithm = toys.make_algorithm("floco", problem, endpoints=ENDPOINTS)
    states, records = toys.train(algorithm, problem, federation.client_data, 4)
    params, changes = row(states[0].models, 0), {}
    assert params[HEAD]["kernel"].shape == (ENDPOINTS, 6, 3) and params[HEAD]["bias"].shape == (3,)
    assert np.ptp(params[HEAD]["kernel"], axis=0).max() > 0.1
    for number, state in enumerate(states[1:]):
        trained, cohort = [], np.asarray(cohort_of(jax.random.key(0), number, 5, COHORT).ids)
        active = [k for k in cohort if SIZES[k]]
        for k in active:
            alpha = np.float64(states[number].server.points[k]) if number >= 2 else DRAWN
            trained.append(train(params, alpha, *examples(federation, k), 3))
            changes[k] = (trained[-1][HEAD]["kernel"] - params[HEAD]["kernel"]).ravel()
        params = mean(trained, [SIZES[k] for k in active])
        toys.assert_trees_close(row(state.models, 0), params, rtol=1e-5, atol=1e-5)
        if number < 1:
            np.testing.assert_allclose(state.server.points, 1 / 3, rtol=1e-6)
        if number == 1:
            who = sorted(changes)
            check_points(np.asarray(state.server.points)[who], np.array([changes[k] for k in who]))
            assert len(who) > len(active)  # some took part in the first round only
            others = sorted(set(range(5)) - set(who))
            np.testing.assert_allclose(np.asarray(state.server.points)[others], 1 / 3, rtol=1e-6)
    found = toys.predict(algorithm, problem, jax.random.key(0), states[-1], federation.client_data).models
    for k in range(5):
        expected = at(params, np.float64(states[-1].server.points[k]))
        toys.assert_trees_close(row(row(found, k), 0), expected, rtol=1e-5, atol=1e-5)
    new = toys.adapt(algorithm, problem, jax.random.key(4), states[-1], toys.make_federation((3, 4)).client_data).models
    toys.assert_trees_close(row(row(new, 1), 0), at(params, np.full(3, 1 / 3)), rtol=1e-5, atol=1e-5)
    model = 4 * (3 * 6 + 6 + ENDPOINTS * 6 * 3 + 3)
    sent = [sum(SIZES[k] > 0 for k in cohort_of(jax.random.key(0), n, 5, COHORT).ids) for n in range(4)]
    assert [record.down for record in records] == [COHORT * (model + 4 * ENDPOINTS)] * 4
    assert [record.up for record in records] == [num * (model + 4) for num in sent]  # and n_k


@pytest.mark.parametrize(
    ("num", "scale"), [(4, 1.0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 0.05), (9, 1.0)))]
)
def test_clients_are_projected_onto_the_simplex(num, scale):
    """Also with more endpoints than clients, and whichever their order is."""
    rng, known = np.random.default_rng(3), np.array([1, 1, 0, 1, 1, 1, 1, 1], bool)
    groups = np.repeat(rng.normal(size=(4, 12)), 2, axis=0)
    changes = np.float32(scale * (groups + 0.3 * rng.normal(size=groups.shape)))

    def of(order):
        leaves = {"kernel": jnp.asarray(changes[order]).reshape(8, 3, 4)}
        return np.asarray(simplex.projected(PLAN, leaves, jnp.asarray(known[order]), num))

    found = of(np.arange(8))
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    assert (found >= 0).all() and found[known].std(axis=0).max() > 0.1
    np.testing.assert_allclose(found[2], 1 / num, rtol=1e-6)
    check_points(found[known], np.float64(changes[known]))
    order = rng.permutation(8)
    np.testing.assert_allclose(of(order), found[order], atol=1e-3)


def test_equal_changes_leave_clients_at_the_center():
    changes = {"kernel": jnp.ones((4, 3, 5))}
    found = simplex.projected(PLAN, changes, jnp.ones(4, bool), 3)
    np.testing.assert_allclose(found, 1 / 3, rtol=1e-5)


def test_points_are_drawn_from_the_simplex_or_from_a_region():
    keys, point = jax.random.split(jax.random.key(0), 4000), jnp.float32([0.6, 0.4, 0.0])
    anywhere = jax.vmap(lambda key: simplex.draw(key, point, jnp.inf))(keys)
    near = jax.vmap(lambda key: simplex.draw(key, point, 0.2))(keys)
    inner = jax.vmap(lambda key: simplex.draw(key, jnp.float32([0.6, 0.4]), 0.2))(keys)
    for found in (anywhere, near):
        np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
        assert (found >= 0).all()
    # Uniform on the simplex: means of 1/3, variances of (1/3)(2/3)/4.
    np.testing.assert_allclose(anywhere.mean(axis=0), 1 / 3, atol=0.01)
    np.testing.assert_allclose(anywhere.var(axis=0), 1 / 18, atol=0.004)
    assert np.abs(near - point).sum(axis=1).max() <= 2 * 0.2 and np.ptp(near[:, 2]) > 0.03
    np.testing.assert_allclose(inner.mean(axis=0), [0.6, 0.4], atol=0.005)
    np.testing.assert_allclose(jax.vmap(lambda key: simplex.draw(key, point, 0.0))(keys[:3]), [point] * 3, rtol=1e-6)


def test_with_tau_1_nobody_has_a_region():
    states = networks.play("floco", 3, SIZES, knobs={"endpoints": 3, "tau": 1.0}).states
    np.testing.assert_allclose(states[-1].server.points, 1 / 3, rtol=1e-6)
    assert not np.allclose(networks.play("floco", 3, SIZES, knobs={"endpoints": 3}).states[-1].server.points, 1 / 3)


def test_one_endpoint_is_fedavg():
    options = {"rounds": 3, "sizes": SIZES, "batch_size": 2, "epochs": 2}
    found = networks.play("floco", knobs={"endpoints": 1}, **options).states[-1].models
    kernel = found[HEAD]["kernel"][:, 0]
    found = found | {HEAD: found[HEAD] | {"kernel": kernel}}
    wanted = networks.play("fedavg", **options).states[-1].models
    toys.assert_trees_close(found, wanted, rtol=1e-5, atol=1e-6)
