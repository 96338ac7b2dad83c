"""What colluding attackers send, against NumPy, and in rounds."""

import jax
import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import toys
from quadratics import OPTIMIZER, descend, vectors
from staged import staged

from pfljax.contract.errors import ArgumentError
from pfljax.stages.attacks import Attack
from pfljax.stages.collusion import colluded, quantile
from pfljax.stages.server import Server

SIZES = (3, 5, 2, 4, 6, 3, 4, 5, 1)
ATTACKERS = np.isin(np.arange(9), (1, 4))
ABSENT = 6
COLLUDED = jax.jit(colluded, static_argnums=0)
RULES = ("median", "multi_krum", "dnc")


def by_numpy(kind, rows, honest, counts):
    """What attackers send, in float64; gamma by bisection, as in the paper."""
    seen = rows[honest]
    mean = seen.mean(axis=0)
    deviation = seen.std(axis=0)
    if kind == "ipm":
        return -4.0 * mean
    if kind == "alie":
        return mean - 1.5 * deviation
    if kind == "alie by formula":
        num = counts.sum()
        attackers = (counts & ATTACKERS).sum()
        needed = num // 2 + 1 - attackers
        return (
            mean - scipy.stats.norm.ppf((num - attackers - needed) / (num - attackers)) * deviation
        )
    squares = ((seen[:, None] - seen[None]) ** 2).sum(axis=2)

    def of(gamma):
        return ((mean - gamma * deviation - seen) ** 2).sum(axis=1)

    if kind == "min_max":

        def over(gamma):
            return of(gamma).max() - squares.max()
    else:

        def over(gamma):
            return of(gamma).sum() - squares.sum(axis=1).max()

    return mean - scipy.optimize.brentq(over, 0, 100) * deviation


@pytest.mark.parametrize("kind", ["alie", "alie by formula", "ipm", "min_max", "min_sum"])
def test_what_they_send(kind):
    rng = np.random.default_rng(0)
    updates = {"a": rng.normal(1.0, 1.0, size=(9, 3)), "b": rng.normal(-1.0, 2.0, size=(9, 2, 2))}
    counts = np.arange(9) != ABSENT
    attack = Attack("alie", z=0.0) if "formula" in kind else Attack(kind)
    found = COLLUDED(
        attack.kind, attack.factor, jax.tree.map(np.float32, updates), counts, ATTACKERS
    )

    def flat(tree):
        return np.concatenate(
            [np.float64(leaf).reshape(9, -1) for leaf in jax.tree.leaves(tree)], axis=1
        )

    rows = flat(updates)
    found = flat(found)
    expected = by_numpy(kind, rows, counts & ~ATTACKERS, counts)
    np.testing.assert_allclose(found[ATTACKERS], np.stack([expected] * 2), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[~ATTACKERS], rows[~ATTACKERS], rtol=1e-6)


@pytest.mark.parametrize(
    ("num", "attackers", "z"), [(10, 2, 0.0), (20, 4, 0.15731), (50, 12, 0.33604)]
)
def test_the_formula_of_alie_has_these_z(num, attackers, z):
    """ALIE is almost no attack at 20 % attackers: z = 0.000 for 10 clients with 2, 0.157 for 20 with 4."""
    needed = num // 2 + 1 - attackers
    assert scipy.stats.norm.ppf((num - attackers - needed) / (num - attackers)) == pytest.approx(
        z, abs=2e-5
    )
    assert float(quantile(np.int32(num), np.int32(attackers))) == pytest.approx(z, abs=2e-5)


def test_without_honest_clients_there_is_nothing_to_follow():
    updates = np.float32(np.random.default_rng(1).normal(size=(9, 3)))
    found = COLLUDED("ipm", 4.0, updates, np.ones(9, bool), np.ones(9, bool))
    np.testing.assert_array_equal(found, updates)


