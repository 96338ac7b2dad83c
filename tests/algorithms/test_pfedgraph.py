"""pFedGraph: its graph, and rounds by hand on quadratics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from by_hand import by_hand, entry
from quadratics import SIZES, nearest_on_simplex

from pfljax.contract.types import Aggregate, ClientReport, Upload

COUNTS = np.array([4, 1, 7, 2, 6])
SHARES = np.array(SIZES) / sum(SIZES)


def cosine(a, b):
    return a @ b / np.sqrt((a @ a) * (b @ b))


def turn(w, u):
    """The gradient of the cosine of w and u in w."""
    return (u / np.linalg.norm(u) - cosine(w, u) * w / np.linalg.norm(w)) / np.linalg.norm(w)


def graph(moved, shares, alpha):
    angles = np.array([[cosine(a, b) for b in moved] for a in moved])
    return np.array([nearest_on_simplex(shares + row / (2 * alpha)) for row in angles])


@functools.cache
def server():
    """(alpha, how clients' parameters moved (5, 3)) -> the graph (5, 5) that the server makes of them; compiled."""
    federation = toys.make_federation(COUNTS, "regression", features=2)
    problem = toys.make_problem(federation)
    state = toys.zeros(toys.make_algorithm("pfedgraph", problem), problem, federation.client_data)

    @jax.jit
    def graph(alpha, moved):
        model = {"Dense_0": {"kernel": moved[:, :2, None], "bias": moved[:, 2:]}}
        aggregate = Aggregate(
            upload=Upload(update=model, count=jnp.asarray(COUNTS, jnp.float32)),
            num_sent=jnp.ones(5, jnp.int32),
            sent=jnp.ones((5, 1), bool),
            report=ClientReport(loss=jnp.zeros(5)),
        )
        algorithm = toys.make_algorithm("pfedgraph", problem, alpha=alpha)
        state_after, _ = algorithm.server_update(jax.random.key(0), state, aggregate)
        return state_after.server.state.graph

    return graph


@pytest.mark.parametrize("alpha", [0.1, 0.8, 5.0])
def test_no_other_weights_have_a_lower_objective(alpha):
    """Weights drawn at random, most of them near the graph's."""
    rng = np.random.default_rng(0)
    moved = rng.normal(size=(5, 3))
    found = np.asarray(server()(alpha, np.float32(moved)))
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    for k in range(5):

        def value(a, k=k):
            angles = np.array([cosine(moved[k], other) for other in moved])
            return alpha * np.square(a - COUNTS / 20).sum() - a @ angles

        others = rng.dirichlet(np.full(5, 0.5), 300)
        others = np.concatenate([others, 0.99 * found[k] + 0.01 * others])
        assert value(found[k]) <= min(map(value, others)) + 1e-6


def pfedgraph(alpha, mu):
    """Clients train what they received, near it in angle; the server mixes by the graph of the cohort."""

    def reference(rounds):
        initial = rounds.start("models")[0]
        received = np.tile(initial, (4, 1))
        own = rounds.start("clients.row.params")
        weights = np.eye(4)
        for number in rounds:
            cohort = rounds.cohort(number)
            for k in cohort:

                def further(w, u=received[k]):
                    return -mu * turn(w, u)

                own[k] = rounds.descend(k, received[k], further)
            share = rounds.sizes[cohort] / rounds.sizes[cohort].sum()
            weights[cohort] = 0
            weights[np.ix_(cohort, cohort)] = graph(own[cohort] - initial, share, alpha)
            received[cohort] = weights[cohort] @ own
            yield {
                "models": received,
                "clients.row.params": own,
                "server.state.graph": weights,
                "record.metrics.weight_of_others": 1 - np.diagonal(weights)[cohort].mean(),
            }

    return reference


def test_rounds_by_hand():
    hyperparameters = {"alpha": 0.6, "mu": 0.8}
    rounds = by_hand(
        "pfedgraph", pfedgraph(**hyperparameters), rtol=1e-5, hyperparameters=hyperparameters
    )
    weights = entry(rounds.states[-1], "server.state.graph")
    assert 0 < (weights == 0).sum() < 12  # some clients collaborate, others do not
    own = entry(rounds.states[-1], "clients.row.params")
    np.testing.assert_allclose(entry(rounds.predict(), "models")[:, 0], own, rtol=1e-6)


@pytest.mark.parametrize(("alpha", "limit"), [(1e6, np.tile(SHARES, (4, 1))), (1e-6, np.eye(4))])
def test_by_alpha_it_is_fedavg_or_local(alpha, limit):
    hyperparameters = {"alpha": alpha, "mu": 0.0}
    rounds = by_hand(
        "pfedgraph", pfedgraph(**hyperparameters), rtol=1e-5, hyperparameters=hyperparameters
    )
    np.testing.assert_allclose(entry(rounds.states[-1], "server.state.graph"), limit, atol=1e-5)


def test_the_graph_is_the_cohort_s():
    """Of models that shrink toward 0, and so move like a model of zeros, which others must not be taken for."""
    hyperparameters = {"alpha": 0.3, "mu": 0.8}
    federation = toys.make_federation(SIZES, "regression")
    federation.train.y[...] = 0
    options = {
        "hyperparameters": hyperparameters,
        "federation": federation,
        "cohort": 2,
        "epochs": 1,
    }
    by_hand("pfedgraph", pfedgraph(**hyperparameters), rtol=1e-5, **options)
