"""Sampling neighbors and the tables of candidates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfljax.algorithms.common.neighbors import (
    Candidates,
    best_candidates,
    candidates,
    epsilon_greedy,
    remember,
    sample_others,
)
from pfljax.contract.types import Cohort

KEYS = jax.random.split(jax.random.key(7), 4000)
EVERYONE = Cohort(jnp.arange(8), everyone=True)


def table(tracked, ids):
    """Candidates: some clients, the own one first, and their tracked losses of all clients'."""
    tracked = jnp.asarray(tracked, jnp.float32)[np.array(ids)]
    return Candidates(jnp.array(ids, jnp.int32), jnp.zeros(len(ids)), tracked)


def chi_square(counts, expected):
    return ((counts - expected) ** 2 / expected).sum()


@functools.partial(jax.jit, static_argnames="count")
def draw_others(keys, own, count):
    return jax.vmap(lambda key: sample_others(key, own, 8, count))(keys)


@pytest.mark.parametrize(
    ("own", "count"),
    [
        (0, 3),
        (3, 3),
        (7, 3),
        pytest.param(7, 7, marks=pytest.mark.slow),
        pytest.param(0, 1, marks=pytest.mark.long),
    ],
)
def test_others_are_distinct_and_uniform(own, count):
    drawn = np.asarray(draw_others(KEYS, own, count))
    assert drawn.shape == (len(KEYS), count)
    others = np.setdiff1d(np.arange(8), [own])
    assert np.isin(drawn, others).all()
    assert all(len(set(row)) == count for row in drawn[:500].tolist())
    for column in drawn.T:  # in every place each of the seven is as likely
        counts = np.array([(column == k).sum() for k in others])
        assert chi_square(counts, len(KEYS) / 7) < 30  # 6 degrees; the 99.9 % point is 22.5
    if count == 3:  # and every subset of them
        subsets = np.unique(np.sort(drawn, axis=1), axis=0, return_counts=True)[1]
        assert (
            len(subsets) == 35 and chi_square(subsets, len(KEYS) / 35) < 80
        )  # 34 degrees; 99.9 %: 65


@functools.partial(jax.jit, static_argnames="count")
def draw_all(keys, known, own, cohort, count, epsilon):
    return jax.vmap(lambda key: epsilon_greedy(key, known, own, cohort, count, epsilon))(keys)


def greedy(epsilon, known, cohort=EVERYONE, own=2, count=3, keys=KEYS):
    found = np.asarray(draw_all(keys, known, jnp.int32(own), cohort, count, epsilon))
    assert found.shape == (len(keys), count) and found.dtype == np.int32
    assert all(len(set(row)) == count and own not in row for row in found.tolist())
    return found


def test_without_exploring_the_lowest_tracked_losses_win():
    known = table([5, 1, 0, 7, 2, 9, 3, 8], [2, 0, 1, 4, 6])
    np.testing.assert_array_equal(greedy(0.0, known), np.broadcast_to([1, 4, 6], (len(KEYS), 3)))


@pytest.mark.parametrize("epsilon", [0.3, 1.0])
def test_exploring_is_uniform_and_as_frequent_as_asked(epsilon):
    known = table([5, 1, 0, 7, 2, 9, 3, 8], [2, 0, 1, 4, 6])
    found = greedy(epsilon, known)
    exploited = (np.sort(found, axis=1) == [1, 4, 6]).all(axis=1)
    share = (1 - epsilon) + epsilon / 35  # by chance exploring finds the best three of seven, too
    assert abs(exploited.mean() - share) < 4 * np.sqrt(0.25 / len(KEYS))
    rest = found[~exploited]
    subsets = np.unique(np.sort(rest, axis=1), axis=0, return_counts=True)[1]
    assert len(subsets) == 34 and chi_square(subsets, len(rest) / 34) < 80


def test_ties_are_broken_at_random():
    known = table([1, 1, 0, 1, 1, 0.5, 1, 1], [2, 0, 1, 5, 7])
    found = greedy(0.0, known)
    assert (found[:, 0] == 5).all()
    counts = np.array([(found[:, 1] == k).sum() for k in (0, 1, 7)])
    assert chi_square(counts, len(KEYS) / 3) < 20  # 2 degrees; 99.9 %: 13.8


def test_slots_that_are_not_eligible_are_told():
    best = jax.jit(best_candidates, static_argnums=2)
    slots, eligible = best(jax.random.key(0), jnp.array([-jnp.inf, 2.0, -jnp.inf]), 2)
    assert slots[0] == 1 and eligible.tolist() == [True, False]


def test_models_never_evaluated_are_tried_first():
    known = table([0.1, np.inf, 0, 7, np.inf, 9, 0.2, 8], [2, 0, 1, 4, 6])
    found = greedy(0.0, known)
    assert (np.sort(found[:, :2], axis=1) == [1, 4]).all() and (found[:, 2] == 0).all()
    counts = np.array([(found[:, 0] == k).sum() for k in (1, 4)])
    assert chi_square(counts, len(KEYS) / 2) < 15  # 1 degree; 99.9 %: 10.8


