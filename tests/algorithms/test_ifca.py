"""IFCA and HypCluster: rounds by hand on quadratics, their starts, and what is shared."""

import itertools

import jax
import numpy as np
import pytest
import toys
from by_hand import by_hand
from networks import OPTIMIZER
from quadratics import RATE, loss_of, vectors

from pfljax.contract import tree

SIZES = (2, 5, 1, 3, 4, 2)
CLUSTERS = 3


def choices(rounds, models):
    """The model of least loss of each client."""
    losses = [[loss_of(rounds.federation, k, theta) for theta in models] for k in rounds.clients]
    return np.argmin(losses, axis=1)


def by_models(rounds):
    """Each client trains the model of least loss; a model becomes the mean of its clients' copies."""
    models = rounds.start("models")
    for _ in rounds:
        chosen = choices(rounds, models)
        for j in range(CLUSTERS):
            members = np.flatnonzero(chosen == j)
            if len(members):
                trained = [rounds.descend(k, models[j]) for k in members]
                models[j] = rounds.mean(trained, rounds.sizes[members])
        yield {
            "models": models,
            "record.metrics.clusters_chosen": len(set(chosen)),
            "predictions": [[models[j]] for j in choices(rounds, models)],
        }


def by_gradients(rounds):
    """Option I: a step along the sum of its clients' gradients, over all clients' examples."""
    models = rounds.start("models")
    for _ in rounds:
        chosen = choices(rounds, models)
        for _ in range(rounds.epochs):  # each a step of all examples; the choice is the round's
            slopes = [rounds.gradient(k, models[chosen[k]]) for k in rounds.clients]
            slopes = rounds.sizes[:, None] * np.array(slopes)
            sums = np.array([slopes[chosen == j].sum(axis=0) for j in range(CLUSTERS)])
            models = models - RATE * sums / rounds.sizes.sum()
        yield {
            "models": models,
            "clients.row": chosen,
            "record.metrics.clusters_chosen": len(set(chosen)),
        }


@pytest.mark.parametrize(
    ("name", "hyperparameters", "reference"),
    [
        ("ifca", {}, by_models),
        ("ifca", {"averaging": "gradients"}, by_gradients),
        ("hypcluster", {}, by_models),
    ],
)
def test_clients_choose_and_train_the_model_of_least_loss(name, hyperparameters, reference):
    rounds = by_hand(
        name,
        reference,
        hyperparameters=hyperparameters | {"clusters": CLUSTERS},
        sizes=SIZES,
        rounds=2,
    )
    assert rounds.records[0].metrics["clusters_chosen"] > 1


@pytest.mark.parametrize("name", ["ifca", "hypcluster"])
@pytest.mark.parametrize(
    ("hyperparameters", "clusters"), [({}, 3), ({"clusters": 1}, 1), ({"clusters": 5}, 5)]
)
def test_there_are_as_many_models_as_asked_for(name, hyperparameters, clusters):
    """The toy's clients are in two groups, which nobody tells."""
    federation = toys.make_federation((3,) * 6)
    algorithm = toys.make_algorithm(name, toys.make_problem(federation), **hyperparameters)
    shape = jax.eval_shape(algorithm.start, jax.random.key(0), federation.client_data)
    assert tree.num_rows(shape.models) == clusters


@pytest.mark.slow
def test_of_several_starts_ifca_keeps_the_one_that_spreads_clients_most_evenly():
    """The best of several single-draw starts, by the entropy of n_k summed over each model's clients."""
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation)
    key = jax.random.key(3)

    def algorithm(draws):
        return toys.make_algorithm("ifca", problem, clusters=3, draws=draws)

    def entropy(models):
        losses = [[loss_of(federation, k, theta) for theta in vectors(models)] for k in range(6)]
        share = np.bincount(np.argmin(losses, axis=1), SIZES, minlength=3) / sum(SIZES)
        return -sum(p * np.log(p) for p in share if p)

    # The same starts one by one: a further draw is kept only if it is better.
    kept = [algorithm(draws).start(key, federation.client_data).models for draws in range(1, 7)]
    scores = [entropy(models) for models in kept]
    assert np.all(np.diff(scores) >= 0)
    assert scores[-1] > scores[0]
    for before, after in itertools.pairwise(kept):
        assert toys.same_trees(before, after) == (entropy(before) == entropy(after))


def test_ifca_s_first_layers_may_be_shared():
    federation = toys.make_federation((4, 3, 5, 2, 4, 4))
    hyperparameters = {"clusters": 3, "shared_layers": 1}
    states = toys.play("ifca", federation, 3, OPTIMIZER, hyperparameters, hidden=(3,)).states
    for state in states:
        for leaf in jax.tree.leaves(state.models["Dense_0"]):
            first = np.broadcast_to(leaf[:1], leaf[1:].shape)
            np.testing.assert_allclose(leaf[1:], first, rtol=1e-6)
        assert np.abs(np.diff(state.models["Dense_1"]["kernel"], axis=0)).max() > 0.01
    assert not toys.same_trees(states[0].models["Dense_0"], states[-1].models["Dense_0"])
