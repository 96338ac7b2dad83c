"""Robust aggregators against NumPy, and a round of a method that averages."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.cluster
import scipy.optimize
import sklearn.cluster
import toys
from quadratics import OPTIMIZER, descend, vectors
from staged import staged

from pfljax.contract.errors import ArgumentError
from pfljax.exchange.plan import make_plan
from pfljax.stages import robust
from pfljax.stages.server import Server

SIZES = (2, 5, 1, 3, 4, 0, 6)
RULES = typing.get_args(robust.Aggregator)[1:]  # without the mean
RULES = [rule for rule in RULES if rule != "fltrust"]  # which has a root: test_roots
NUM = 9  # updates in all tests of rules, which thus share what they compile
WEIGHT = np.array([3.0, 6, 2, 4, 5, 1, 7, 2, 4])

combine = jax.jit(robust.combine, static_argnums=0)
majority = jax.jit(robust.majority)


def stacked(seed):
    """Nine updates of seven entries."""
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(NUM, 3)), "b": rng.normal(size=(NUM, 2, 2))}


def as_updates(rows):
    """Rows (9, 7) as updates."""
    rows = np.float32(rows)
    return {"a": rows[:, :3], "b": rows[:, 3:].reshape(NUM, 2, 2)}


def one(update):
    """The entries (7,) of an update."""
    return flat(jax.tree.map(lambda leaf: np.float64(leaf)[None], update))[0]


def flat(models):
    return np.concatenate(
        [np.reshape(leaf, (len(leaf), -1)) for leaf in jax.tree.leaves(models)], axis=1
    )


def lengths(rows):
    return np.linalg.norm(rows, axis=1)


def scores_of(rows, cut):
    """Krum's: the sum of squared distances to the n - f - 2 nearest others, at least to one."""
    distances = ((rows[:, None] - rows[None]) ** 2).sum(axis=2)
    near = max(len(rows) - cut - 2, 1)
    return [np.sort(np.delete(row, k))[:near].sum() for k, row in enumerate(distances)]


def by_numpy(rule, models, weight, share):
    """The rule in float64, over the models that count."""
    rows = flat(models)[weight > 0]
    weight = weight[weight > 0]
    num = len(rows)
    cut = int(np.floor(share * len(rows) + 1e-9))
    if rule == "median":
        return np.median(rows, axis=0)
    if rule == "trimmed_mean":
        return np.sort(rows, axis=0)[cut : num - cut].mean(axis=0)
    if rule in ("krum", "multi_krum"):
        best = np.argsort(scores_of(rows, cut))
        return rows[best[0]] if rule == "krum" else rows[best[: num - cut]].mean(axis=0)
    if rule == "bulyan":
        left = list(range(num))
        chosen = []
        for _ in range(num - 2 * cut):
            chosen.append(left.pop(int(np.argmin(scores_of(rows[left], cut)))))
        among = rows[chosen]
        order = np.argsort(np.abs(among - np.median(among, axis=0)), axis=0)
        return np.take_along_axis(among, order[: num - 4 * cut], axis=0).mean(axis=0)

    def clip(apart):
        return apart * np.minimum(1, np.median(lengths(apart)) / lengths(apart))[:, None]

    if rule == "norm_clipping":
        return np.average(clip(rows), axis=0, weights=weight)
    if rule == "centered_clipping":
        center = np.median(rows, axis=0)
        for _ in range(robust.CLIPPING_STEPS):
            center = center + clip(rows - center).mean(axis=0)
        return center
    if rule == "dnc":
        apart = rows - rows.mean(axis=0)
        outlying = (apart @ np.linalg.svd(apart)[2][0]) ** 2
        return rows[np.argsort(outlying)[: num - cut]].mean(axis=0)
    if rule == "flame":
        unit = rows / lengths(rows)[:, None]
        apart = np.maximum(1 - unit @ unit.T, 0)
        np.fill_diagonal(apart, 0)
        options = {
            "min_cluster_size": num // 2 + 1,
            "min_samples": 1,
            "allow_single_cluster": True,
            "copy": True,
        }
        chosen = sklearn.cluster.HDBSCAN(metric="precomputed", **options).fit(apart).labels_ == 0
        return clip(rows)[chosen].mean(axis=0)
    if rule == "sign_majority":
        return np.median(np.abs(rows).mean(axis=1)) * np.sign(np.sign(rows).sum(axis=0))

    def total(center):
        return (weight * np.linalg.norm(rows - center, axis=1)).sum()

    return scipy.optimize.minimize(total, rows.mean(axis=0), method="BFGS", tol=1e-10).x


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("absent", [(), (2,), (0, 5)])
def test_rules_agree_with_numpy(rule, absent):
    models = stacked(seed=len(absent))
    weight = WEIGHT.copy()
    weight[list(absent)] = 0
    share = 0.2 if rule == "bulyan" else 0.33  # of nine, just less than three
    found = combine(rule, jax.tree.map(np.float32, models), np.float32(weight), share)
    expected = by_numpy(rule, models, weight, share)
    np.testing.assert_allclose(
        one(found), expected, atol=1e-4 if rule in ("geometric_median", "dnc") else 1e-5
    )


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_cohort_has_zeros(rule):
    found = combine(rule, jax.tree.map(np.float32, stacked(seed=1)), np.zeros(NUM, np.float32), 0.2)
    np.testing.assert_array_equal(one(found), 0)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "norm_clipping"])
