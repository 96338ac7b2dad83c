"""kNN-Per: predictions by hand, the choice of lambda, fine-tuning, and that it trains as FedAvg does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from networks import OPTIMIZER, features, logits, softmax

from pfljax.algorithms.knn_per import votes
from pfljax.contract.types import Split
from pfljax.evaluation import metrics
from pfljax.evaluation.fine_tuning import fine_tuned
from pfljax.local.batches import over_examples

SIZES = (6, 1, 0, 3)
KEY = jax.random.key(0)


@functools.cache
def trained(name="knn_per"):
    """Two rounds of a method; training does not depend on kNN-Per's hyperparameters."""
    federation = toys.make_federation(SIZES, validation_size=4)
    return toys.play(name, federation, 2, OPTIMIZER, hidden=(4,), batch_size=2)


def with_hyperparameters(**hyperparameters):
    """(federation, problem, kNN-Per with other hyperparameters, last state)."""
    played = trained()
    algorithm = toys.make_algorithm("knn_per", played.problem, **hyperparameters)
    return played.federation, played.problem, algorithm, played.states[-1]


def predicted(algorithm, problem, state, clients, x, key=KEY):
    """Every client's predictions (K, B, C)."""

    def use(prediction, _):
        return metrics.predict(problem, algorithm, prediction, x)

    return np.asarray(toys.serve(algorithm, problem, use, key, state, clients).outputs)


def network(params, x):
    """(features (B, 4), probabilities (B, C)) of the MLP with one hidden layer, in float64."""
    params = jax.tree.map(np.float64, params)
    x = np.float64(x)
    return features(params, x), softmax(logits(params, x))


def by_hand(params, x, y, queries, num, scale):
    """p_knn (B, C) of a client with examples x, y."""
    stored = network(params, x)[0]
    asked = network(params, queries)[0]
    found = np.zeros((len(queries), 3))
    for i, query in enumerate(asked):
        distance = ((stored - query) ** 2).mean(axis=1)
        for place in np.argsort(distance)[:num]:
            found[i, y[place]] += np.exp(-distance[place] / scale)
        found[i] /= found[i].sum()
    return found


def own(federation, k):
    return federation.train.x[k, : SIZES[k]], federation.train.y[k, : SIZES[k]]


@pytest.mark.parametrize("num", [pytest.param(1, marks=pytest.mark.long), 2, 10])
def test_predictions_by_hand(num):
    federation, problem, algorithm, state = with_hyperparameters(
        neighbors=num, scale=0.2, mix=0.7, grid_steps=0
    )
    queries = federation.test.x[0]
    params = jax.tree.map(lambda leaf: leaf[0], state.models)
    shared = network(params, queries)[1]
    found = predicted(algorithm, problem, state, federation.client_data, queries)
    for k in range(4):
        expected = shared  # of a client without examples
        if SIZES[k]:
            expected = 0.7 * by_hand(params, *own(federation, k), queries, num, 0.2) + 0.3 * shared
        np.testing.assert_allclose(found[k], expected, rtol=1e-4, atol=1e-6)
    assert np.abs(found[0] - shared).max() > 0.05


@pytest.mark.parametrize("num_wrong", [0, 1])
def test_lambda_is_the_one_of_the_grid_that_fits_the_validation_examples_best(num_wrong):
    """Client 0 validates on examples in its datastore, client 3 on random labels, and client 1 on none.

    With a wrong label, client 0's best lambda is within the grid.
    """
    federation, problem, algorithm, state = with_hyperparameters(
        neighbors=2, scale=0.1, grid_steps=5, mix=0.3
    )
    split = jax.tree.map(np.copy, federation.validation)
    split.x[0], split.y[0] = federation.train.x[0, :4], federation.train.y[0, :4]
    split.y[0, :num_wrong] = (split.y[0, :num_wrong] + 1) % 3
    split.size[1] = 0
    clients = federation.client_data._replace(validation=split)
    found = toys.predict(algorithm, problem, KEY, state, clients).inputs.mix
    params = jax.tree.map(lambda leaf: leaf[0], state.models)
    for k in (0, 3):
        x = split.x[k]
        y = split.y[k]
        both = by_hand(params, *own(federation, k), x, 2, 0.1), network(params, x)[1]
        memory, shared = (p[np.arange(len(y)), y] for p in both)
        grid = np.linspace(0, 1, 6)
        losses = [
            -np.log(np.maximum(share * memory + (1 - share) * shared, 1e-38)).mean()
            for share in grid
        ]
        assert found[k] == pytest.approx(grid[np.argmin(losses)])
    assert (0 < found[0] < 1) == bool(num_wrong)
    assert found[0] > found[3] and found[2] == 0
    np.testing.assert_allclose(found[1], 0.3)  # the one that is given


