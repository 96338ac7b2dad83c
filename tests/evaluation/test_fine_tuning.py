"""Fine-tuning before evaluation, for models and mixtures."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from quadratics import RATE, SIZES, gradient, play, vectors

from pfljax.contract import tree
from pfljax.contract.types import Predictor
from pfljax.evaluation.fine_tuning import fine_tuned
from pfljax.exchange.plan import make_plan


def tuned(name, epochs, federation, plan=None, rounds=2, **options):
    """(the predictor after some rounds, the fine-tuned predictor, the problem)."""
    problem = toys.make_problem(federation, optax.sgd(RATE), plan=plan, **options)
    algorithm = toys.make_algorithm(name, problem)
    states, _ = toys.train(algorithm, problem, federation.client_data, rounds)
    before = jax.jit(algorithm.predictor)(jax.random.key(0), states[-1], federation.client_data)
    algorithm = fine_tuned(problem, algorithm, epochs)
    own = lambda key, predictor, clients: algorithm.predictor(key, states[-1], clients)
    fine_tune = algorithm.fine_tune or own
    return before, jax.jit(fine_tune)(jax.random.key(1), before, federation.client_data), problem


def test_fedavg_so_tuned_is_fedavg_plus():
    federation = toys.make_federation(SIZES, "regression")
    _, after, _ = tuned("fedavg", 3, federation)
    found = play("fedavg_plus", knobs={"tune_epochs": 3})[4]
    np.testing.assert_allclose(vectors(after.models), vectors(found.models), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["local", "ifca"])
def test_a_model_takes_steps_on_its_client_s_data(name):
    federation = toys.make_federation(SIZES, "regression")
    before, after, _ = tuned(name, 2, federation)
    for k, theta in enumerate(vectors(tree.take(before.models, before.index[:, 0]))):
        for _ in range(2):
            theta = theta - RATE * gradient(federation, k, theta)
        np.testing.assert_allclose(vectors(after.models)[k], theta, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(after.index, np.arange(4)[:, None])


@pytest.mark.parametrize("topology", ["shared", "own"])
def test_of_a_mixture_all_models_take_steps_on_its_loss(topology):
    """(sum_j w_j theta_j' x - y)^2 has for theta_j the gradient w_j times that of the mixed model."""
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE))
    algorithm = toys.make_algorithm("fedavg", problem)
    num = 8 if topology == "own" else 3
    models = problem.init_models(jax.random.key(3), num)
    index = np.arange(8).reshape(4, 2) if topology == "own" else np.array([[0, 1], [2, 0], [1, 1], [0, 2]])
    weights = np.array([[0.3, 0.7], [1, 0], [0.5, 0.5], [0.9, 0.1]], np.float32)
    before = Predictor(models, jnp.asarray(index, jnp.int32), jnp.asarray(weights), topology)
    after = fine_tuned(problem, algorithm, 2).fine_tune(jax.random.key(1), before, federation.client_data)
    assert after.topology == "own" and after.index.shape == (4, 2)
    np.testing.assert_array_equal(after.weights, weights)
    for k in range(4):
        own = vectors(models)[index[k]]
        for _ in range(2):
            own = own - RATE * np.outer(weights[k], gradient(federation, k, weights[k] @ own))
        np.testing.assert_allclose(vectors(after.models)[2 * k : 2 * k + 2], own, rtol=1e-3, atol=1e-4)


def test_of_a_mixture_of_many_models_the_heaviest_are_tuned():
    federation = toys.make_federation((3, 4), "regression")
    problem = toys.make_problem(federation, optax.sgd(RATE))
    weights = np.zeros((2, 20), np.float32)
    weights[:, 2:18] = np.arange(1, 17) / np.arange(1, 17).sum()
    index = jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32), (2, 20))
    before = Predictor(problem.init_models(jax.random.key(3), 20), index, jnp.asarray(weights), "shared")
    algorithm = toys.make_algorithm("fedavg", problem)
    after = fine_tuned(problem, algorithm, 1).fine_tune(jax.random.key(1), before, federation.client_data)
    assert after.index.shape == (2, 16) and tree.num_rows(after.models) == 32
    np.testing.assert_allclose(after.weights[0], np.arange(16, 0, -1) / np.arange(1, 17).sum(), rtol=1e-5)
    # The same if each client's models are adjacent, like peers' models after fetching.
    side_by_side = tree.take(before.models, index.reshape(-1))
    own = Predictor(side_by_side, jnp.arange(40, dtype=jnp.int32).reshape(2, 20), before.weights, "own")
    found = fine_tuned(problem, algorithm, 1).fine_tune(jax.random.key(1), own, federation.client_data)
    toys.assert_trees_close(found.models, after.models, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.weights, after.weights)


def test_a_mixture_of_classifiers_gains_on_its_training_data():
    federation = toys.make_federation((6, 5, 6, 4))
    before, after, problem = tuned("fedem", 30, federation)
    scores = [
        np.asarray(toys.evaluate(problem.plan, problem.model, predictor, federation.train)["loss"])
        for predictor in (before, after)
    ]
    assert (scores[1] < scores[0]).all()


FAST = ("fedavg", "federico")


@toys.each_method(fast=FAST)
def test_every_method_is_tuned_alike_on_every_plan(name):
    federation = toys.make_federation((3, 5, 1, 4))
    found = []
    for plan in (make_plan("map", devices=1), make_plan("vmap", devices=4)):
        _, after, problem = tuned(name, 2, federation, plan=plan, rounds=0, batch_size=2, hidden=(3,))
        assert tree.num_rows(after.models) == after.index.size
        found.append(toys.evaluate(problem.plan, problem.model, after, federation.test)["loss"])
    assert np.isfinite(found[0]).all()
    np.testing.assert_allclose(*found, rtol=1e-3)


def test_no_epochs_leave_a_method_as_it_is():
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation)
    algorithm = toys.make_algorithm("local", problem)
    assert fine_tuned(problem, algorithm, 0) is algorithm and algorithm.fine_tune is None
    assert "tuned by each client" in fine_tuned(problem, algorithm, 1).report.scored
