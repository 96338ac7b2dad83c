"""APPLE: rounds by hand on quadratics, stale copies of what is not downloaded, and its limits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from quadratics import RATE, SIZES, gradient, play, vectors

from pfljax.algorithms.apple import schedule
from pfljax.algorithms.common.parameters import mixture
from pfljax.contract import tree
from pfljax.contract.types import Cohort, State
from pfljax.exchange import lifting

SHARES = np.array(SIZES) / sum(SIZES)


def round_by_hand(federation, cores, p, copies, strength, rate, momentum=0.0, steps=2):
    """A round's next cores and p, given each client's copies (K, K, d) of all cores."""
    new, moved = cores.copy(), p.copy()
    for k in range(len(cores)):
        velocity = np.zeros(len(cores))
        for _ in range(steps):
            models = np.where(np.arange(len(cores))[:, None] == k, new[k], copies[k])
            slope = gradient(federation, k, moved[k] @ models)
            velocity = momentum * velocity + models @ slope + strength * (moved[k] - SHARES)
            new[k], moved[k] = new[k] - RATE * moved[k, k] * slope, moved[k] - rate * velocity
    return new, moved


@pytest.mark.parametrize("momentum", [0.0, pytest.param(0.9, marks=pytest.mark.slow)])
def test_rounds_by_hand(momentum):
    knobs = {"rate": 0.05, "momentum": momentum, "mu": 2.0, "pulled": 0.75}
    federation, algorithm, states, records, predictions = play("apple", rounds=4, epochs=2, knobs=knobs)
    cores, p = vectors(states[0].models), np.tile(SHARES, (4, 1))
    for number in range(4):  # of R = 2 rounds in the toy problem: L = 1.5
        strength = 2.0 * (1 + np.cos(np.pi * number / 1.5)) / 2 if number < 1.5 else 0
        cores, p = round_by_hand(federation, cores, p, np.tile(cores, (4, 1, 1)), strength, 0.05, momentum)
        after = states[number + 1]
        np.testing.assert_allclose(vectors(after.models), cores, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(SHARES + np.float64(after.clients.moved), p, rtol=1e-4, atol=1e-5)
    assert np.abs(p - SHARES).max() > 0.1 and (p < 0).any()
    np.testing.assert_allclose(vectors(predictions.models)[:, 0], p @ cores, rtol=1e-4, atol=1e-5)
    problem = toys.make_problem(federation)
    shown = toys.used(algorithm, problem, jax.random.key(0), states[-1], federation.client_data)
    for k in range(4):
        np.testing.assert_allclose(shown["signed"][k], p[k, shown["index"][k]], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(shown["weights"], np.abs(shown["signed"]) / np.abs(p).sum(axis=1)[:, None], rtol=1e-4)
    # Three cores of four numbers each down and one up; the four shares are spread over the R = 2 rounds.
    assert records[0].down == 4 * (3 * 4 * 4 + 4 * 4 / 2) and records[0].up == 4 * 4 * 4


def test_cores_that_are_not_downloaded_are_stale_copies_by_hand():
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE), epochs=2)
    knobs = {"neighbors": 1, "rate": 0.05, "mu": 1.0, "pulled": 1.0}
    script = [[[k, (k + 1 + (number + k) % 3) % 4] for k in range(4)] for number in range(4)]
    algorithm = toys.scripted(toys.make_algorithm("apple", problem, **knobs), script)
    states, records = toys.train(algorithm, problem, federation.client_data, 4)
    cores, p = vectors(states[0].models), np.tile(SHARES, (4, 1))
    copies = np.tile(cores, (4, 1, 1))
    for number in range(4):
        for own, other in script[number]:
            copies[own, other] = cores[other]
        strength = (1 + np.cos(np.pi * number / 2)) / 2 if number < 2 else 0
        cores, p = round_by_hand(federation, cores, p, copies, strength, 0.05)
        np.testing.assert_allclose(vectors(states[number + 1].models), cores, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(SHARES + np.float64(states[number + 1].clients.moved), p, rtol=1e-4, atol=1e-5)
    assert np.abs(copies - cores).max() > 0.1  # they are stale
    # One core of four numbers down, and two further first copies and four shares, spread over the R = 2 rounds.
    assert records[0].down == 4 * (4 * 4 + (2 * 4 * 4 + 4 * 4) / 2)
    found = vectors(toys.predict(algorithm, problem, jax.random.key(0), states[-1], federation.client_data).models)[
        :, 0
    ]
    for k in range(4):  # with one more core, which was just drawn
        possible = []
        for fresh in set(range(4)) - {k}:
            newest = np.isin(np.arange(4), [k, fresh])[:, None]
            possible.append(p[k] @ np.where(newest, cores, copies[k]))
        assert min(np.abs(found[k] - each).max() for each in possible) < 1e-4


def test_absent_clients_cores_are_mixed_as_they_are_by_hand():
    knobs = {"rate": 0.05, "mu": 1.0, "pulled": 1.0}
    federation, _, states, _, predictions = play("apple", rounds=3, epochs=2, cohort=2, knobs=knobs)
    cores, p, present = vectors(states[0].models), np.tile(SHARES, (4, 1)), set()
    for number, (before, after) in enumerate(itertools.pairwise(states)):
        strength = (1 + np.cos(np.pi * number / 2)) / 2 if number < 2 else 0
        there = (vectors(before.models) != vectors(after.models)).any(axis=1)
        new, moved = round_by_hand(federation, cores, p, np.tile(cores, (4, 1, 1)), strength, 0.05)
        cores, p = np.where(there[:, None], new, cores), np.where(there[:, None], moved, p)
        assert there.sum() == 2
        present |= {*np.flatnonzero(there)}
        np.testing.assert_allclose(vectors(after.models), cores, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(SHARES + np.float64(after.clients.moved), p, rtol=1e-4, atol=1e-5)
    assert len(present) > 2
    np.testing.assert_allclose(vectors(predictions.models)[:, 0], p @ cores, rtol=1e-4, atol=1e-5)


def test_others_are_drawn_uniformly():
    problem = toys.make_problem(toys.make_federation([3] * 5), cohort=3)
    algorithm = toys.make_algorithm("apple", problem, neighbors=2)
    cohort = Cohort(jnp.array([0, 2, 3], jnp.int32))
    state = State((), (), (), jnp.zeros(3))  # which it does not read
    draw = jax.jit(lambda key: lifting.download(algorithm, problem.plan, key, state, cohort))
    drawn = np.stack([np.asarray(draw(jax.random.key(seed))) for seed in range(300)])
    np.testing.assert_array_equal(drawn[:, :, 0], np.broadcast_to(cohort.ids, (300, 3)))
    assert (drawn[:, :, 1:] != drawn[:, :, :1]).all() and (drawn[:, :, 1] != drawn[:, :, 2]).all()
    for place, own in enumerate(cohort.ids.tolist()):
        counts = [(drawn[:, place, 1:] == other).sum() for other in range(5) if other != own]
        assert sum(counts) == 600 and np.abs(np.array(counts) - 150).max() < 45  # over 5 standard deviations


def test_a_client_without_others_trains_as_local_does():
    alone = {"rounds": 4, "sizes": (5,), "batch_size": 2, "epochs": 2}
    found, local = play("apple", knobs={"rate": 0.0}, **alone)[2][-1], play("local", **alone)[2][-1]
    np.testing.assert_allclose(vectors(found.models), vectors(local.models), rtol=1e-5)


@pytest.mark.parametrize(
    ("number", "length", "wanted"), [(0, 10, 1), (5, 10, 0.5), (10, 10, 0), (12, 10, 0), (0, 0, 0)]
)
def test_the_pull_falls_by_a_cosine(number, length, wanted):
    np.testing.assert_allclose(schedule(np.int32(number), float(length)), wanted, atol=1e-6)


def test_batch_statistics_are_not_mixed():
    problem = toys.make_problem(toys.make_federation((3, 3)), model=toys.Normalized)
    own, one, two = (tree.first(problem.init_models(jax.random.key(n), 1)) for n in range(3))
    own["batch_stats"]["BatchNorm_0"]["var"] += 5.0
    others = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, two)
    found = mixture(problem, jnp.array([0.5, 2.0, -1.0]), own, others)
    toys.assert_trees_close(found["batch_stats"], own["batch_stats"])
    kernels = [np.float64(model["Dense_0"]["kernel"]) for model in (own, one, two)]
    wanted = 0.5 * kernels[0] + 2 * kernels[1] - kernels[2]
    np.testing.assert_allclose(found["Dense_0"]["kernel"], wanted, rtol=1e-5, atol=1e-6)
