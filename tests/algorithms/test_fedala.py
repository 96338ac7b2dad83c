"""FedALA: rounds by hand on quadratics, the random share of the examples, and FedAvg as its limit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from quadratics import MINI, RATE, SIZES, gradient, play, vectors


def learned(slope, weights, own, theta, rate, passes):
    """W after full-batch steps; slope: theta -> the gradient there."""
    for _ in range(passes):
        start = own + (theta - own) * weights
        weights = np.clip(weights - rate * slope(start) * (theta - own), 0, 1)
    return weights


@pytest.mark.parametrize("rate", [1.0, 30.0])
def test_rounds_by_hand(rate):
    """Clients mix from their second round on; with the higher rate, weights reach the ends of [0, 1]."""
    knobs = {"rate": rate, "share": 1.0, "first_passes": 4}
    federation, _, states, _, predictions = play("fedala", rounds=4, epochs=2, knobs=knobs)
    theta = vectors(states[0].models)[0]
    own, weights, seen = np.tile(theta, (4, 1)), np.ones((4, 4)), []
    for number in range(4):
        for k in range(4):
            slope = lambda w, k=k: gradient(federation, k, w)
            start = theta
            if number:
                weights[k] = learned(slope, weights[k], own[k], theta, rate, 4 if number == 1 else 1)
                start = own[k] + (theta - own[k]) * weights[k]
            for _ in range(2):
                start = start - RATE * slope(start)
            own[k] = start
        theta = np.average(own, axis=0, weights=SIZES)
        after = states[number + 1]
        np.testing.assert_allclose(vectors(after.clients.weights), weights, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(vectors(after.clients.model), own, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(vectors(after.models)[0], theta, rtol=1e-4, atol=1e-5)
        seen.append(weights.copy())
    np.testing.assert_array_equal(seen[0], 1)
    assert (seen[-1] < 0.999).any() and ((seen[-1] == 0).any() == (rate == 30.0))
    np.testing.assert_allclose(vectors(predictions.models)[:, 0], own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rounds", "passes"), [(3, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 0), (1, 4)))]
)
def test_before_training_the_score_is_of_the_next_start_by_hand(rounds, passes):
    knobs = {"rate": 5.0, "share": 1.0, "first_passes": 4, "scored": "before"}
    federation, _, states, _, predictions = play("fedala", rounds=rounds, epochs=2, knobs=knobs)
    theta, own, weights = (
        vectors(x) for x in (states[-1].models, states[-1].clients.model, states[-1].clients.weights)
    )
    for k in range(4):
        slope = lambda w, k=k: gradient(federation, k, w)
        next_weights = learned(slope, weights[k], own[k], theta[0], 5.0, passes)
        wanted = own[k] + (theta[0] - own[k]) * next_weights
        np.testing.assert_allclose(vectors(predictions.models)[k, 0], wanted, rtol=1e-4, atol=1e-5)
        assert rounds == 0 or np.abs(wanted - own[k]).max() > 1e-3
    after = play("fedala", rounds=rounds, epochs=2, knobs=knobs | {"scored": "after"})
    toys.assert_trees_close(after[2][-1], states[-1])  # a score changes nothing that is kept
    np.testing.assert_allclose(vectors(after[4].models)[:, 0], own, rtol=1e-6)


@pytest.mark.slow
def test_a_random_share_of_the_examples_teaches_the_weights():
    """Two of client 1's five examples determine its weights, and another key draws other examples."""
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE))
    algorithm = toys.make_algorithm("fedala", problem, share=0.4, first_passes=3)
    taken = set()
    for seed in range(4):
        states, _ = toys.train(algorithm, problem, federation.client_data, 2, seed=seed)
        own, theta = vectors(states[1].clients.model)[1], vectors(states[1].models)[0]
        found = vectors(states[2].clients.weights)[1]
        subsets = list(itertools.combinations(range(5), 2))
        for subset in subsets:
            x = np.append(np.float64(federation.train.x[1, list(subset)]), np.ones((2, 1)), axis=1)
            y = np.float64(federation.train.y[1, list(subset)])
            slope = lambda w, x=x, y=y: 2 * x.T @ (x @ w - y) / 2
            if np.allclose(learned(slope, np.ones(4), own, theta, 1.0, 3), found, rtol=1e-4, atol=1e-5):
                taken.add((seed, subset))
    assert len(taken) == 4 and len({subset for _, subset in taken}) > 1


def test_its_traffic_is_fedavg_s():
    found, wanted = play("fedala", **MINI)[3], play("fedavg", **MINI)[3]
    assert [(r.down, r.up) for r in found] == [(r.down, r.up) for r in wanted] and found[0].up > 0


def test_lower_layers_are_the_global_model_s_and_the_others_are_mixed():
    """With a local learning rate of 0, for a client in its first round and one that returns."""
    federation = toys.make_federation((3, 4))
    problem = toys.make_problem(federation, optax.sgd(0.0), hidden=(3,))
    algorithm = toys.make_algorithm("fedala", problem, layers=1, rate=0.0)
    state = toys.start(algorithm, problem, federation.client_data)
    assert set(jax.tree.leaves(state.clients.weights["Dense_0"])) == set()
    draw = lambda seed, leaves: jax.tree.map(lambda x: jax.random.uniform(jax.random.key(seed), x.shape), leaves)
    models, parts = draw(1, state.clients.model), draw(2, state.clients.weights)
    row = state.clients._replace(model=models, weights=parts, rounds=jnp.array([0, 5], jnp.int32))
    state = state._replace(clients=row)
    after = toys.train(algorithm, problem, federation.client_data, 1, state=state)[0][1].clients.model
    theta = jax.tree.map(lambda leaf: np.asarray(leaf[0]), state.models)
    toys.assert_trees_close(jax.tree.map(lambda leaf: leaf[0], after), theta)
    toys.assert_trees_close(jax.tree.map(lambda leaf: leaf[1], after["Dense_0"]), theta["Dense_0"])
    for name in ("kernel", "bias"):
        own, weights = (np.float64(part["Dense_1"][name][1]) for part in (row.model, row.weights))
        mixed = own + (theta["Dense_1"][name] - own) * weights
        np.testing.assert_allclose(after["Dense_1"][name][1], mixed, rtol=1e-6)
        assert np.abs(mixed - theta["Dense_1"][name]).max() > 0.01


def test_batch_statistics_have_no_weights_and_are_the_global_model_s():
    federation = toys.make_federation((4, 4))
    knobs = {"layers": 2}  # all of them
    states = toys.play("fedala", federation, 3, optax.sgd(RATE), knobs, model=toys.Normalized).states
    assert set(jax.tree.leaves(states[-1].clients.weights["batch_stats"])) == set()
    assert np.ptp(states[-1].clients.weights["Dense_0"]["kernel"]) > 0
    before = np.asarray(states[2].models["batch_stats"]["BatchNorm_0"]["mean"][0])
    for k in range(2):  # of a round of one full batch
        wanted = 0.7 * before + 0.3 * federation.train.x[k].mean(axis=0)
        found = states[3].clients.model["batch_stats"]["BatchNorm_0"]["mean"][k]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
