"""APPLE: rounds by hand on quadratics, models that are not downloaded, and its limits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from quadratics import RATE, SIZES, gradient, play, vectors

from pfljax.algorithms.apple import schedule
from pfljax.algorithms.common.parameters import mixture
from pfljax.contract import tree
from pfljax.contract.types import Cohort, State
from pfljax.exchange import lifting

SHARES = np.array(SIZES) / sum(SIZES)


def round_by_hand(federation, cores, p, held, strength, rate, steps=2):
    """A round's next cores and p; held (K, K) bool says who received whose core."""
    new, moved = cores.copy(), p.copy()
    for k in range(len(cores)):
        for _ in range(steps):
            models = np.where(np.arange(len(cores))[:, None] == k, new[k], cores)
            models = np.where(held[k][:, None], models, new[k])  # a core that is not here counts as the own
            slope = gradient(federation, k, moved[k] @ models)
            related = np.where(held[k], models @ slope + strength * (moved[k] - SHARES), 0)
            own = moved[k, k] + moved[k][~held[k]].sum()
            new[k], moved[k] = new[k] - RATE * own * slope, moved[k] - rate * related
    return new, moved


def test_rounds_by_hand():
    knobs = {"rate": 0.05, "mu": 2.0, "pulled": 0.75}
    federation, algorithm, states, records, predictions = play("apple", rounds=4, epochs=2, knobs=knobs)
    cores, p = vectors(states[0].models), np.tile(SHARES, (4, 1))
    for number in range(4):  # of R = 2 rounds in the toy problem: L = 1.5
        strength = 2.0 * (1 + np.cos(np.pi * number / 1.5)) / 2 if number < 1.5 else 0
        cores, p = round_by_hand(federation, cores, p, np.ones((4, 4), bool), strength, 0.05)
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


def test_a_core_that_is_not_downloaded_counts_as_the_own_by_hand():
    knobs = {"neighbors": 1, "rate": 0.05, "mu": 1.0, "pulled": 1.0}
    federation, _, states, records, _ = play("apple", rounds=3, epochs=2, knobs=knobs)
    cores, p, met = vectors(states[0].models), np.tile(SHARES, (4, 1)), set()
    for number, (before, after) in enumerate(itertools.pairwise(states)):
        held = np.eye(4, dtype=bool) | (np.asarray(before.clients.moved) != np.asarray(after.clients.moved))
        assert (held.sum(axis=1) == 2).all()
        met |= {tuple(row) for row in held.tolist()}
        strength = (1 + np.cos(np.pi * number / 2)) / 2 if number < 2 else 0
        cores, p = round_by_hand(federation, cores, p, held, strength, 0.05)
        np.testing.assert_allclose(vectors(after.models), cores, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(SHARES + np.float64(after.clients.moved), p, rtol=1e-4, atol=1e-5)
    assert len(met) > 4  # not always the same
    assert records[0].down == 4 * (4 * 4 + 4 * 4 / 2)


def test_absent_clients_cores_are_mixed_as_they_are_by_hand():
    knobs = {"rate": 0.05, "mu": 1.0, "pulled": 1.0}
    federation, _, states, _, predictions = play("apple", rounds=3, epochs=2, cohort=2, knobs=knobs)
    cores, p, present = vectors(states[0].models), np.tile(SHARES, (4, 1)), set()
    for number, (before, after) in enumerate(itertools.pairwise(states)):
        strength = (1 + np.cos(np.pi * number / 2)) / 2 if number < 2 else 0
        there = (vectors(before.models) != vectors(after.models)).any(axis=1)
        new, moved = round_by_hand(federation, cores, p, np.ones((4, 4), bool), strength, 0.05)
        cores, p = np.where(there[:, None], new, cores), np.where(there[:, None], moved, p)
        assert there.sum() == 2
        present |= {*np.flatnonzero(there)}
        np.testing.assert_allclose(vectors(after.models), cores, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(SHARES + np.float64(after.clients.moved), p, rtol=1e-4, atol=1e-5)
    assert len(present) > 2
    np.testing.assert_allclose(vectors(predictions.models)[:, 0], p @ cores, rtol=1e-4, atol=1e-5)


def test_with_few_neighbors_the_score_is_of_a_mixture_that_a_client_can_make():
    _, _, states, _, predictions = play("apple", rounds=3, epochs=2, knobs={"neighbors": 2, "rate": 0.05})
    found, cores = vectors(predictions.models)[:, 0], vectors(states[-1].models)
    p = SHARES + np.float64(states[-1].clients.moved)
    for k in range(4):
        possible = []
        for absent in set(range(4)) - {k}:  # two of the three others
            weights = p[k].copy()
            weights[k] += weights[absent]
            weights[absent] = 0
            possible.append(weights @ cores)
        assert min(np.abs(found[k] - each).max() for each in possible) < 1e-5


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
