"""FedAS: rounds by hand, and the trace of the Fisher information."""

import jax
import numpy as np
import pytest
import toys
from by_hand import by_hand
from networks import BODY, HEAD, RATE, examples, features, gradient, row, step

from pfljax.algorithms import fedas

WIDTH = 6
ALIGNMENT = 3


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
    return np.mean(
        [sum(np.square(leaf).sum() for leaf in jax.tree.leaves(slope)) for slope in each]
    )


def reference(rounds):
    """FedAS; nothing is aligned in a client's first round."""
    own = [row(rounds.states[0].rows.model, k) for k in rounds.clients]
    theta = row(rounds.states[0].models, 0)[BODY]
    seen = set()
    moved = [0.0]
    for number in rounds:
        weights = []
        for k in rounds.cohort(number):
            x, y = rounds.examples(k)
            received = {BODY: theta, HEAD: own[k][HEAD]}
            start = aligned(received, own[k], x, y) if k in seen else received
            moved.append(np.abs(start[BODY]["kernel"] - received[BODY]["kernel"]).max())
            own[k] = rounds.descend(k, start)
            weights.append(fisher(own[k], x, y))
            seen.add(k)
        theta = rounds.mean([own[k][BODY] for k in rounds.cohort(number)], weights)
        yield {f"models.{BODY}": jax.tree.map(lambda leaf: leaf[None], theta), "rows.model": own}
    assert max(moved) > 0.01 and np.ptp(weights) > 0.1


@pytest.mark.parametrize("cohort", [2, pytest.param(4, marks=pytest.mark.long)])
def test_rounds_by_hand(cohort):
    options = {
        "hyperparameters": {"alignment_epochs": ALIGNMENT},
        "sizes": (2, 5, 1, 4),
        "hidden": (WIDTH,),
        "cohort": cohort,
    }
    by_hand("fedas", reference, rounds=4, rtol=1e-5, **options)


def fedper(rounds):
    """Without alignment, weighted by n_k."""
    own = [row(rounds.states[0].rows.model, k) for k in rounds.clients]
    theta = row(rounds.states[0].models, 0)[BODY]
    for _ in rounds:
        own = [rounds.descend(k, {BODY: theta, HEAD: own[k][HEAD]}) for k in rounds.clients]
        theta = rounds.mean([model[BODY] for model in own])
        yield {f"models.{BODY}": jax.tree.map(lambda leaf: leaf[None], theta), "rows.model": own}


def test_unaligned_and_weighted_by_size_it_is_fedper():
    by_hand(
        "fedas",
        fedper,
        hyperparameters={"alignment_epochs": 0, "weights": "size"},
        hidden=(WIDTH,),
        rtol=1e-5,
    )


def test_the_trace_of_the_fisher_information():
    """Also of many examples, which are worked on in blocks, and of none."""
    federation = toys.make_federation((70, 0))
    problem = toys.make_problem(federation, hidden=(WIDTH,))
    params = problem.model.init(jax.random.key(0))
    trace = jax.jit(lambda split: fedas.fisher_trace(problem, params, split))
    found = [trace(jax.tree.map(lambda leaf, k=k: leaf[k], federation.train)) for k in range(2)]
    wanted = fisher(jax.tree.map(np.float64, params), *examples(federation, 0))
    np.testing.assert_allclose(found, [wanted, 0], rtol=1e-4)