def test_what_two_of_nine_send_moves_no_rule_far(rule):
    far = 100.0  # from zero, which is no answer
    models = stacked(seed=3)
    spread = np.abs(flat(models)).max()
    for value in (1e6, -1e6, np.nan):
        rows = flat(models) + far
        rows[[1, 4]] = value
        found = one(combine(rule, as_updates(rows), np.ones(NUM, np.float32), 0.25))
        assert np.isfinite(found).all() and np.abs(found - far).max() <= 1.5 * spread


@pytest.mark.parametrize("rule", ["flame", "sign_majority"])
@pytest.mark.parametrize("value", [0.0, 1e20, 1e38, np.inf, np.nan])
def test_rules_of_directions_do_not_fail_for_sizes(rule, value):
    rows = np.random.default_rng(0).normal(1.0, 0.3, size=(NUM, 7))
    rows[4] = value
    found = one(combine(rule, as_updates(rows), np.ones(NUM, np.float32), 0.2))
    assert (np.abs(found) < 2).all() and (found > 0).all()


@pytest.mark.parametrize("value", [1e5, 1e20, np.inf, np.nan])
def test_krum_chooses_among_honest_models_however_far_attackers_are(value):
    """The same one, since an attacker is no honest model's neighbor."""
    rows = np.random.default_rng(4).normal(size=(NUM, 7))
    rows[[0, 4]] = 1e3
    expected = by_numpy("krum", {"a": rows}, np.ones(NUM), 0.25)
    rows[[0, 4]] = value
    found = combine("krum", as_updates(rows), np.ones(NUM, np.float32), 0.25)
    np.testing.assert_allclose(one(found), expected, rtol=1e-6)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_the_geometric_median_leaves_out_models_that_are_not_finite(value):
    models = jax.tree.map(np.float32, stacked(seed=5))
    broken = {"a": models["a"].copy(), "b": models["b"]}
    broken["a"][2, 0] = value
    without = np.where(np.arange(NUM) == 2, 0, WEIGHT)
    found = combine("geometric_median", broken, np.float32(WEIGHT), 0.2)
    toys.assert_trees_close(
        found, combine("geometric_median", models, np.float32(without), 0.2), rtol=1e-6
    )


def test_clipped_updates_are_no_longer_than_the_median_one():
    rows = np.random.default_rng(8).normal(size=(NUM, 7))
    rows[:2] *= 1e6
    found = combine("norm_clipping", as_updates(rows), np.ones(NUM, np.float32), 0.2)
    assert np.linalg.norm(one(found)) <= np.median(lengths(rows))


def test_the_geometric_median_converges_among_many_far_attackers():
    """The sum of unit vectors toward all updates, weighted, is zero there."""
    rows = np.random.default_rng(6).normal(size=(NUM, 7))
    rows[5:] += 1e6  # four of nine
    found = one(combine("geometric_median", as_updates(rows), np.ones(NUM, np.float32), 0.45))
    toward = (rows - found) / lengths(rows - found)[:, None]
    np.testing.assert_allclose(toward.sum(axis=0), 0, atol=1e-2)
    assert np.linalg.norm(found - rows[:5].mean(axis=0)) < 5