COHORT = Cohort(jnp.array([1, 2, 4, 6, 7]))


def test_only_the_cohort_is_chosen():
    known = table([0, 5, 0, 0, 1, 0, 9, 2], [2, 1, 4, 5, 7])
    np.testing.assert_array_equal(
        greedy(0.0, known, COHORT), np.broadcast_to([4, 7, 1], (len(KEYS), 3))
    )
    explored = greedy(1.0, known, COHORT)
    assert set(explored.ravel().tolist()) == {1, 4, 6, 7}


def test_random_others_fill_up_where_too_few_are_known():
    """Of the cohort, only client 6 has been a candidate."""
    known = table([0, 5, 0, 0, 1, 0, 9, 2], [2, 0, 3, 5, 6])
    found = greedy(0.0, known, COHORT)
    assert (found[:, 0] == 6).all()
    counts = np.array([(found[:, 1:] == k).sum() for k in (1, 4, 7)])
    assert chi_square(counts, 2 * len(KEYS) / 3) < 20


@pytest.mark.slow
def test_random_others_fill_up_where_few_are_known():
    known = table([0, 5, 1, 0, 1, 0, 3, 2], [2, 6])
    found = greedy(0.0, known)
    assert (found[:, 0] == 6).all()
    counts = np.array([(found[:, 1:] == k).sum() for k in (0, 1, 3, 4, 5, 7)])
    assert chi_square(counts, 2 * len(KEYS) / 6) < 30


@pytest.mark.slow
def test_all_others_can_be_asked():
    known = table(np.arange(8.0), [2, 0, 1, 3, 4, 5, 6, 7])
    for epsilon in (0.0, 1.0):
        np.testing.assert_array_equal(
            np.sort(greedy(epsilon, known, count=7), axis=1)[0], [0, 1, 3, 4, 5, 6, 7]
        )


def test_nobody_can_be_asked():
    known = table(np.arange(8.0), [2, 0, 1])
    assert epsilon_greedy(KEYS[0], known, jnp.int32(2), EVERYONE, 0, 0.3).shape == (0,)


def test_tables_start_with_the_own_model():
    for start in (0.0, np.inf):
        everyone = candidates(KEYS[0], jnp.int32(3), 5, 5, start)  # draws nothing
        assert everyone.ids.tolist() == [3, 4, 0, 1, 2]
        assert (np.asarray(everyone.tracked) == start).all() and not np.asarray(everyone.last).any()
    draw = jax.jit(jax.vmap(lambda key: candidates(key, jnp.int32(3), 4, 8, jnp.inf).ids))
    ids = np.asarray(draw(KEYS))
    assert (ids[:, 0] == 3).all() and all(len(set(row)) == 4 for row in ids[:500].tolist())
    counts = np.array([(ids[:, 1:] == k).sum() for k in (0, 1, 2, 4, 5, 6, 7)])
    assert chi_square(counts, 3 * len(KEYS) / 7) < 30


def test_the_worst_candidate_leaves_when_a_new_one_comes():
    note = jax.jit(remember)
    known = Candidates(
        jnp.array([2, 6, 4, 5]), jnp.array([1.0, 2, 3, 0]), jnp.array([9.0, 3, 5, jnp.inf])
    )
    after, slots = note(known, jnp.array([2, 4, 0]), jnp.array([0.5, 2.5, 7]))
    assert after.ids.tolist() == [2, 6, 4, 0] and slots.tolist() == [
        0,
        2,
        3,
    ]  # one never evaluated leaves first
    np.testing.assert_array_equal(after.last, [0.5, 2, 2.5, 7])
    np.testing.assert_array_equal(after.tracked, [9, 3, 5, np.inf])

    full = Candidates(jnp.array([2, 6, 4, 0]), jnp.array([1.0, 2, 3, 4]), jnp.array([9.0, 3, 5, 4]))
    after, slots = note(full, jnp.array([2, 7, 6]), jnp.array([0.5, 8, 1]))
    assert after.ids.tolist() == [2, 6, 7, 0] and slots.tolist() == [
        0,
        2,
        1,
    ]  # 4 is the worst, the own model aside
    assert np.isinf(after.tracked[2]) and after.last[2] == 8
    after, slots = note(full, jnp.array([2, 4, 7]), jnp.array([0.5, 1, 8]))
    assert after.ids.tolist() == [2, 6, 4, 7] and slots.tolist() == [
        0,
        2,
        3,
    ]  # 4 is held now, so 0 leaves
    after, slots = note(full, jnp.array([2, 7, 5, 1]), jnp.array([0.5, 8, 9, 1]))
    assert sorted(after.ids.tolist()) == [1, 2, 5, 7] and after.ids[0] == 2
    np.testing.assert_array_equal(after.ids[slots], [2, 7, 5, 1])
