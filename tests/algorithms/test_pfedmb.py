"""pFedMB: Eq. 1 to 6 against NumPy, and what it is for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from quadratics import RATE, SIZES, gradient, nearest_on_simplex, play, vectors
from scipy.special import softmax

from pfljax import models
from pfljax.algorithms.common import branches
from pfljax.evaluation.fine_tuning import fine_tuned

B = 3


def client_step(federation, k, shared, raw, simplex, rate, epochs):
    """Alpha, then the branches, by hand: (alpha's parameters, alpha, the client's branches)."""
    alpha_of = softmax if simplex == "softmax" else lambda raw: raw
    for _ in range(epochs):  # Eq. 3, W as received
        alpha = alpha_of(raw)
        slope = shared @ gradient(federation, k, alpha @ shared)
        if simplex == "softmax":
            raw = raw - rate * (np.diag(alpha) - np.outer(alpha, alpha)) @ slope
        else:
            raw = nearest_on_simplex(raw - rate * slope)
    alpha, mine = alpha_of(raw), shared.copy()
    for _ in range(epochs):  # Eq. 4, the new alpha fixed
        mine = mine - RATE * np.outer(alpha, gradient(federation, k, alpha @ mine))
    return raw, alpha, mine


@pytest.mark.parametrize("averaging", ["alpha", "plain"])
@pytest.mark.parametrize("simplex", ["softmax", "projection"])
def test_rounds_by_hand(simplex, averaging):
    """A linear model: one layer, so that alpha (B,) mixes B vectors."""
    rate, epochs = 0.3, 2
    knobs = {"branches": B, "alpha_rate": rate, "simplex": simplex, "averaging": averaging}
    federation, algorithm, states, records, predictions = play("pfedmb", epochs=epochs, rounds=3, knobs=knobs)
    own = lambda state: vectors(jax.tree.map(lambda leaf: leaf[0], state.models))
    shared, raw = own(states[0]), np.full((4, B), 0.0 if simplex == "softmax" else 1 / B)
    assert np.abs(np.diff(shared, axis=0)).max() > 0.1  # branches start apart
    for number in range(3):
        steps = [client_step(federation, k, shared, raw[k], simplex, rate, epochs) for k in range(4)]
        raw, alphas, trained = (np.array(part) for part in zip(*steps, strict=True))
        size = np.array(SIZES)[:, None]
        weight = size * (alphas if averaging == "alpha" else np.ones_like(alphas))  # Eq. 5 or 6
        total = weight.sum(axis=0)
        mean = (weight[..., None] * trained).sum(axis=0) / np.where(total > 0, total, 1)[:, None]
        shared = np.where(total[:, None] > 0, mean, shared)
        np.testing.assert_allclose(own(states[number + 1]), shared, rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(vectors(predictions.models)[:, 0], alphas @ shared, rtol=2e-3, atol=2e-4)
    assert records[0].down == 4 * 4 * B * 4 and records[0].up == 4 * (4 * B + B) * 4

    problem = toys.make_problem(federation, optax.sgd(RATE), epochs=epochs)
    tuned = fine_tuned(problem, algorithm, 3)
    after = toys.predict(tuned, problem, jax.random.key(1), states[-1], federation.client_data)
    for k in range(4):  # a client's step of 3 epochs, from where it stands
        _, alpha, mine = client_step(federation, k, shared, raw[k], simplex, rate, 3)
        np.testing.assert_allclose(vectors(after.models)[k, 0], alpha @ mine, rtol=2e-3, atol=2e-4)


def test_newcomers_are_fine_tuned_alike():
    """A newcomer with a client's data learns alpha for R rounds, then takes the client's step."""
    federation, algorithm, states, _, _ = play("pfedmb", rounds=2, knobs={"branches": B, "alpha_rate": 0.3})
    problem, clients = toys.make_problem(federation, optax.sgd(RATE)), federation.client_data
    after = toys.adapt(fine_tuned(problem, algorithm, 2), problem, jax.random.key(1), states[-1], clients)
    shared = vectors(jax.tree.map(lambda leaf: leaf[0], states[-1].models))
    for k in range(4):
        raw = np.full(B, 1 / B)
        for _ in range(problem.rounds):
            raw = client_step(federation, k, shared, raw, "projection", 0.3, 1)[0]
        _, alpha, mine = client_step(federation, k, shared, raw, "projection", 0.3, 2)
        np.testing.assert_allclose(vectors(after.models)[k, 0], alpha @ mine, rtol=2e-3, atol=2e-4)


def test_with_one_branch_its_fine_tuning_is_the_general_one():
    federation, algorithm, states, _, _ = play("pfedmb", knobs={"branches": 1})
    problem, clients, key = toys.make_problem(federation, optax.sgd(RATE)), federation.client_data, jax.random.key(1)
    own = fine_tuned(problem, algorithm, 3)
    general = fine_tuned(problem, dataclasses.replace(algorithm, fine_tuned=None), 3)
    assert own.tune is None and own.report.scored == general.report.scored != algorithm.report.scored
    models = [toys.predict(tuned, problem, key, states[-1], clients).models for tuned in (own, general)]
    toys.assert_trees_close(*models, rtol=1e-4, atol=1e-5)


def test_a_branch_without_weight_stays():
    knobs = {"branches": 2, "alpha_rate": 1e4, "simplex": "projection"}
    federation, algorithm, states, _, _ = play("pfedmb", rounds=1, sizes=(3, 3), knobs=knobs)
    problem = toys.make_problem(federation)
    used = toys.used(algorithm, problem, jax.random.key(0), states[1], federation.client_data)
    alpha = np.asarray(used["alpha"])[:, 0]
    assert set(alpha.ravel().tolist()) == {0.0, 1.0}
    unused = np.flatnonzero(alpha.sum(axis=0) == 0)
    for branch in range(2):
        before, after = (np.asarray(state.models["Dense_0"]["kernel"])[0, branch] for state in states)
        assert np.array_equal(before, after) == (branch in unused)


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("mlp", (5,), 3),
        ("cnn", (8, 8, 2), 3),
        pytest.param("mobilenet_v2", (8, 8, 1), 3, marks=pytest.mark.slow),
        pytest.param("lstm", (4,), 9, marks=pytest.mark.slow),
    ],
)
def test_any_model_becomes_a_multi_branch_one(name, shape, classes):
    """Eq. 1: all weight on one branch gives that branch; another branch in each layer gives a mix of layers."""
    model = models.make(name, shape, "classification", classes, hidden=(4,), channels=(3, 3))
    problem = toys.make_problem(toys.make_federation((4, 3)))._replace(model=model)
    stack = jax.vmap(model.init)(jax.random.split(jax.random.key(0), B))
    num = len(model.layers)
    one = branches.mix(problem, jnp.tile(jnp.eye(B)[1], (num, 1)), stack)
    toys.assert_trees_close(one, jax.tree.map(lambda leaf: leaf[1], stack))
    picks = np.arange(num) % B
    mixed = branches.mix(problem, jnp.eye(B)[picks], stack)
    assert jax.tree.structure(mixed) == jax.tree.structure(one)
    for names, pick in zip(model.layers, picks, strict=True):
        for top in names:
            toys.assert_trees_close(mixed[top], jax.tree.map(lambda leaf, b=pick: leaf[b], stack[top]))
    weights = jnp.array([[0.5, 0.3, 0.2]])
    even = branches.mix(problem, weights, stack)
    expected = jax.tree.map(lambda leaf: 0.5 * leaf[0] + 0.3 * leaf[1] + 0.2 * leaf[2], stack)
    toys.assert_trees_close(even, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("per_layer", [True, False])
def test_alpha_is_one_vector_a_layer_or_one_for_all(per_layer):
    federation = toys.make_federation(SIZES)
    knobs = {"branches": B, "per_layer": per_layer, "alpha_rate": 5.0}
    played = toys.play("pfedmb", federation, 3, optax.sgd(RATE), knobs, hidden=(4,), epochs=2)
    _, problem, algorithm, states, _ = played
    start, told = (
        toys.used(algorithm, problem, jax.random.key(0), state, federation.client_data)
        for state in (states[0], states[-1])
    )
    assert told["alpha"].shape == (4, 2 if per_layer else 1, B)
    np.testing.assert_allclose(told["alpha"].sum(axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(told["weights"], told["alpha"].mean(axis=1), rtol=1e-6)
    if per_layer:
        assert np.abs(told["alpha"][:, 0] - told["alpha"][:, 1]).max() > 0.01
    np.testing.assert_allclose(start["alpha"], 1 / B, rtol=1e-6)
