"""FedBuff by hand on quadratics with given delays, and the distribution of delays."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from by_hand import by_hand
from quadratics import OPTIMIZER, SIZES, descend, vectors
from staged import staged

from pfljax.contract.types import Cohort, State
from pfljax.exchange import lifting
from pfljax.stages.server import Server

EMPTY = (2, 0, 5, 1, 3)
LATE = np.array(
    [[0, 0, 0, 0, 0], [1, 1, 0, 1, 0], [2, 0, 1, 0, 2], [2, 2, 2, 1, 0], [0, 1, 2, 2, 2]]
)


def fedbuff(mean, discount, server_rate):
    """The server adds the mean of updates from models of some rounds before, discounted by their age."""

    def reference(rounds):
        weights = np.float64(rounds.sizes if mean == "weighted" else rounds.sizes > 0)
        models = [rounds.start("models")[0]]
        for number in rounds:
            late = LATE[number]
            step = np.zeros(4)
            for k in np.flatnonzero(weights):
                start = models[number - late[k]]
                update = (rounds.descend(k, start) - start) / (1 + late[k]) ** discount
                step += weights[k] / weights.sum() * update
            models.append(models[-1] + server_rate * step)
            expected = {"models": stack(models), "record.metrics.staleness": late.mean()}
            if mean == "weighted":  # predictions do not depend on it
                expected["predictions"] = np.tile(models[-1], (5, 1, 1))
            yield expected

    return reference


def stack(models):
    """What the server keeps: the newest models, the initial one in place of those before it."""
    return [models[max(len(models) - 1 - age, 0)] for age in range(3)]


@pytest.mark.parametrize(
    ("mean", "discount", "server_rate"),
    [("weighted", 0.5, 0.7), pytest.param("uniform", 0.0, 1.0, marks=pytest.mark.slow)],
)
def test_by_hand(mean, discount, server_rate):
    hyperparameters = {
        "max_staleness": 2,
        "discount": discount,
        "server_learning_rate": server_rate,
        "mean": mean,
    }
    reference = fedbuff(mean, discount, server_rate)
    by_hand(
        "fedbuff",
        reference,
        rounds=len(LATE),
        sizes=EMPTY,
        hyperparameters=hyperparameters,
        script=LATE[..., None],
    )


PROBLEM = toys.make_problem(toys.make_federation(SIZES, "regression"))


@functools.cache
def drawer(**hyperparameters):
    """(keys, number of rounds played) -> delays (number of keys, S, 1)."""
    algorithm = toys.make_algorithm("fedbuff", PROBLEM, **hyperparameters)
    cohort = Cohort(jnp.arange(20, dtype=jnp.int32))

    def draw(keys, played):
        state = State(round=played)
        return jax.vmap(lambda key: lifting.download(algorithm, PROBLEM.plan, key, state, cohort))(
            keys
        )

    return jax.jit(draw)


def drawn(played=100, **hyperparameters):
    """Delays (rounds, S) of many rounds."""
    keys = jax.random.split(jax.random.key(3), 500)
    return np.asarray(drawer(**hyperparameters)(keys, np.int32(played)))[..., 0]


def test_uniform_delays_are_as_likely_by_each_number():
    shares = (
        np.bincount(drawn(max_staleness=5, staleness=4.0, delays="uniform").ravel(), minlength=6)
        / 10000
    )
    np.testing.assert_allclose(shares, 1 / 6, atol=0.02)  # standard error 0.004


def test_half_normal_delays_have_their_distribution():
    late = drawn(max_staleness=5, staleness=4.0, delays="half_normal")
    mean = 4.0

    def below(x):
        """The share below x of a half-normal with that mean."""
        return math.erf(x / (mean * math.sqrt(math.pi)))

    edges = [0, *(below(s + 0.5) for s in range(5)), 1]
    np.testing.assert_allclose(
        np.bincount(late.ravel(), minlength=6) / 10000, np.diff(edges), atol=0.02
    )
    # Before clipping, the mean is the hyperparameter's value.
    assert drawn(max_staleness=50, staleness=3.0).mean() == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize("delays", ["half_normal", "uniform"])
@pytest.mark.parametrize("played", [0, 1, 3])
def test_nobody_is_later_than_the_rounds_played(delays, played):
    late = drawn(played, max_staleness=5, staleness=4.0, delays=delays)
    assert late.dtype == np.int32 and late.min() == 0 and late.max() == played


def test_nobody_is_late_without_staleness():
    assert not drawn(staleness=0.0).any()


def test_batch_statistics_are_means_of_the_buffer():
    federation = toys.make_federation(SIZES, "regression")
    late = np.array([[0] * 4, [0] * 4, [2, 1, 0, 2]])
    hyperparameters = {"max_staleness": 2, "server_learning_rate": 0.5}
    options = {"model": toys.Normalized, "epochs": 2}
    states = toys.play(
        "fedbuff", federation, 3, OPTIMIZER, hyperparameters, late[..., None], **options
    ).states
    expected = np.zeros((2, 3))
    for k, size in enumerate(SIZES):
        x = np.float64(federation.train.x[k, :size])
        start = states[2].models["batch_stats"]["BatchNorm_0"]
        for name, seen, row in (("mean", x.mean(axis=0), 0), ("var", x.var(axis=0), 1)):
            moved = np.float64(start[name][late[2, k]])
            for _ in range(2):
                moved = 0.7 * moved + 0.3 * seen
            expected[row] += size / sum(SIZES) * moved
    found = states[3].models["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose([found["mean"][0], found["var"][0]], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "by_numpy"),
    [("median", np.median), pytest.param("trimmed_mean", np.mean, marks=pytest.mark.slow)],
    ids=["median", "trimmed_mean"],
)
def test_a_robust_rule_combines_the_buffers_updates_whatever_their_age(rule, by_numpy):
    federation = toys.make_federation(EMPTY, "regression")
    problem = toys.make_problem(federation, OPTIMIZER, epochs=2)
    method = toys.scripted(
        toys.make_algorithm("fedbuff", problem, max_staleness=2, server_learning_rate=0.7),
        LATE[..., None],
    )
    server = Server(aggregator=rule, **({"trim": 0.0} if rule == "trimmed_mean" else {}))
    served = staged(problem, method, federation, server=server)
    states, _ = toys.train(served, problem, federation.client_data, len(LATE))
    models = [vectors(states[0].models)[0]]
    for number, late in enumerate(LATE):
        sent = []
        for k in np.flatnonzero(EMPTY):
            start = models[number - late[k]]
            sent.append((descend(federation, k, start, 2) - start) / (1 + late[k]) ** 0.5)
        models.append(models[-1] + 0.7 * by_numpy(np.stack(sent), axis=0))
        np.testing.assert_allclose(
            vectors(states[number + 1].models), stack(models), rtol=1e-4, atol=1e-5
        )
