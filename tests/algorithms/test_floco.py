"""Floco by hand on networks with one hidden layer, given the points that are drawn; the projection and the draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from by_hand import by_hand, newcomers_by_hand, play, stack
from networks import HEAD, RATE, gradient, row, step

from pfljax.algorithms import floco as floco_module
from pfljax.exchange.plan import make_plan

ENDPOINTS = 3
DRAWN = np.array([0.5, 0.2, 0.3])  # instead of a point of the whole simplex
CENTER = np.full(ENDPOINTS, 1 / 3)
PLAN = make_plan("map", devices=1)
OPTIONS = {"sizes": (2, 5, 0, 3, 4), "hidden": (6,), "epochs": 3, "cohort": 3, "run_rounds": 4}

draw = floco_module.draw


@pytest.fixture(scope="module", autouse=True)
def known_points():
    """All tests of this file share programs whose draws are known."""

    def known(key, point, radius):
        return jnp.where(jnp.isinf(radius), jnp.float32(DRAWN), point)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(floco_module, "draw", known)
        patch.setattr(toys, "COMPILED", {})
        yield


def at(params, alpha):
    """The network at a point of the simplex."""
    kernel = np.tensordot(alpha, params[HEAD]["kernel"], axes=1)
    return params | {HEAD: params[HEAD] | {"kernel": kernel}}


def train(params, alpha, x, y, steps):
    """Steps at a point of the simplex, whose gradient reaches each endpoint by its weight."""
    for _ in range(steps):
        slopes = gradient(at(params, alpha), x, y)
        slopes[HEAD]["kernel"] = np.multiply.outer(alpha, slopes[HEAD]["kernel"])
        params = step(params, slopes, RATE)
    return params


def onto_simplex(points, totals):
    """Projects points (..., M) by bisecting the offset that makes the positive parts sum to `totals` (..., 1)."""
    low = points.min(axis=-1, keepdims=True) - totals
    high = points.max(axis=-1, keepdims=True) + 0 * totals
    for _ in range(60):
        middle = (low + high) / 2
        above = np.maximum(points - middle, 0).sum(axis=-1, keepdims=True) > totals
        low = np.where(above, middle, low)
        high = np.where(above, high, middle)
    return np.maximum(points - low, 0)


def components(changes, num):
    """Principal components (K, num) by an SVD, padded with zeros."""
    u, s, v = np.linalg.svd(changes - changes.mean(axis=0), full_matrices=False)
    signs = np.sign(v[range(len(v)), np.abs(v).argmax(axis=1)])
    found = (u * s * signs)[:, :num]
    return np.pad(found, ((0, 0), (0, num - found.shape[1])))


def check_points(found, changes):
    """The points are the projections for a z of least energy, up to rounding."""
    kappa = components(changes, found.shape[1])
    z = np.linspace(1e-4, 1, 1000)[:, None, None]
    points = onto_simplex(kappa, z) / z
    squares = np.square(points[:, :, None] - points[:, None]).sum(axis=-1)
    first, second = np.triu_indices(len(kappa), 1)
    energies = (1 / np.maximum(squares[:, first, second], 1e-8)).sum(axis=1)
    far = np.abs(points - found).max(axis=(1, 2))
    assert far.min() < 1e-5
    assert energies[far.argmin()] < 1.0001 * energies.min()


def floco(rounds):
    """Clients train at a drawn point; after half of the rounds they have points of their own, by their changes."""
    params = row(rounds.start("models"), 0)
    points = np.tile(CENTER, (len(rounds.sizes), 1))
    changes = {}

    for number in rounds:
        trained = []
        active = rounds.active(number)
        for k in active:
            alpha = DRAWN if number < rounds.problem.rounds / 2 else points[k]
            trained.append(train(params, alpha, *rounds.examples(k), rounds.epochs))
            changes[k] = (trained[-1][HEAD]["kernel"] - params[HEAD]["kernel"]).ravel()
        params = rounds.mean(trained, rounds.sizes[active])

        if number + 1 == rounds.problem.rounds / 2:
            who = sorted(changes)
            assert len(who) > len(active)  # some took part in the first round only
            points[who] = np.asarray(rounds.states[number + 1].server.state.points)[who]
            check_points(points[who], np.array([changes[k] for k in who]))
        yield {
            "models": stack([params]),
            "server.state.points": points,
            "predictions": [[at(params, alpha)] for alpha in points],
        }


def test_floco_by_hand():
    hyperparameters = {"endpoints": ENDPOINTS, "tau": 0.5}
    rounds = by_hand(
        "floco", floco, hyperparameters=hyperparameters, rounds=4, rtol=1e-5, **OPTIONS
    )
    kernel = rounds.start(f"models.{HEAD}.kernel")
    assert kernel.shape == (1, ENDPOINTS, 6, 3)
    assert rounds.start(f"models.{HEAD}.bias").shape == (1, 3)
    assert np.ptp(kernel[0], axis=0).max() > 0.1


def test_with_tau_1_nobody_has_a_region():
    rounds = play(
        "floco", hyperparameters={"endpoints": ENDPOINTS, "tau": 1.0}, rounds=4, **OPTIONS
    )
    np.testing.assert_allclose(rounds.states[-1].server.state.points, 1 / 3, rtol=1e-6)


def test_newcomers_are_at_the_center():
    def center(rounds, newcomers, k):
        return [at(row(rounds.states[-1].models, 0), CENTER)]

    hyperparameters = {"endpoints": ENDPOINTS, "tau": 0.5}
    newcomers_by_hand("floco", center, hyperparameters=hyperparameters, rounds=4, **OPTIONS)


@functools.cache
def projection(num):
    """(changes, known) -> the points of eight clients; compiled."""
    return jax.jit(
        lambda changes, known: floco_module.points_of(PLAN, {"kernel": changes}, known, num)
    )


@pytest.mark.parametrize(
    ("num", "scale"),
    [(4, 1.0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 0.05), (9, 1.0)))],
)
def test_clients_are_projected_onto_the_simplex(num, scale):
    """Also with more endpoints than clients, and whichever their order is."""
    rng = np.random.default_rng(3)
    known = np.array([1, 1, 0, 1, 1, 1, 1, 1], bool)
    groups = np.repeat(rng.normal(size=(4, 12)), 2, axis=0)
    changes = np.float32(scale * (groups + 0.3 * rng.normal(size=groups.shape)))

    def of(order):
        return np.asarray(projection(num)(changes[order].reshape(8, 3, 4), known[order]))

    found = of(np.arange(8))
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    assert (found >= 0).all()
    assert found[known].std(axis=0).max() > 0.1
    np.testing.assert_allclose(found[2], 1 / num, rtol=1e-6)
    check_points(found[known], np.float64(changes[known]))
    order = rng.permutation(8)
    np.testing.assert_allclose(of(order), found[order], atol=1e-3)


def test_equal_changes_leave_clients_at_the_center():
    found = projection(4)(np.ones((8, 3, 4), np.float32), np.ones(8, bool))
    np.testing.assert_allclose(found, 1 / 4, rtol=1e-5)


def test_points_are_drawn_from_the_simplex_or_from_a_region():
    keys = jax.random.split(jax.random.key(0), 4000)
    draws = jax.jit(jax.vmap(draw, in_axes=(0, None, None)))
    border = np.float32([0.6, 0.4, 0.0])
    inner = np.float32([0.4, 0.35, 0.25])
    anywhere = draws(keys, border, np.float32(np.inf))
    near = draws(keys, border, np.float32(0.2))
    for found in (anywhere, near):
        np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
        assert (found >= 0).all()
    # Uniform on the simplex: means of 1/3, variances of (1/3)(2/3)/4.
    np.testing.assert_allclose(anywhere.mean(axis=0), 1 / 3, atol=0.01)
    np.testing.assert_allclose(anywhere.var(axis=0), 1 / 18, atol=0.004)
    assert np.abs(near - border).sum(axis=1).max() <= 2 * 0.2
    assert np.ptp(near[:, 2]) > 0.03
    np.testing.assert_allclose(draws(keys, inner, np.float32(0.2)).mean(axis=0), inner, atol=0.005)
    still = draws(keys, border, np.float32(0.0))
    np.testing.assert_allclose(still, np.tile(border, (4000, 1)), rtol=1e-6)
