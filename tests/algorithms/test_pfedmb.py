"""pFedMB: Eq. 1 to 6 against NumPy, and fine-tuning."""

import dataclasses

import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest
import toys
from by_hand import by_hand, entry, play
from quadratics import RATE, SIZES, nearest_on_simplex
from scipy.special import softmax

from pfljax import models
from pfljax.algorithms.pfedmb import mix
from pfljax.evaluation.fine_tuning import fine_tuned

B = 3
KEY = jax.random.key(1)


def client_step(rounds, k, shared, raw, simplex, rate, epochs):
    """Alpha, then the branches: (alpha's parameters, alpha, the client's branches)."""
    raw = learn_alpha(rounds, k, shared, raw, simplex, rate, epochs)
    alpha = alpha_of(raw, simplex)
    mine = shared.copy()
    for _ in range(epochs):  # Eq. 4, the new alpha fixed
        mine = mine - RATE * np.outer(alpha, rounds.gradient(k, alpha @ mine))
    return raw, alpha, mine


def learn_alpha(rounds, k, shared, raw, simplex, rate, epochs):
    """Eq. 3, W as received."""
    for _ in range(epochs):
        alpha = alpha_of(raw, simplex)
        slope = shared @ rounds.gradient(k, alpha @ shared)
        if simplex == "softmax":
            raw = raw - rate * (np.diag(alpha) - np.outer(alpha, alpha)) @ slope
        else:
            raw = nearest_on_simplex(raw - rate * slope)
    return raw


def alpha_of(raw, simplex):
    return softmax(raw) if simplex == "softmax" else raw


def pfedmb(simplex, averaging, rate):
    """Algorithm 1 with a linear model: one layer, so that alpha (B,) mixes B vectors."""

    def reference(rounds):
        shared = rounds.start("models")[0]
        assert np.abs(np.diff(shared, axis=0)).max() > 0.1  # branches start apart
        raw = np.full((4, B), 0.0 if simplex == "softmax" else 1 / B)

        for _ in rounds:
            trained = []
            weights = []
            alphas = []
            for k in rounds.clients:
                raw[k], alpha, mine = client_step(
                    rounds, k, shared, raw[k], simplex, rate, rounds.epochs
                )
                trained.append(mine)
                alphas.append(alpha)
                weights.append(rounds.sizes[k] * (alpha if averaging == "alpha" else np.ones(B)))

            # Eq. 5 or 6; a branch to which no client gives weight stays
            shared = shared.copy()
            for b in range(B):
                weight = np.array(weights)[:, b]
                if weight.sum() > 0:
                    shared[b] = np.average([mine[b] for mine in trained], axis=0, weights=weight)
            predictions = (np.array(alphas) @ shared)[:, None]
            yield {"models": [shared], "clients.row": raw[:, None], "predictions": predictions}

    return reference


@pytest.mark.parametrize(("simplex", "averaging"), [("softmax", "plain"), ("projection", "alpha")])
def test_rounds_by_hand(simplex, averaging):
    hyperparameters = {
        "branches": B,
        "alpha_learning_rate": 0.3,
        "simplex": simplex,
        "averaging": averaging,
    }
    by_hand("pfedmb", pfedmb(simplex, averaging, 0.3), hyperparameters=hyperparameters)


def test_a_branch_without_weight_stays():
    """Large steps put all weight of each client on one branch."""
    hyperparameters = {
        "branches": B,
        "alpha_learning_rate": 1e4,
        "simplex": "projection",
        "averaging": "alpha",
    }
    rounds = by_hand(
        "pfedmb", pfedmb("projection", "alpha", 1e4), hyperparameters=hyperparameters, rounds=1
    )
    alpha = entry(rounds.states[-1], "clients.row")[:, 0]
    assert set(alpha.ravel().tolist()) == {0.0, 1.0}
    before, after = (entry(state, "models")[0] for state in rounds.states)
    stays = (before == after).all(axis=1)
    np.testing.assert_array_equal(stays, alpha.sum(axis=0) == 0)
    assert 0 < stays.sum() < B


def played():
    """Rounds of the projecting form, whose programs other tests have."""
    hyperparameters = {
        "branches": B,
        "alpha_learning_rate": 0.3,
        "simplex": "projection",
        "averaging": "alpha",
    }
    return play("pfedmb", hyperparameters=hyperparameters)


def test_fine_tuning_repeats_a_client_s_step():
    """A client's step of 3 epochs, from where it is."""
    rounds = played()
    tuned = fine_tuned(rounds.problem, rounds.algorithm, 3)
    after = toys.predict(
        tuned, rounds.problem, KEY, rounds.states[-1], rounds.federation.client_data
    )
    shared = entry(rounds.states[-1], "models")[0]
    raw = entry(rounds.states[-1], "clients.row")[:, 0]
    for k in rounds.clients:
        _, alpha, mine = client_step(rounds, k, shared, raw[k], "projection", 0.3, 3)
        np.testing.assert_allclose(entry(after, "models")[k, 0], alpha @ mine, rtol=2e-3, atol=2e-4)


