"""Gradients and changes of models that a client weighs: those of negligible weight are neither computed nor sent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from pfljax.algorithms.common import gradients
from pfljax.contract import tree
from pfljax.contract.types import ClientContext
from pfljax.local.privacy import Privacy

WEIGHTS = np.array([0.75, 1e-13, 0.25], np.float32)


@pytest.fixture(scope="module")
def federation():
    return toys.make_federation([7], features=4)


def both(federation, hidden):
    """Losses and gradients of three models, the second of which has infinite parameters: without weights and with."""
    problem = toys.make_problem(federation, hidden=(hidden,), batch_size=3)
    models = problem.init_models(jax.random.key(0), 3, common=False)
    models = jax.tree.map(lambda leaf: leaf.at[1].set(jnp.inf), models)
    context = ClientContext(jax.random.key(1), jnp.array(0), jnp.array(1), jnp.arange(3))
    split = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], federation.train)
    run = jax.jit(
        lambda *weights: gradients.batch_gradients(problem, context, models, split, *weights)
    )
    return run(), run(jnp.array(WEIGHTS))


@pytest.mark.slow
@pytest.mark.parametrize("hidden", (2, 4000), ids=("models_at_once", "one_by_one"))
def test_negligible_weight_skips_a_model(federation, hidden):
    (losses, grads), (weighed_losses, weighed) = both(federation, hidden)
    assert not np.isfinite(losses[1])  # so a gradient that is computed shows, even multiplied by 0
    assert weighed_losses[1] == 0
    kept = np.array([0, 2])
    np.testing.assert_array_equal(weighed_losses[kept], losses[kept])
    for new, old in zip(jax.tree.leaves(weighed), jax.tree.leaves(grads), strict=True):
        assert not new[1].any()
        expected = 7 * WEIGHTS[kept].reshape(-1, *[1] * (old.ndim - 1)) * old[kept]  # 7 examples
        np.testing.assert_allclose(new[kept], expected, rtol=1e-6, atol=1e-6)
        assert np.abs(old[kept]).max() > 0


METHODS = {
    "gradient": ("federico", {"neighbors": 2}),
    "centralized": ("federico_centralized", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", METHODS)
def test_skipping_changes_no_model(kind, monkeypatch):
    name, hyperparameters = METHODS[kind]
    federation = toys.make_federation([9, 6, 8], features=4)
    federation.train.x[:] *= 20  # losses far apart

    def final(threshold):
        monkeypatch.setattr(gradients, "NEGLIGIBLE", threshold)
        problem = toys.make_problem(federation, hidden=(5,), batch_size=4)
        algorithm = toys.make_algorithm(name, problem, **hyperparameters)
        return toys.train(algorithm, problem, federation.client_data, 6)[0][-1]

    skipping = final(1e-12)
    computing = final(-1.0)
    toys.assert_trees_close(skipping.models, computing.models, rtol=1e-5, atol=1e-6)
    rows = skipping.rows
    weights = rows.weights if name == "federico" else np.exp(rows)
    assert np.any(weights < 1e-12)


@pytest.mark.slow
def test_local_training_of_each_model_has_noise_of_its_own():
    federation = toys.make_federation((2, 4), "regression")
    problem = toys.make_problem(federation, optax.sgd(0.05), privacy=Privacy(1.0, 1.0))
    solver = problem.solver
    params = problem.init_model(jax.random.key(1), jnp.int32(0))
    split = jax.tree.map(lambda leaf: leaf[1], federation.train)
    context = ClientContext(jax.random.key(2), jnp.int32(0), jnp.int32(0), jnp.arange(2))
    models = tree.repeat(tree.stack_one(params), 2)
    _, changes = gradients.local_changes(problem, context, models, jnp.ones(2), split)
    batch = solver.take_batch(context.key, None, split, jnp.int32(0))
    for number in range(2):
        grads = jax.grad(solver.mean_loss)(params, batch.for_model(number))
        own = jax.tree.map(lambda leaf, n=number: leaf[n], changes)
        toys.assert_trees_close(own, tree.scale(grads, -0.05), rtol=1e-4, atol=1e-6)
    kernel = changes["Dense_0"]["kernel"]
    assert np.abs(kernel[0] - kernel[1]).max() > 1e-3  # equal models on equal examples


@pytest.mark.slow
def test_local_training_skips_a_model_of_negligible_weight(federation):
    problem = toys.make_problem(federation, optax.sgd(0.05), hidden=(2,))
    models = problem.init_models(jax.random.key(0), 3, common=False)
    context = ClientContext(jax.random.key(1), jnp.array(0), jnp.array(0), jnp.arange(3))
    split = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], federation.train)
    losses, changes = gradients.local_changes(problem, context, models, WEIGHTS, split)
    weighed = np.array([True, False, True])
    np.testing.assert_array_equal(np.asarray(losses) > 0, weighed)
    for leaf in jax.tree.leaves(changes):
        moved = np.abs(np.asarray(leaf)).reshape(3, -1).max(axis=1) > 0
        np.testing.assert_array_equal(moved, weighed)


HELD = np.array([[[0, 1, 2], [1, 2, 0], [2, 0, 1]]])  # by round and client, its own model first


@pytest.mark.slow
@pytest.mark.parametrize("update", ["gradient", "delta"])
@pytest.mark.parametrize("name", ["federico", "federico_friends"])
def test_batch_statistics_are_means_by_the_weights_of_the_gradients(name, update):
    """Also where an owner has far fewer examples than those who train its model."""
    sizes = np.array([2, 40, 11])
    federation = toys.make_federation(sizes, features=4)
    *_, states, _ = toys.play(
        name,
        federation,
        1,
        optax.sgd(0.0),
        {"neighbors": 2, "update": update},
        HELD,
        model=toys.Normalized,
    )
    means = [federation.train.x[k, :n].mean(axis=0) for k, n in enumerate(sizes)]
    variances = [federation.train.x[k, :n].var(axis=0) for k, n in enumerate(sizes)]
    weights = np.zeros((3, 3))
    divisors = np.zeros((3, 3))
    for k, held in enumerate(HELD[0]):
        found = np.asarray(states[1].rows.weights)[k]
        if found.ndim == 1:
            weights[k, held] = found * sizes[k]
            divisors[k, held] = weights[k, held]
        else:  # FedeRiCoFriends weighs each example; in local training, relative to the largest weight
            weights[k, held] = found.sum(axis=1)
            divisors[k, held] = found.max(axis=1) * sizes[k]
            if update == "gradient":
                divisors[k, held] = weights[k, held]
    shares = weights / divisors.sum(axis=0)
    statistics = states[1].models["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(statistics["mean"], 0.3 * shares.T @ means, rtol=1e-4, atol=1e-6)
    expected = 1 + 0.3 * (shares.T @ variances - shares.sum(axis=0)[:, None])
    np.testing.assert_allclose(statistics["var"], expected, rtol=1e-4, atol=1e-6)
