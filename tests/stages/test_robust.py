"""Robust aggregators against NumPy, and in rounds of methods that average."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.cluster
import scipy.optimize
import sklearn.cluster
import toys

from pfljax.contract.errors import ArgumentError
from pfljax.exchange.plan import make_plan
from pfljax.stages import robust
from pfljax.stages.server import Server

SIZES = (2, 5, 1, 3, 4, 0, 6)
RULES = typing.get_args(robust.Aggregator)[1:]  # without the mean
RULES = [rule for rule in RULES if rule != "fltrust"]  # which has a root: test_roots


def stacked(seed, num=7):
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(num, 3)), "b": rng.normal(size=(num, 2, 2))}


def flat(models):
    return np.concatenate([np.reshape(leaf, (len(leaf), -1)) for leaf in jax.tree.leaves(models)], axis=1)


def lengths(rows):
    return np.linalg.norm(rows, axis=1)


def scores_of(rows, cut):
    """Krum's: the sum of squared distances to the n - f - 2 nearest others, at least to one."""
    distances = ((rows[:, None] - rows[None]) ** 2).sum(axis=2)
    near = max(len(rows) - cut - 2, 1)
    return [np.sort(np.delete(row, k))[:near].sum() for k, row in enumerate(distances)]


def by_numpy(rule, models, weight, share):
    """The rule in float64, over the models that count."""
    rows, weight = flat(models)[weight > 0], weight[weight > 0]
    num, cut = len(rows), int(np.floor(share * len(rows) + 1e-9))
    if rule == "median":
        return np.median(rows, axis=0)
    if rule == "trimmed_mean":
        return np.sort(rows, axis=0)[cut : num - cut].mean(axis=0)
    if rule in ("krum", "multi_krum"):
        best = np.argsort(scores_of(rows, cut))
        return rows[best[0]] if rule == "krum" else rows[best[: num - cut]].mean(axis=0)
    if rule == "bulyan":
        left, chosen = list(range(num)), []
        for _ in range(num - 2 * cut):
            chosen.append(left.pop(int(np.argmin(scores_of(rows[left], cut)))))
        among = rows[chosen]
        order = np.argsort(np.abs(among - np.median(among, axis=0)), axis=0)
        return np.take_along_axis(among, order[: num - 4 * cut], axis=0).mean(axis=0)
    clip = lambda apart: apart * np.minimum(1, np.median(lengths(apart)) / lengths(apart))[:, None]
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
        options = {"min_cluster_size": num // 2 + 1, "min_samples": 1, "allow_single_cluster": True, "copy": True}
        chosen = sklearn.cluster.HDBSCAN(metric="precomputed", **options).fit(apart).labels_ == 0
        return clip(rows)[chosen].mean(axis=0)
    if rule == "sign_majority":
        return np.median(np.abs(rows).mean(axis=1)) * np.sign(np.sign(rows).sum(axis=0))
    total = lambda center: (weight * np.linalg.norm(rows - center, axis=1)).sum()
    return scipy.optimize.minimize(total, rows.mean(axis=0), method="BFGS", tol=1e-10).x


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("absent", [(), (2,), (0, 5)])
def test_rules_agree_with_numpy(rule, absent):
    models, weight = stacked(seed=len(absent)), np.array(SIZES) + 1.0
    weight[list(absent)] = 0
    share = 0.2 if rule == "bulyan" else 0.3
    found = robust.combine(rule, jax.tree.map(jnp.float32, models), jnp.float32(weight), share)
    expected = by_numpy(rule, models, weight, share)
    found = flat(jax.tree.map(lambda leaf: leaf[None], found))[0]
    np.testing.assert_allclose(found, expected, atol=1e-4 if rule in ("geometric_median", "dnc") else 1e-5)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "norm_clipping"])