def test_newcomers_are_fine_tuned_alike():
    """A newcomer with a client's data learns alpha for R rounds, then takes the client's step."""
    rounds = played()
    tuned = fine_tuned(rounds.problem, rounds.algorithm, 3)
    after = toys.adapt(tuned, rounds.problem, KEY, rounds.states[-1], rounds.federation.client_data)
    shared = entry(rounds.states[-1], "models")[0]
    for k in rounds.clients:
        steps = rounds.problem.rounds * rounds.epochs
        raw = learn_alpha(rounds, k, shared, np.full(B, 1 / B), "projection", 0.3, steps)
        _, alpha, mine = client_step(rounds, k, shared, raw, "projection", 0.3, 3)
        np.testing.assert_allclose(entry(after, "models")[k, 0], alpha @ mine, rtol=2e-3, atol=2e-4)


def one_branch():
    """(The rounds of the form with one branch, what fine-tunes it, and what would fine-tune any method)."""
    rounds = play("pfedmb", rounds=0, epochs=1, hyperparameters={"branches": 1})
    own = fine_tuned(rounds.problem, rounds.algorithm, 3)
    general = fine_tuned(rounds.problem, dataclasses.replace(rounds.algorithm, fine_tuned=None), 3)
    return rounds, own, general


def test_fine_tuning_is_its_own():
    rounds, own, general = one_branch()
    assert own.engine.tune is None
    assert own.report.scored == general.report.scored != rounds.algorithm.report.scored


@pytest.mark.slow
def test_with_one_branch_its_fine_tuning_is_the_general_one():
    rounds, *both = one_branch()
    clients = rounds.federation.client_data
    state = rounds.states[-1]
    models = [toys.predict(tuned, rounds.problem, KEY, state, clients).models for tuned in both]
    toys.assert_trees_close(*models, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("cnn", (8, 8, 2), 3),
        pytest.param("mobilenet_v2", (8, 8, 1), 3, marks=pytest.mark.long),
        pytest.param("lstm", (4,), 9, marks=pytest.mark.slow),
    ],
)
def test_any_model_becomes_a_multi_branch_one(name, shape, classes):
    """Eq. 1: all weight on one branch gives that branch; another branch in each layer gives a mix of layers."""
    model = models.make(name, shape, "classification", classes, hidden=(4,), channels=(3, 3))
    problem = toys.make_problem(toys.make_federation((4, 3)))._replace(model=model)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    stack = jax.tree.map(lambda leaf: np.float32(rng.normal(size=(B, *leaf.shape))), shapes)
    num = len(model.layers)
    mix_stack = jax.jit(lambda alpha: mix(problem, alpha, stack))

    one = mix_stack(jnp.tile(jnp.eye(B)[1], (num, 1)))
    toys.assert_trees_close(one, jax.tree.map(lambda leaf: leaf[1], stack))

    picks = np.arange(num) % B
    mixed = mix_stack(jnp.eye(B)[picks])
    assert jax.tree.structure(mixed) == jax.tree.structure(one)
    for names, pick in zip(model.layers, picks, strict=True):
        for top in names:
            toys.assert_trees_close(
                mixed[top], jax.tree.map(lambda leaf, b=pick: leaf[b], stack[top])
            )

    even = mix_stack(jnp.array([[0.5, 0.3, 0.2]]))  # one row for all layers
    expected = jax.tree.map(lambda leaf: 0.5 * leaf[0] + 0.3 * leaf[1] + 0.2 * leaf[2], stack)
    toys.assert_trees_close(even, expected, rtol=1e-5, atol=1e-6)


def test_alpha_is_one_vector_a_layer():
    hyperparameters = {"branches": B, "alpha_learning_rate": 5.0}
    played = networks.play("pfedmb", 1, SIZES, hyperparameters, hidden=(4,), epochs=2)
    start, alpha = (state.clients.row for state in (played.states[0], played.states[-1]))
    assert alpha.shape == (4, 2, B)
    np.testing.assert_allclose(start, 1 / B, rtol=1e-6)
    np.testing.assert_allclose(alpha.sum(axis=-1), 1, rtol=1e-5)
    assert np.abs(alpha[:, 0] - alpha[:, 1]).max() > 0.01

    row = jax.tree.map(lambda leaf: leaf[2], played.states[-1].rows)
    report = played.algorithm.report.collaboration(None, row)
    np.testing.assert_allclose(report["alpha"], alpha[2], rtol=1e-6)
    np.testing.assert_allclose(report["weights"], alpha[2].mean(axis=0), rtol=1e-6)


def test_or_alpha_is_one_vector_for_all_layers():
    federation = toys.make_federation(SIZES)
    problem = toys.make_problem(federation, hidden=(4,))
    algorithm = toys.make_algorithm("pfedmb", problem, branches=B, per_layer=False)
    state = jax.eval_shape(lambda: toys.init(algorithm, problem, KEY, federation.client_data))
    assert state.clients.row.shape == (4, 1, B)