@pytest.mark.parametrize(
    ("rule", "share", "least"), [("krum", 0.4, 7), ("multi_krum", 0.4, 7), ("bulyan", 0.4, 11)]
)
def test_rules_that_need_more_clients_say_so(rule, share, least):
    """Krum needs n > 2 f + 2, Bulyan n >= 4 f + 3; f is 2 of 5."""
    federation = toys.make_federation((3,) * 5)
    problem = toys.make_problem(federation)
    with pytest.raises(
        ArgumentError, match=f"^trim={share}: needs at least {least} clients a round, of whom 2 may"
    ):
        server = Server(aggregator=rule, trim=share)
        staged(problem, toys.make_algorithm("fedavg", problem), federation, server=server)


@pytest.mark.parametrize(
    ("share", "num", "assumed"), [(0.3, 3, 0), (0.29, 100, 29), (0.33, 10, 3), (0.395, 10, 3)]
)
def test_the_number_of_attackers_is_rounded_down(share, num, assumed):
    """0.29 times 100 is a little less than 29 in floating-point numbers."""
    assert robust.check_number("trimmed_mean", share, num) == assumed
    report = f"trimmed_mean, {assumed or 'none'} of {num} clients assumed to attack"
    assert Server(aggregator="trimmed_mean", trim=share).described(num) == report


def test_a_round_with_the_median_is_the_median_of_what_clients_send():
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, OPTIMIZER, plan=make_plan("chunk", 2, 2))
    clients = federation.client_data
    method = toys.make_algorithm("fedavg", problem)
    served = staged(problem, method, federation, server=Server(aggregator="median"))
    states, records = toys.train(served, problem, clients, 1)

    theta = vectors(states[0].models)[0]
    trained = [descend(federation, k, theta, 1) for k, size in enumerate(SIZES) if size]
    expected = np.median(trained, axis=0)
    np.testing.assert_allclose(vectors(states[1].models)[0], expected, rtol=1e-5, atol=1e-6)
    assert (
        np.abs(
            expected - np.average(trained, axis=0, weights=[size for size in SIZES if size])
        ).max()
        > 1e-3
    )
    # Models of four numbers, up with a weight; the client without examples sends its model, too.
    assert (records[0].down, records[0].up) == (7 * 16, 6 * (16 + 4) + 16 + 4)

    # A cohort without examples leaves the model as it is.
    nobody = clients._replace(train=clients.train._replace(size=np.zeros(len(SIZES), np.int32)))
    before, after = toys.train(served, problem, nobody, 1)[0]
    toys.assert_trees_close(after.models, before.models)


def test_only_methods_that_average_take_another_aggregator():
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation)
    method = toys.make_algorithm("federico", problem)
    with pytest.raises(ArgumentError, match="aggregator=median: accepted for this method: mean"):
        staged(problem, method, federation, server=Server(aggregator="median"))
    for wrong in ({"sampler": "random"}, {"aggregator": "mode"}, {"trim": 0.5}):
        with pytest.raises(ArgumentError, match="accepted: "):
            Server(**wrong)


def test_the_server_is_a_value():
    assert Server() == Server() and dataclasses.replace(Server(), candidates=0) == Server("uniform")


@pytest.mark.parametrize("num", [7, 8, 9])
def test_flame_keeps_the_first_cluster_of_more_than_half(num):
    """The smallest part of SciPy's tree of single linkage that has more than half of the updates, of any length."""
    rng = np.random.default_rng(num)
    rows = np.zeros((NUM, 7))  # of which only the first ones count
    rows[:5, 0] = 1.0
    rows[5:num, 1] = 1.0
    rows[:, :4] += 0.3 * rng.normal(size=(NUM, 4))
    rows *= rng.uniform(0.1, 10, size=(NUM, 1))
    joins = scipy.cluster.hierarchy.linkage(rows[:num], "single", "cosine")
    parts = {k: {k} for k in range(num)}
    for number, (a, b, *_) in enumerate(joins):
        parts[num + number] = parts[int(a)] | parts[int(b)]
    expected = next(part for part in parts.values() if len(part) > num // 2)
    found = majority(as_updates(rows), np.arange(NUM) < num)
    assert set(np.flatnonzero(found)) == expected and len(expected) < num


def test_a_vote_counts_signs_and_not_sizes():
    rows = jnp.array([[1.0, -2, 0, 1], [3.0, 2, 0, -1], [-900.0, 4, 1, 0], [7.0, 7, 7, 7]])
    found = combine("sign_majority", rows, jnp.array([1.0, 5, 2, 0]), 0.2)
    np.testing.assert_array_equal(found, [1.5, 1.5, 1.5, 0])  # of 1, 1.5 and 226.25
