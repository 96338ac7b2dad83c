"""FedeRiCo against its equations, worked out in NumPy: three clients, a linear regression, SGD, two rounds."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
import toys

from pfljax.algorithms import FedeRiCo, FedeRiCoCentralized
from pfljax.contract.errors import ArgumentError

K, RATE, BETA = 3, 0.05, 0.6
SIZES = np.array([2, 4, 3])


@pytest.fixture(scope="module")
def federation():
    return toys.make_federation(SIZES, "regression", features=2, seed=3)


def play(method, federation):
    """The state after 0, 1 and 2 rounds, and the records of both rounds; the clients' own models differ."""
    problem = toys.make_problem(federation, optax.sgd(RATE))
    algorithm = method.build(problem)
    return problem, algorithm, *toys.train(algorithm, problem, federation.client_data, 2)


def parameters(state):
    """Weights (K, 2) and intercepts (K,) as float64."""
    layer = state.models["Dense_0"]
    return np.asarray(layer["kernel"], np.float64)[:, :, 0], np.asarray(layer["bias"], np.float64)[:, 0]


def losses_and_gradients(weights, bias, federation):
    """l_ij, the squared errors of model j summed over client i's data, and the gradients of their means."""
    x, y = federation.train.x, federation.train.y
    losses, dw, db = np.zeros((K, K)), np.zeros((K, K, 2)), np.zeros((K, K))
    for i in range(K):
        for j in range(K):
            xs, ys = x[i, : SIZES[i]].astype(np.float64), y[i, : SIZES[i]]
            error = xs @ weights[j] + bias[j] - ys
            losses[i, j] = (error**2).sum()
            dw[i, j] = 2 * error @ xs / SIZES[i]
            db[i, j] = 2 * error.mean()
    return losses, dw, db


def softmax(scores):
    exp = np.exp(scores - scores.max(axis=1, keepdims=True))
    return exp / exp.sum(axis=1, keepdims=True)


def by_id(row, values):
    """A candidate table's values (K, C), ordered by model id."""
    out = np.zeros((K, K))
    out[np.arange(K)[:, None], np.asarray(row.ids)] = np.asarray(values)
    return out


