"""IFCA and HypCluster: rounds by hand on quadratics, their starts, and what is shared."""

import itertools

import jax
import numpy as np
import optax
import pytest
import toys
from quadratics import RATE, descend, gradient, loss_of, play, vectors

from pfljax.contract import tree


@pytest.mark.parametrize("name", ["ifca", "hypcluster"])
def test_clients_choose_and_train_the_model_of_least_loss(name):
    sizes = (2, 5, 1, 3, 4, 2)
    federation, algorithm, states, records, _ = play(name, epochs=2, knobs={"clusters": 3}, sizes=sizes)
    models = vectors(states[0].models)
    for number in range(2):
        losses = np.array([[loss_of(federation, k, theta) for theta in models] for k in range(6)])
        chosen = losses.argmin(axis=1)
        assert len(set(chosen)) > 1
        for j in range(3):
            members = np.flatnonzero(chosen == j)
            if len(members):
                trained = [descend(federation, k, models[j], 2) for k in members]
                models[j] = np.average(trained, axis=0, weights=[sizes[k] for k in members])
        np.testing.assert_allclose(vectors(states[number + 1].models), models, rtol=1e-4, atol=1e-5)
        assert records[number].metrics["clusters_chosen"] == len(set(chosen))
    assert records[0].down == 6 * 3 * 4 * 4 and records[0].up == 6 * (4 + 1) * 4
    best = np.array([[loss_of(federation, k, theta) for theta in models] for k in range(6)]).argmin(axis=1)
    problem = toys.make_problem(federation)
    used = toys.used(algorithm, problem, jax.random.key(0), states[-1], federation.client_data)
    np.testing.assert_array_equal(used["index"][:, 0], best)


@pytest.mark.parametrize("name", ["ifca", "hypcluster"])
@pytest.mark.parametrize(("knobs", "clusters"), [({}, 3), ({"clusters": 1}, 1), ({"clusters": 5}, 5)])
def test_there_are_as_many_models_as_asked_for(name, knobs, clusters):
    """The toy's clients are in two groups, which nobody tells."""
    federation = toys.make_federation((3,) * 6)
    algorithm = toys.make_algorithm(name, toys.make_problem(federation), **knobs)
    shape = jax.eval_shape(algorithm.start, jax.random.key(0), federation.client_data)
    assert tree.num_rows(shape.models) == clusters


@pytest.mark.slow
def test_of_several_starts_ifca_keeps_the_one_that_spreads_clients_most_evenly():
    """The best of several single-draw starts, by the entropy of n_k summed over each model's clients."""
    sizes = (2, 5, 1, 3, 4, 2)
    federation = toys.make_federation(sizes, "regression")
    problem, key = toys.make_problem(federation, optax.sgd(RATE)), jax.random.key(3)
    algorithm = lambda draws: toys.make_algorithm("ifca", problem, clusters=3, draws=draws)

    def entropy(models):
        losses = np.array([[loss_of(federation, k, theta) for theta in vectors(models)] for k in range(6)])
        share = np.bincount(losses.argmin(axis=1), sizes, minlength=3) / sum(sizes)
        return -sum(p * np.log(p) for p in share if p)

    # The same starts one by one: a further draw is kept only if it is better.
    kept = [algorithm(draws).start(key, federation.client_data).models for draws in range(1, 7)]
    scores = [entropy(models) for models in kept]
    assert np.all(np.diff(scores) >= 0) and scores[-1] > scores[0]
    for before, after in itertools.pairwise(kept):
        assert toys.same_trees(before, after) == (entropy(before) == entropy(after))


def test_ifca_averages_gradients_by_hand():
    """Option I: a step along the sum of its clients' gradients, over all clients' examples."""
    sizes = np.array((2, 5, 1, 3, 4, 2))
    knobs = {"clusters": 3, "averaging": "gradients"}
    federation, _, states, records, _ = play("ifca", knobs=knobs, sizes=tuple(sizes), epochs=2)
    models, spread = vectors(states[0].models), []
    for number in range(2):
        losses = np.array([[loss_of(federation, k, theta) for theta in models] for k in range(6)])
        chosen = losses.argmin(axis=1)
        for _ in range(2):  # epochs, each a step of all examples; the choice is the round's
            slopes = np.array([sizes[k] * gradient(federation, k, models[chosen[k]]) for k in range(6)])
            models = np.array([models[j] - RATE * slopes[chosen == j].sum(axis=0) / sizes.sum() for j in range(3)])
        np.testing.assert_allclose(vectors(states[number + 1].models), models, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(states[number + 1].clients, chosen)
        spread.append(len(set(chosen)))
        assert records[number].metrics["clusters_chosen"] == spread[-1]
    assert spread[0] > 1
    # All models in the round's first exchange, then only the chosen one; its gradient goes back in both.
    assert records[0].down == 6 * (3 + 1) * 4 * 4 and records[0].up == 6 * 2 * 4 * 4


def test_ifca_s_first_layers_may_be_shared():
    federation = toys.make_federation((4, 3, 5, 2, 4, 4))
    knobs = {"clusters": 3, "shared_layers": 1}
    states = toys.play("ifca", federation, 3, optax.sgd(RATE), knobs, hidden=(3,), batch_size=2).states
    for state in states:
        for leaf in jax.tree.leaves(state.models["Dense_0"]):
            np.testing.assert_allclose(leaf[1:], np.broadcast_to(leaf[:1], leaf[1:].shape), rtol=1e-6)
        assert np.abs(np.diff(state.models["Dense_1"]["kernel"], axis=0)).max() > 0.01
    assert not toys.same_trees(states[0].models["Dense_0"], states[-1].models["Dense_0"])
