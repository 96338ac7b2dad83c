"""FedAS: rounds by hand, its limit, and the trace of the Fisher information."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from networks import BODY, HEAD, RATE, assert_row_close, descend, examples, features, gradient, mean, play, row, step

from pfljax.algorithms import fedas
from pfljax.exchange.rounds import cohort_of

SIZES, WIDTH, ALIGNMENT = (2, 5, 1, 4), 6, 3


def aligned(params, own, x, y):
    """Steps of the body toward the class means of the own model's features."""
    target = features(own, x)
    means = np.array([target[y == c].mean(axis=0) for c in y])
    for _ in range(ALIGNMENT):
        hidden = features(params, x)
        below = 2 * (hidden - means) / hidden.size * (hidden > 0)
        slopes = {BODY: {"kernel": x.T @ below, "bias": below.sum(axis=0)}}
        params = step(params, slopes, RATE, [BODY])
    return params


def fisher(params, x, y):
    """The mean over examples of the squared norm of an example's gradient."""
    each = [gradient(params, x[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    return np.mean([sum(np.square(leaf).sum() for leaf in jax.tree.leaves(slope)) for slope in each])


@pytest.mark.parametrize("cohort", [4, 2])
def test_rounds_by_hand(cohort):
    """With sampled clients, nothing is aligned in a client's first round."""
    options = {"knobs": {"epochs": ALIGNMENT}, "epochs": 2, "cohort": cohort}
    federation, _, _, states, records = play("fedas", 4, SIZES, **options)
    own = [row(states[0].clients.model, k) for k in range(4)]
    theta, seen, moved = row(states[0].models, 0)[BODY], set(), 0
    for number in range(4):
        ids = np.asarray(cohort_of(jax.random.key(0), number, 4, cohort).ids).tolist()
        weights = []
        for k in ids:
            (x, y), start = examples(federation, k), {BODY: theta, HEAD: own[k][HEAD]}
            if k in seen:
                received, start = start, aligned(start, own[k], x, y)
                moved = max(moved, np.abs(start[BODY]["kernel"] - received[BODY]["kernel"]).max())
            own[k] = descend(start, x, y, RATE, 2)
            weights.append(fisher(own[k], x, y))
        seen |= set(ids)
        theta = mean([own[k][BODY] for k in ids], weights)
        toys.assert_trees_close(row(states[number + 1].models, 0)[BODY], theta, rtol=1e-5, atol=1e-5)
        for k in range(4):
            assert_row_close(states[number + 1].clients.model, own[k], k)
    assert moved > 0.01 and np.ptp(weights) > 0.1
    size = 4 * (3 * WIDTH + WIDTH)
    assert records[0].down == cohort * size and records[0].up == cohort * (size + 4)  # and F_k


def test_unaligned_and_weighted_by_size_it_is_fedper():
    options = {"batch_size": 2, "epochs": 2}
    found = play("fedas", 2, SIZES, {"epochs": 0, "weights": "size"}, **options)[3][-1]
    wanted = play("fedper", 2, SIZES, **options)[3][-1]
    toys.assert_trees_close(found.models, wanted.models, rtol=1e-5, atol=1e-6)
    toys.assert_trees_close(found.clients.model[HEAD], wanted.clients.own[HEAD], rtol=1e-5, atol=1e-6)


def test_the_trace_of_the_fisher_information():
    """Also of many examples, which are worked on in blocks, and of none."""
    federation = toys.make_federation((70, 0))
    problem = toys.make_problem(federation, hidden=(WIDTH,))
    params = problem.model.init(jax.random.key(0))
    clients = jax.tree.map(jnp.asarray, federation.train)
    found = [fedas.fisher_trace(problem, params, jax.tree.map(lambda leaf, k=k: leaf[k], clients)) for k in range(2)]
    wanted = fisher(jax.tree.map(np.float64, params), *examples(federation, 0))
    np.testing.assert_allclose(found, [wanted, 0], rtol=1e-4)