@pytest.mark.parametrize(
    ("tracking", "faithful", "examples", "update"),  # every pair of choices
    [
        ("ema", False, np.inf, "gradient"),
        pytest.param("ema", True, 0, "delta", marks=pytest.mark.slow),
        ("accumulated", False, 2.5, "delta"),
        ("accumulated", True, 0, "gradient"),
        pytest.param("ema", False, 2.5, "gradient", marks=pytest.mark.slow),
    ],
)
def test_algorithm_1(federation, tracking, faithful, examples, update):
    knobs = {"faithful": faithful, "effective_examples": examples, "update": update}
    _, _, states, _ = play(FedeRiCo(neighbors=2, beta=BETA, tracking=tracking, **knobs), federation)
    weights, bias = parameters(states[0])
    tracked = np.zeros((K, K))
    share = np.minimum(examples or np.inf, SIZES)[:, None] / SIZES[:, None]
    owed = SIZES[:, None] / SIZES[None, :]  # line 17 sums over n_i examples; the owner j divides by n_j
    for number in range(2):
        seen, dw, db = losses_and_gradients(weights, bias, federation)
        if tracking == "ema":
            start = number == 0 and not faithful  # the first loss starts the average
            tracked = seen if start else (1 - BETA) * tracked + BETA * seen  # line 14
        else:
            tracked = tracked + seen  # Eq. 24
        # Line 15; all examples count in the first round, in which every client tries two others.
        w = softmax(-tracked * (share if number else 1)) * owed
        weights = weights - RATE * np.einsum("ij,ijd->jd", w, dw)  # lines 17 to 22: the owner j sums over clients i
        bias = bias - RATE * np.einsum("ij,ij->j", w, db)
        table = states[number + 1].clients.table
        np.testing.assert_allclose(by_id(table, table.last), seen, rtol=1e-4)
        np.testing.assert_allclose(by_id(table, table.tracked), tracked, rtol=1e-4)
        got = parameters(states[number + 1])
        np.testing.assert_allclose(got[0], weights, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(got[1], bias, rtol=1e-4, atol=1e-6)


def test_prediction_mixes_by_the_posterior(federation):
    problem, algorithm, states, _ = play(FedeRiCo(neighbors=2), federation)
    used = toys.used(algorithm, problem, jax.random.key(0), states[2], federation.client_data)
    table = states[2].clients.table
    expected = softmax(-by_id(table, table.tracked))
    dense = np.zeros((K, K))
    dense[np.arange(K)[:, None], np.asarray(used["index"])] = np.asarray(used["weights"])
    np.testing.assert_allclose(dense, expected, atol=1e-6)


def test_newcomers_weigh_by_one_e_step(federation):
    problem, algorithm, states, _ = play(FedeRiCo(neighbors=2), federation)
    found = toys.adapt(algorithm, problem, jax.random.key(0), states[2], federation.client_data)
    losses, _, _ = losses_and_gradients(*parameters(states[2]), federation)
    order = np.argsort(losses, axis=1)  # the heaviest first
    np.testing.assert_allclose(found.weights, np.take_along_axis(softmax(-losses), order, axis=1), atol=1e-5)
    toys.assert_trees_close(found.models, jax.tree.map(lambda leaf: leaf[order], states[2].models))


def test_centralized(federation):
    _, _, states, records = play(FedeRiCoCentralized(), federation)
    weights, bias = parameters(states[0])
    prior = np.full((K, K), 1 / K)
    total = SIZES.sum()
    for number in range(2):
        losses, dw, db = losses_and_gradients(weights, bias, federation)
        joint = prior * np.exp(-losses)
        negative_log_likelihood = -np.log(joint.sum(axis=1)).sum() / total  # -f of Eq. 1
        prior = joint / joint.sum(axis=1, keepdims=True)  # Eq. 3 and 4
        weight = SIZES[:, None] / total * prior
        weights = weights - RATE * np.einsum("ij,ijd->jd", weight, dw)  # Eq. 6, with the 1 / n_i of Eq. 5 in dw
        bias = bias - RATE * np.einsum("ij,ij->j", weight, db)
        got = parameters(states[number + 1])
        np.testing.assert_allclose(got[0], weights, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(got[1], bias, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(np.exp(states[number + 1].clients), prior, atol=1e-5)
        logged = records[number].metrics["negative_log_likelihood"]
        np.testing.assert_allclose(logged, negative_log_likelihood, rtol=1e-4)


def test_beta_one_keeps_the_newest_loss_only(federation):
    _, _, states, _ = play(FedeRiCo(neighbors=1, beta=1.0, epsilon=1.0), federation)
    table = states[2].clients.table
    tracked, last = np.asarray(table.tracked), np.asarray(table.last)
    assert np.isfinite(tracked).sum() >= 2 * K and not np.isnan(tracked).any()
    np.testing.assert_array_equal(tracked[np.isfinite(tracked)], last[np.isfinite(tracked)])


@pytest.mark.parametrize(
    "knobs",
    [{"neighbors": 3}, {"candidates": 2, "neighbors": 2}, {"effective_examples": 3.0, "faithful": True}],
)
def test_knobs_that_do_not_fit_are_refused(federation, knobs):
    with pytest.raises(ArgumentError, match=rf"^federico\.{next(iter(knobs))}="):
        FedeRiCo(**{"neighbors": 2} | knobs).build(toys.make_problem(federation))


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_rounds_with_the_draws_given(epsilon):
    """Six rounds of Algorithm 1 in NumPy for five uneven clients, M = 2, with the neighbors that were drawn."""
    num, sizes, examples = 5, np.array([2, 4, 3, 6, 1]), 1.5
    federation = toys.make_federation(sizes, "regression", features=2, seed=3)
    problem = toys.make_problem(federation, optax.sgd(RATE))
    method = FedeRiCo(neighbors=2, epsilon=epsilon, beta=BETA, effective_examples=examples)
    algorithm, drawn = method.build(problem), np.zeros((6, num, 3), int)

    def note(number, client, index):
        drawn[number, client] = index

    def download(context, row, cohort):
        index = algorithm.download(context, row, cohort)
        jax.debug.callback(note, context.round, context.client, index)
        return index

    noting = dataclasses.replace(algorithm, download=download)
    states, _ = toys.train(noting, problem, federation.client_data, 6)
    jax.effects_barrier()
    weights, bias = parameters(states[0])
    x, y = federation.train.x.astype(np.float64), federation.train.y
    last, tracked, known = np.zeros((num, num)), np.zeros((num, num)), np.zeros((num, num), bool)
    explored = 0
    for number, held in enumerate(drawn):
        dw, db = np.zeros_like(weights), np.zeros_like(bias)
        for i, n in enumerate(sizes):
            others = np.setdiff1d(np.arange(num), [i])
            rank = np.where(known[i, others], tracked[i, others], -np.inf)  # models never evaluated come first
            greedy = np.sort(rank)[:2].tolist() == np.sort([rank[others == b][0] for b in held[i, 1:]]).tolist()
            explored += not greedy
            for b in held[i]:
                error = x[i, :n] @ weights[b] + bias[b] - y[i, :n]
                last[i, b] = (error**2).sum()
            fresh = ~known[i] & np.isin(np.arange(num), held[i])
            known[i] |= fresh
            tracked[i] = np.where(fresh, last[i], (1 - BETA) * tracked[i] + BETA * last[i]) * known[i]
            share = 1 if number < 2 else min(examples, n) / n  # the first ceil(4 / 2) rounds count all examples
            scores = np.exp(-share * np.where(known[i], tracked[i], np.inf))
            for b in held[i]:
                error = x[i, :n] @ weights[b] + bias[b] - y[i, :n]
                dw[b] += scores[b] / scores.sum() * 2 * error @ x[i, :n] / sizes[b]
                db[b] += scores[b] / scores.sum() * 2 * error.sum() / sizes[b]
        weights, bias = weights - RATE * dw, bias - RATE * db
        got = parameters(states[number + 1])
        np.testing.assert_allclose(got[0], weights, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(got[1], bias, rtol=1e-3, atol=1e-5)
    assert known.all() and (explored > 0) == (epsilon > 0)
