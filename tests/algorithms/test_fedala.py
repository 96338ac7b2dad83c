"""FedALA: rounds by hand on networks, the random share of the examples, and batch statistics."""

import itertools

import jax
import numpy as np
import optax
import pytest
import quadratics
import toys
from by_hand import as_numpy, assert_close, by_hand, entry, play, stack
from networks import HEAD, descend, gradient, row
from quadratics import SIZES, vectors

from pfljax.contract import tree

FIRST_PASSES = 4
OPTIONS = {"hidden": (3,), "sizes": SIZES}


def learned(slope, weights, own, theta, rate, passes):
    """W after full-batch steps on the mixture own + (theta - own) W; slope: mixture -> the gradient there."""
    for _ in range(passes):
        start = own + (theta - own) * weights
        weights = np.clip(weights - rate * slope(start) * (theta - own), 0, 1)
    return weights


def adopted(theta, own, weights, data, rate, passes):
    """The global model with a mixed head, and W after some passes."""

    def mixture(weights):
        head = jax.tree.map(lambda a, b, w: a + (b - a) * w, own[HEAD], theta[HEAD], weights)
        return theta | {HEAD: head}

    def moved(weight, slope, a, b):
        return np.clip(weight - rate * slope * (b - a), 0, 1)

    for _ in range(passes):
        slopes = gradient(mixture(weights), *data)[HEAD]
        weights = jax.tree.map(moved, weights, slopes, own[HEAD], theta[HEAD])
    return mixture(weights), weights


def passes_of(number):
    """Passes over the examples in a round: none in a client's first round, more in its second."""
    return (0, FIRST_PASSES, 1)[min(number, 2)]


def fedala(rate):
    """Clients mix the global head with their own from their second round on; lower layers are the global model's."""

    def reference(rounds):
        theta = row(rounds.start("models"), 0)
        own = [theta for _ in rounds.clients]
        weights = [jax.tree.map(np.ones_like, theta[HEAD]) for _ in rounds.clients]

        for number in rounds:
            for k in rounds.clients:
                data = rounds.examples(k)
                passes = passes_of(number)
                begin, weights[k] = adopted(theta, own[k], weights[k], data, rate, passes)
                own[k] = descend(begin, *data, rounds.rate, rounds.epochs)
            theta = rounds.mean(own)

            starts = []
            for k in rounds.clients:
                passes = passes_of(number + 1)
                start, _ = adopted(theta, own[k], weights[k], rounds.examples(k), rate, passes)
                starts.append(start)
            yield {
                "models": stack([theta]),
                "rows.model": own,
                f"rows.weights.{HEAD}": weights,
                "predictions": [[start] for start in starts],
            }

    return reference


def hyperparameters_of(rate):
    """All examples teach the weights, and the score is of what the next round would start from."""
    return {
        "weights_learning_rate": rate,
        "share": 1.0,
        "first_passes": FIRST_PASSES,
        "predict": "before",
    }


@pytest.mark.parametrize(("rate", "rounds"), [(1.0, 1), (1.0, 3), (60.0, 4)])
def test_fedala_by_hand(rate, rounds):
    """At the higher rate, weights reach 0, the end of [0, 1]."""
    played = by_hand(
        "fedala", fedala(rate), hyperparameters=hyperparameters_of(rate), rounds=rounds, **OPTIONS
    )
    leaves = [jax.tree.leaves(state.rows.weights) for state in played.states]
    seen = [np.concatenate([np.ravel(leaf) for leaf in weights]) for weights in leaves]
    np.testing.assert_array_equal(seen[1], 1)
    assert (seen[-1] < 0.999).any() == (rounds > 1)
    assert (seen[-1] == 0).any() == (rate == 60.0)


def test_a_client_s_first_round_begins_with_the_global_model():
    """Whatever its row holds."""
    start = play("fedala", hyperparameters=hyperparameters_of(1.0), rounds=0, **OPTIONS).states[0]
    rng = np.random.default_rng(0)

    def random(leaf):
        return np.float32(rng.uniform(size=leaf.shape))

    model, weights = jax.tree.map(random, (start.rows.model, start.rows.weights))
    state = start.with_rows(start.rows._replace(model=model, weights=weights))
    played = play(
        "fedala", hyperparameters=hyperparameters_of(1.0), rounds=1, state=state, **OPTIONS
    )
    theta = row(played.start("models"), 0)
    trained = [
        descend(theta, *played.examples(k), played.rate, played.epochs) for k in played.clients
    ]
    assert_close(entry(played.states[-1], "rows.model"), trained, "first round", 1e-4, 1e-5)


def test_before_training_the_score_is_of_the_first_start():
    """Before the first round, that is the global model."""
    played = play("fedala", hyperparameters=hyperparameters_of(1.0), rounds=0, **OPTIONS)
    theta = row(played.start("models"), 0)
    assert_close(as_numpy(played.predict().models), [[theta]] * 4, "predictions", 1e-6, 1e-6)


def test_after_training_the_score_is_of_the_client_s_own_model():
    state = play("fedala", hyperparameters=hyperparameters_of(1.0), rounds=1, **OPTIONS).states[-1]
    kept = jax.tree.map(lambda leaf: leaf[1], state.rows)
    problem = toys.make_problem(toys.make_federation(SIZES), hidden=(3,))
    algorithm = toys.make_algorithm("fedala", problem, predict="after")
    found = algorithm.predict(None, state.models, kept, None).models
    toys.assert_trees_close(found, tree.stack_one(kept.model))


@pytest.mark.slow
def test_a_random_share_of_the_examples_teaches_the_weights():
    """Two of client 1's five examples determine its weights, and another key draws other examples."""
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, quadratics.OPTIMIZER)
    algorithm = toys.make_algorithm("fedala", problem, share=0.4, first_passes=3)
    taken = set()
    for seed in range(4):
        states, _ = toys.train(algorithm, problem, federation.client_data, 2, seed=seed)
        own = vectors(states[1].rows.model)[1]
        theta = vectors(states[1].models)[0]
        found = vectors(states[2].rows.weights)[1]
        subsets = list(itertools.combinations(range(5), 2))
        for subset in subsets:
            x = np.append(np.float64(federation.train.x[1, list(subset)]), np.ones((2, 1)), axis=1)
            y = np.float64(federation.train.y[1, list(subset)])

            def slope(w, x=x, y=y):
                return 2 * x.T @ (x @ w - y) / 2

            weights = learned(slope, np.ones(4), own, theta, 1.0, 3)
            if np.allclose(weights, found, rtol=1e-4, atol=1e-5):
                taken.add((seed, subset))
    assert len(taken) == 4
    assert len({subset for _, subset in taken}) > 1


def test_batch_statistics_have_no_weights_and_are_the_global_model_s():
    federation = toys.make_federation((4, 4))
    hyperparameters = {"layers": 2}  # all of them
    states = toys.play(
        "fedala", federation, 3, optax.sgd(0.1), hyperparameters, model=toys.Normalized
    ).states
    assert set(jax.tree.leaves(states[-1].rows.weights["batch_stats"])) == set()
    assert np.ptp(states[-1].rows.weights["Dense_0"]["kernel"]) > 0
    before = entry(states[2], "models.batch_stats.BatchNorm_0.mean")[0]
    for k in range(2):  # of a round of one full batch
        wanted = 0.7 * before + 0.3 * federation.train.x[k].mean(axis=0)
        found = states[3].rows.model["batch_stats"]["BatchNorm_0"]["mean"][k]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