@pytest.mark.parametrize("rule", ["median", pytest.param("mean", marks=pytest.mark.slow)])
def test_a_round_with_colluders_is_the_rule_of_what_they_and_others_send(rule):
    """With ipm of strength s, attackers send -s times the mean of the honest updates."""
    federation = toys.make_federation((3,) * 5, "regression")
    problem = toys.make_problem(federation, OPTIMIZER)
    attacker = np.arange(5) < 2
    attack = Attack("ipm", attackers=0.4, strength=2.0)
    method = toys.make_algorithm("fedavg", problem)
    attacked = staged(problem, method, federation, attack=attack, server=Server(aggregator=rule))
    before, after = toys.train(
        attacked, problem, federation.client_data._replace(attacker=attacker), 1
    )[0]
    theta = vectors(before.models)[0]
    updates = np.array([descend(federation, k, theta, 1) - theta for k in range(5)])
    updates[attacker] = -2.0 * updates[~attacker].mean(axis=0)
    combine = {"median": np.median, "mean": np.mean}[rule]
    np.testing.assert_allclose(
        vectors(after.models)[0], theta + combine(updates, axis=0), rtol=1e-4, atol=1e-5
    )


def test_colluders_move_each_of_several_models():
    """With ipm of strength s, FedEM's mean updates are (1 - p) m - p s m, for attackers' share p of the examples."""
    federation = toys.make_federation((3,) * 5, "regression")
    attacker = np.array([True, False, False, False, False])
    problem = toys.make_problem(federation, OPTIMIZER)
    clients = federation.client_data
    attack = Attack("ipm", attackers=0.2, strength=2.0)
    method = staged(problem, toys.make_algorithm("fedem", problem), federation, attack=attack)

    def play(clients):
        return toys.train(method, problem, clients, 1)[0]

    before, after = play(clients._replace(attacker=attacker))
    # The honest clients alone: the attacker has no examples.
    alone = clients.train._replace(size=np.where(attacker, 0, clients.train.size))
    honest = play(clients._replace(train=alone, attacker=np.zeros(5, bool)))[1]
    expected = jax.tree.map(
        lambda old, new: old + (new - old) * (0.8 - 0.2 * 2.0), before.models, honest.models
    )
    toys.assert_trees_close(after.models, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["federico", "local", "fedfomo"])
def test_methods_without_a_mean_refuse_colluders(name):
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, OPTIMIZER)
    method = toys.make_algorithm(name, problem)
    with pytest.raises(
        ArgumentError,
        match=r"^attack=alie: accepted for this method: none, or one without collusion",
    ):
        staged(problem, method, federation, attack=Attack("alie"))


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, marks=pytest.mark.slow if rule == "dnc" else pytest.mark.long)
        for rule in RULES
    ],
)
def test_rules_hold_against_colluders_where_the_mean_does_not(rule):
    """Two of nine clients pull the mean to where the honest ones do not go."""
    federation = toys.make_federation((6,) * 9, "regression")
    problem = toys.make_problem(federation, OPTIMIZER)
    clients = federation.client_data._replace(attacker=ATTACKERS)
    plain = toys.make_algorithm("fedavg", problem)
    attack = Attack("ipm", attackers=0.2, strength=50.0)

    def moved(server):
        attacked = staged(problem, plain, federation, attack=attack, server=server)
        before, after = toys.train(attacked, problem, clients, 1)[0]
        return np.float64(
            after.models["Dense_0"]["kernel"] - before.models["Dense_0"]["kernel"]
        ).ravel()

    alone = clients.train._replace(size=np.where(ATTACKERS, 0, clients.train.size))
    states = toys.train(plain, problem, clients._replace(train=alone), 1)[0]
    honest = np.float64(
        states[1].models["Dense_0"]["kernel"] - states[0].models["Dense_0"]["kernel"]
    ).ravel()
    trim = {} if rule == "median" else {"trim": 0.23}
    assert moved(Server()) @ honest < 0 < moved(Server(aggregator=rule, **trim)) @ honest


def test_the_formula_of_almost_half_the_clients():
    """49 of 100: two of the 51 honest clients are needed, so all but 49 of 51 are farther from the mean."""
    assert float(quantile(np.int32(100), np.int32(49))) == pytest.approx(
        scipy.stats.norm.ppf(49 / 51), rel=1e-4
    )
