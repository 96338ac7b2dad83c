"""Fine-tuning before evaluation, for models and mixtures."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from quadratics import OPTIMIZER, RATE, SIZES, descend, gradient, play, vectors

from pfljax.contract import tree
from pfljax.contract.types import Mixture, Prediction, Start, State
from pfljax.evaluation.fine_tuning import MOST, fine_tuned, heaviest
from pfljax.exchange.plan import make_plan

KEY = jax.random.key(1)


def test_fedavg_so_tuned_is_fedavg_plus():
    """Its rounds are FedAvg's."""
    federation, _, states, _, found = play("fedavg_plus", hyperparameters={"tune_epochs": 3})
    problem = toys.make_problem(federation, OPTIMIZER)
    algorithm = fine_tuned(problem, toys.make_algorithm("fedavg", problem), 3)
    after = toys.predict(algorithm, problem, KEY, states[-1], federation.client_data)
    np.testing.assert_allclose(vectors(after.models), vectors(found.models), rtol=1e-5, atol=1e-6)


@toys.each_method(["local", "ifca"], fast=["local"], slow=["ifca"])
def test_a_model_takes_steps_on_its_client_s_data(name):
    federation, algorithm, states, _, _ = play(name, 1)
    problem = toys.make_problem(federation, OPTIMIZER)
    both = algorithm, fine_tuned(problem, algorithm, 2)
    before, after = (
        toys.predict(each, problem, KEY, states[-1], federation.client_data) for each in both
    )
    for k, (theta,) in enumerate(vectors(before.models)):
        np.testing.assert_allclose(
            vectors(after.models)[k], [descend(federation, k, theta, 2)], rtol=1e-4, atol=1e-5
        )


def first_models(federation, num):
    return jax.jit(functools.partial(toys.make_problem(federation).init_models, num=num))(
        jax.random.key(3)
    )


def mixing(federation, models, index, weights, own):
    """(a problem; FedAvg, whose clients mix these models: received ones, or if `own` made by themselves; its state)."""
    problem = toys.make_problem(federation, optax.sgd(RATE))
    algorithm = toys.make_algorithm("fedavg", problem)
    index = jnp.asarray(index)
    weights = jnp.asarray(weights)

    def select_models(context, row, size):
        return Mixture(index[context.client], weights[context.client])

    def make(context, received, row, data):
        return Prediction(tree.take(models, index[context.client]), weights[context.client])

    changed = {"predict": make} if own else {"select_models": select_models}
    return problem, dataclasses.replace(algorithm, **changed), State(Start(models=models))


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_of_a_mixture_all_models_take_steps_on_its_loss(own):
    """(sum_j w_j theta_j' x - y)^2 has for theta_j the gradient w_j times that of the mixed model."""
    federation = toys.make_federation(SIZES, "regression")
    index = np.arange(8).reshape(4, 2) if own else np.array([[0, 1], [2, 0], [1, 1], [0, 2]])
    weights = np.array([[0.3, 0.7], [1, 0], [0.5, 0.5], [0.9, 0.1]], np.float32)
    models = first_models(federation, index.max() + 1)
    problem, algorithm, state = mixing(federation, models, index, weights, own)
    after = toys.predict(
        fine_tuned(problem, algorithm, 2), problem, KEY, state, federation.client_data
    )
    np.testing.assert_array_equal(after.weights, weights)
    for k in range(4):
        each = vectors(models)[index[k]]
        for _ in range(2):
            each = each - RATE * np.outer(weights[k], gradient(federation, k, weights[k] @ each))
        np.testing.assert_allclose(vectors(after.models)[k], each, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.slow), True])