def test_what_two_of_nine_send_moves_no_rule_far(rule):
    models, far = stacked(seed=3, num=9), 100.0  # from zero, which is no answer
    spread = np.abs(flat(models)).max()
    models = jax.tree.map(lambda leaf: jnp.float32(leaf + far), models)
    for value in (1e6, -1e6, np.nan):
        attacked = jax.tree.map(lambda leaf, v=value: leaf.at[jnp.array([1, 4])].set(v), models)
        found = flat(jax.tree.map(lambda leaf: leaf[None], robust.combine(rule, attacked, jnp.ones(9), 0.25)))
        assert np.isfinite(found).all() and np.abs(found - far).max() <= 1.5 * spread


@pytest.mark.parametrize("value", [1e5, 1e20, np.inf, np.nan])
def test_krum_chooses_among_honest_models_however_far_attackers_are(value):
    """The same one, since an attacker is no honest model's neighbor."""
    rows = np.random.default_rng(4).normal(size=(9, 50))
    rows[[0, 4]] = 1e3
    expected = by_numpy("krum", {"a": rows}, np.ones(9), 0.25)
    rows[[0, 4]] = value
    found = robust.combine("krum", {"a": jnp.float32(rows)}, jnp.ones(9), 0.25)["a"]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_the_geometric_median_leaves_out_models_that_are_not_finite(value):
    models, weight = jax.tree.map(jnp.float32, stacked(seed=5)), jnp.arange(1.0, 8.0)
    broken = models | {"a": models["a"].at[2, 0].set(value)}
    found = robust.combine("geometric_median", broken, weight, 0.2)
    toys.assert_trees_close(found, robust.combine("geometric_median", models, weight.at[2].set(0), 0.2), rtol=1e-6)


def test_clipped_updates_are_no_longer_than_the_median_one():
    rows = np.random.default_rng(8).normal(size=(9, 4))
    rows[:2] *= 1e6
    found = robust.combine("norm_clipping", {"a": jnp.float32(rows)}, jnp.ones(9), 0.2)["a"]
    assert np.linalg.norm(found) <= np.median(lengths(rows))


def test_the_geometric_median_converges_among_many_far_attackers():
    """The sum of unit vectors toward all updates, weighted, is zero there."""
    rng, attackers = np.random.default_rng(6), 9
    rows = np.concatenate([rng.normal(size=(11, 5)), np.full((attackers, 5), 1e6) + rng.normal(size=(attackers, 5))])
    found = np.float64(robust.combine("geometric_median", {"a": jnp.float32(rows)}, jnp.ones(20), 0.45)["a"])
    toward = (rows - found) / lengths(rows - found)[:, None]
    np.testing.assert_allclose(toward.sum(axis=0), 0, atol=1e-2)
    assert np.linalg.norm(found - rows[:11].mean(axis=0)) < 5


@pytest.mark.parametrize(("rule", "share", "least"), [("krum", 0.4, 7), ("multi_krum", 0.4, 7), ("bulyan", 0.4, 11)])
def test_rules_that_need_more_clients_say_so(rule, share, least):
    """Krum needs n > 2 f + 2, Bulyan n >= 4 f + 3; f is 2 of 5."""
    problem = toys.make_problem(toys.make_federation((3,) * 5), optax.sgd(0.1))
    with pytest.raises(ArgumentError, match=f"^trim={share}: needs at least {least} clients a round, of whom 2 may"):
        Server(aggregator=rule, trim=share).of(problem, toys.make_algorithm("fedavg", problem))


def problem_of(plan=None, **options):
    federation = toys.make_federation(SIZES, "regression")
    return federation, toys.make_problem(federation, optax.sgd(0.1), plan=plan, **options)