def test_without_any_validation_examples_clients_have_the_lambda_that_is_given():
    federation, problem, algorithm, state = with_hyperparameters(mix=0.3)
    validation = federation.validation
    validation = Split(validation.x[:, :0], validation.y[:, :0], np.zeros(4, np.int32))
    clients = federation.client_data._replace(validation=validation)
    found = toys.predict(algorithm, problem, KEY, state, clients).inputs.mix
    np.testing.assert_allclose(found, [0.3, 0.3, 0, 0.3])


def test_it_trains_as_fedavg_does():
    found = trained("knn_per")
    wanted = trained("fedavg")
    assert toys.same_trees(found.states[-1].models, wanted.states[-1].models)
    moved = [(record.down, record.up) for record in found.records]
    assert moved == [(record.down, record.up) for record in wanted.records] and moved[0][1] > 0


@pytest.mark.slow
def test_newcomers_remember_their_own_examples():
    _, problem, algorithm, state = with_hyperparameters(mix=1.0, grid_steps=0, neighbors=1)
    newcomers = toys.make_federation((5, 2), seed=3)
    stored = toys.adapt(algorithm, problem, KEY, state, newcomers.client_data)
    for k in range(2):
        queries = newcomers.train.x[k, : newcomers.train.size[k]]
        own_part = jax.tree.map(lambda leaf, k=k: leaf[k], stored)
        found = metrics.predict(problem, algorithm, own_part, queries).argmax(axis=1)
        np.testing.assert_array_equal(
            found, newcomers.train.y[k, : len(queries)]
        )  # each is nearest to itself


@pytest.mark.slow
def test_after_fine_tuning_the_datastore_is_of_the_tuned_model():
    federation, problem, algorithm, state = with_hyperparameters(
        neighbors=2, scale=0.2, mix=0.7, grid_steps=0
    )
    tuned = fine_tuned(problem, algorithm, 3)
    key = jax.random.key(1)
    clients = federation.client_data
    queries = federation.test.x[0]
    models = toys.predict(tuned, problem, key, state, clients).models
    solver = problem.solver._replace(epochs=3)
    theta = solver.begin(jax.tree.map(lambda leaf: leaf[0], state.models))
    for k in range(4):
        data = jax.tree.map(lambda leaf, k=k: jnp.asarray(leaf[k]), federation.train)
        own_key = jax.random.fold_in(jax.random.fold_in(key, k), 0)
        expected, _ = solver.fit(own_key, theta, data, round_number=np.int32(0))
        params = jax.tree.map(lambda leaf, k=k: leaf[k, 0], models)
        toys.assert_trees_close(params, expected.whole, rtol=1e-5, atol=1e-6)
    found = predicted(tuned, problem, state, clients, queries, key)
    for k in (0, 1, 3):
        params = jax.tree.map(lambda leaf, k=k: leaf[k, 0], models)
        hand = (
            0.7 * by_hand(params, *own(federation, k), queries, 2, 0.2)
            + 0.3 * network(params, queries)[1]
        )
        np.testing.assert_allclose(found[k], hand, rtol=1e-4, atol=1e-6)


def test_features_of_many_examples_are_found_in_blocks():
    _, problem, _, state = with_hyperparameters()
    params = jax.tree.map(lambda leaf: leaf[0], state.models)
    x = np.random.default_rng(0).normal(size=(700, 3)).astype(np.float32)

    def features(split):
        return over_examples(lambda x, _: problem.model.features(params, x), split)

    found = jax.jit(features)(Split(x, np.zeros(700, np.int32), 650))
    assert found.shape == (700, 4)
    np.testing.assert_allclose(found[:650], network(params, x[:650])[0], rtol=1e-4, atol=1e-5)


def test_padding_gets_no_vote():
    stored = jnp.array([[5.0], [0.0], [0.0]])
    places, weights = jax.jit(votes, static_argnums=3)(
        jnp.zeros((1, 1)), stored, jnp.int32(1), 2, 1.0
    )
    assert places[0, 0] == 0
    np.testing.assert_array_equal(weights, [[1.0, 0.0]])