def test_of_a_mixture_of_many_models_the_heaviest_are_tuned(own):
    federation = toys.make_federation((3, 4), "regression")
    weights = np.zeros((2, 20), np.float32)
    weights[:, 2:18] = np.arange(1, 17) / np.arange(1, 17).sum()
    models = first_models(federation, 20)
    problem, algorithm, state = mixing(
        federation, models, np.tile(np.arange(20), (2, 1)), weights, own
    )
    after = toys.predict(
        fine_tuned(problem, algorithm, 1), problem, KEY, state, federation.client_data
    )
    heaviest = np.arange(17, 1, -1)
    for k in range(2):
        np.testing.assert_allclose(after.weights[k], weights[k, heaviest], rtol=1e-6)
        each = vectors(models)[heaviest]
        weight = weights[k, heaviest]
        each = each - RATE * np.outer(weight, gradient(federation, k, weight @ each))
        np.testing.assert_allclose(vectors(after.models)[k], each, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num", [MOST, MOST + 1])
def test_a_mixture_of_as_many_models_as_are_tuned_stays_as_it_is(num):
    weights = jnp.arange(1.0, num + 1)
    found = heaviest(Prediction({"w": weights}, weights))
    expected = np.arange(1, num + 1) if num == MOST else np.arange(num, 1, -1)
    np.testing.assert_array_equal(found.models["w"], expected)
    shares = expected if num == MOST else expected / expected.sum()
    np.testing.assert_allclose(found.weights, shares, rtol=1e-6)


def test_a_mixture_of_classifiers_gains_on_its_training_data():
    federation = toys.make_federation((6, 5, 6, 4))
    problem = toys.make_problem(federation, optax.sgd(RATE))
    algorithm = toys.make_algorithm("fedem", problem)
    clients = federation.client_data
    state = toys.start(algorithm, problem, clients)
    before, after = (
        np.asarray(toys.evaluate(each, problem, KEY, state, clients, federation.train)["loss"])
        for each in (algorithm, fine_tuned(problem, algorithm, 30))
    )
    assert (after < before).all()


# Those with models of their own to tune, and one of each kind.
TUNED = (*toys.KINDS, "fedavg", "pfedmb", "knn_per", "fedrod", "apfl", "mocha")


@toys.each_method(TUNED, fast=(), slow=("fedavg", "federico", "knn_per"))
def test_every_method_is_tuned_alike_on_every_plan(name):
    federation = toys.make_federation((3, 5, 1, 4))
    found = []
    for plan in (make_plan("map", devices=1), make_plan("vmap", devices=4)):
        problem = toys.make_problem(
            federation, optax.sgd(RATE), plan=plan, batch_size=2, hidden=(3,)
        )
        algorithm = fine_tuned(problem, toys.make_algorithm(name, problem), 2)
        clients = federation.client_data
        state = toys.start(algorithm, problem, clients)
        found.append(
            toys.evaluate(algorithm, problem, KEY, state, clients, federation.test)["loss"]
        )
    assert np.isfinite(found[0]).all()
    np.testing.assert_allclose(*found, rtol=1e-3)


def test_a_method_s_own_fine_tuning_wins_and_is_told_the_epochs():
    """This fine-tuning adds the number of epochs to the global model."""
    federation = toys.make_federation((2, 3))
    problem = toys.make_problem(federation)
    clients = federation.client_data

    def own(epochs):
        def moved(models):
            return jax.tree.map(lambda leaf: leaf + epochs, models)

        return dataclasses.replace(
            base, predict=lambda context, models, row, data: Prediction(moved(models))
        )

    base = toys.make_algorithm("fedavg", problem)
    algorithm = dataclasses.replace(base, fine_tuned=own)
    state = toys.init(algorithm, problem, KEY, clients)
    after = fine_tuned(problem, algorithm, 3)
    assert after.engine.tune is None and "tuned by each client" in after.report.scored
    assert "fine-tuning" in after.ledger.unaccounted
    found = toys.predict(after, problem, KEY, state, clients).models
    toys.assert_trees_close(
        found, jax.tree.map(lambda leaf: jnp.stack([leaf + 3] * 2), state.models)
    )
    assert fine_tuned(problem, algorithm, 0) is algorithm


def test_no_epochs_leave_a_method_as_it_is():
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation)
    algorithm = toys.make_algorithm("local", problem)
    assert fine_tuned(problem, algorithm, 0) is algorithm and algorithm.engine.tune is None
    assert "tuned by each client" in fine_tuned(problem, algorithm, 1).report.scored