@pytest.mark.parametrize("plan", [("map", 0, 1), ("chunk", 2, 2)])
def test_a_round_with_the_median_is_the_median_of_what_clients_send(plan):
    federation, problem = problem_of(make_plan(*plan))
    clients = federation.client_data
    plain = toys.make_algorithm("fedavg", problem)
    served = Server(aggregator="median").of(problem, plain)
    one = toys.make_algorithm("local", problem)
    states, records = toys.train(served, problem, clients, 1)
    means, mean_records = toys.train(plain, problem, clients, 1)
    # Local from the global model is what each client sends.
    start = jax.tree.map(lambda leaf: np.repeat(leaf, len(SIZES), axis=0), jax.device_get(states[0].models))
    own, _ = toys.train(
        one, problem, clients, 1, state=jax.device_get(toys.start(one, problem, clients))._replace(models=start)
    )
    trained = jax.tree.map(lambda leaf: np.asarray(leaf)[np.array(SIZES) > 0], own[1].models)
    expected = jax.tree.map(lambda leaf: np.median(leaf, axis=0, keepdims=True), trained)
    toys.assert_trees_close(states[1].models, expected, rtol=1e-5, atol=1e-6)
    assert not toys.same_trees(states[1].models, means[1].models)
    assert records[0].up - mean_records[0].up == 4 * 4 + 4  # the client without examples sends its model, too
    assert records[0].down == mean_records[0].down


def test_only_methods_that_average_take_another_aggregator():
    _, problem = problem_of()
    method = toys.make_algorithm("federico", problem)
    with pytest.raises(ArgumentError, match="aggregator=median: accepted for this method: mean"):
        Server(aggregator="median").of(problem, method)
    assert Server().of(problem, method) is method
    for wrong in ({"sampler": "random"}, {"aggregator": "mode"}, {"trim": 0.5}):
        with pytest.raises(ArgumentError, match="accepted: "):
            Server(**wrong)


def test_a_cohort_without_examples_leaves_the_model_as_it_is():
    federation = toys.make_federation((2, 2, 2), "regression")
    problem, clients = toys.make_problem(federation, optax.sgd(0.1)), federation.client_data
    clients = clients._replace(train=clients.train._replace(size=np.zeros(3, np.int32)))
    for rule in ("median", "geometric_median", "centered_clipping"):
        served = Server(aggregator=rule).of(problem, toys.make_algorithm("fedavg", problem))
        states, _ = toys.train(served, problem, clients, 1)
        toys.assert_trees_close(states[1].models, states[0].models)


def test_the_server_is_a_value():
    assert Server() == Server() and dataclasses.replace(Server(), candidates=0) == Server("uniform")


@pytest.mark.parametrize("seed", range(3))
def test_flame_keeps_the_first_cluster_of_more_than_half(seed):
    """The smallest part of SciPy's tree of single linkage that has more than half of the updates, of any length."""
    rng = np.random.default_rng(seed)
    num = 8 + seed
    rows = np.repeat([[1.0, 0, 0, 0], [0, 1.0, 0, 0]], [6, num - 6], axis=0) + 0.3 * rng.normal(size=(num, 4))
    rows *= rng.uniform(0.1, 10, size=(num, 1))
    joins = scipy.cluster.hierarchy.linkage(rows, "single", "cosine")
    parts = {k: {k} for k in range(num)}
    for number, (a, b, *_) in enumerate(joins):
        parts[num + number] = parts[int(a)] | parts[int(b)]
    expected = next(part for part in parts.values() if len(part) > num // 2)
    found = robust.majority({"a": jnp.float32(rows)}, jnp.ones(num, bool))
    assert set(np.flatnonzero(found)) == expected and len(expected) < num


def test_a_vote_counts_signs_and_not_sizes():
    rows = jnp.array([[1.0, -2, 0, 1], [3.0, 2, 0, -1], [-900.0, 4, 1, 0], [7.0, 7, 7, 7]])
    found = robust.combine("sign_majority", rows, jnp.array([1.0, 5, 2, 0]), 0.2)
    np.testing.assert_array_equal(found, [1.5, 1.5, 1.5, 0])  # of 1, 1.5 and 226.25
