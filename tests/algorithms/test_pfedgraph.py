"""pFedGraph: its graph, rounds by hand on quadratics, its limits, and sampled clients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from quadratics import SIZES, descend, nearest_on_simplex, play, vectors

from pfljax.algorithms.pfedgraph import PFedGraph

SHARES = np.array(SIZES) / sum(SIZES)


def cosine(a, b):
    return a @ b / np.sqrt((a @ a) * (b @ b))


def turn(w, u):
    """The gradient of the cosine of w and u in w."""
    return (u / np.linalg.norm(u) - cosine(w, u) * w / np.linalg.norm(w)) / np.linalg.norm(w)


def graph(moved, shares, alpha):
    angles = np.array([[cosine(a, b) for b in moved] for a in moved])
    return np.array([nearest_on_simplex(shares + row / (2 * alpha)) for row in angles])


@pytest.mark.parametrize("alpha", [0.1, 0.8, 5.0])
def test_no_other_weights_have_a_lower_objective(alpha):
    """Weights drawn at random, most of them near the graph's."""
    rng = np.random.default_rng(0)
    moved, sizes = rng.normal(size=(5, 3)), np.array([4, 1, 7, 2, 6])
    here = jnp.ones(5, bool)
    problem = toys.make_problem(toys.make_federation(sizes))
    found = PFedGraph(alpha=alpha)._graph(problem, jnp.float32(moved @ moved.T), jnp.float32(sizes), here)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    for k in range(5):
        value = lambda a, k=k: (
            alpha * np.square(a - sizes / 20).sum()
            - sum(weight * cosine(moved[k], other) for weight, other in zip(a, moved, strict=True))
        )
        others = rng.dirichlet(np.full(5, 0.5), 300)
        others = np.concatenate([others, 0.99 * np.asarray(found[k]) + 0.01 * others])
        assert value(np.asarray(found[k])) <= min(map(value, others)) + 1e-6


def test_rounds_by_hand():
    knobs = {"alpha": 0.6, "strength": 0.8}
    federation, _, states, records, predictions = play("pfedgraph", rounds=3, epochs=2, knobs=knobs)
    initial = vectors(states[0].models)[0]
    received = np.tile(initial, (4, 1))
    for number in range(3):
        own = np.empty((4, 4))
        for k in range(4):
            own[k] = descend(federation, k, received[k], 2, lambda w, u=received[k]: -0.8 * turn(w, u))
        weights = graph(own - initial, SHARES, 0.6)
        received = weights @ own
        np.testing.assert_allclose(states[number + 1].server.graph, weights, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(vectors(states[number + 1].models), received, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            records[number].metrics["weight_of_others"], 1 - np.diagonal(weights).mean(), rtol=1e-4
        )
    assert 0 < (weights == 0).sum() < 12  # some clients collaborate, others do not
    np.testing.assert_allclose(vectors(predictions.models)[:, 0], own, rtol=1e-5, atol=1e-5)
    assert records[0].down == 4 * 4 * 4 and records[0].up == 4 * 4 * (4 + 1)  # and n_k


@pytest.mark.parametrize(("alpha", "wanted"), [(1e6, "fedavg"), (1e-6, "local")])
def test_limits_of_alpha(alpha, wanted):
    federation, _, states, *_ = play("pfedgraph", rounds=2, knobs={"alpha": alpha, "strength": 0.0}, epochs=2)
    start = vectors(states[0].models)[0]
    if wanted == "fedavg":
        for _ in range(2):
            start = np.average([descend(federation, k, start, 2) for k in range(4)], axis=0, weights=SIZES)
        models = np.tile(start, (4, 1))
    else:
        models = [descend(federation, k, start, 4) for k in range(4)]
    np.testing.assert_allclose(vectors(states[-1].models), models, rtol=1e-5, atol=1e-5)


def test_the_graph_is_the_cohort_s():
    federation = toys.make_federation(SIZES, "regression")
    before, after = toys.play("pfedgraph", federation, 1, knobs={"alpha": 2.0, "strength": 0.0}, cohort=2).states
    initial, trained = (vectors(state.clients.model) for state in (before, after))
    here = np.flatnonzero((trained != initial).any(axis=1))
    assert len(here) == 2
    shares = np.array(SIZES)[here] / np.array(SIZES)[here].sum()
    weights = np.eye(4)
    weights[np.ix_(here, here)] = graph(trained[here] - initial[here], shares, 2.0)
    np.testing.assert_allclose(after.server.graph, weights, rtol=1e-5, atol=1e-5)
    received = np.where(np.isin(np.arange(4), here)[:, None], weights @ trained, initial)
    np.testing.assert_allclose(vectors(after.models), received, rtol=1e-5, atol=1e-5)


def test_newcomers_train_from_the_mean():
    newcomers = toys.make_federation((3, 4), "regression", seed=5)
    federation = toys.make_federation(SIZES, "regression")
    _, problem, algorithm, states, _ = toys.play("pfedgraph", federation, 1, knobs={"strength": 0.0})
    found = vectors(toys.adapt(algorithm, problem, jax.random.key(0), states[-1], newcomers.client_data).models)[:, 0]
    start = vectors(states[-1].models).mean(axis=0)
    wanted = [descend(newcomers, k, start, 2) for k in range(2)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
