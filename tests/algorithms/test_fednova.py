"""FedNova by hand on quadratics, its draws of epochs, and its limits."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from quadratics import MINI, RATE, SIZES, gradient, play, vectors

COPIES = (1, 6, 2, 5, 0, 4, 3)


def copies(sizes=COPIES):
    """Clients with n_k copies of one example, so that every mini-batch has the full gradient."""
    federation = toys.make_federation(sizes, "regression")
    for leaf in (federation.train.x, federation.train.y):
        for k, size in enumerate(sizes):
            leaf[k, :size] = leaf[k, :1]
    return federation


def rounds_of(name, federation, rounds, optimizer=None, knobs=None, **training):
    return toys.play(name, federation, rounds, optimizer or optax.sgd(RATE), knobs, **training)[3:]


def averaged(federation, theta, steps, *, momentum=0.0, mu=0.0, rate=RATE):
    """The server's next model, by the paper's a_k in closed form."""
    sizes = federation.train.size
    share = sizes / sizes.sum()
    directions, lengths = np.zeros((len(sizes), len(theta))), np.zeros(len(sizes))
    for k in np.flatnonzero(sizes):
        own, speed = theta.copy(), np.zeros_like(theta)
        for _ in range(steps[k]):
            speed = momentum * speed + gradient(federation, k, own) + mu * (own - theta)
            own = own - rate * speed
        lengths[k] = (steps[k] - momentum * (1 - momentum ** steps[k]) / (1 - momentum)) / (1 - momentum)
        if mu:
            lengths[k] = (1 - (1 - rate * mu) ** steps[k]) / (rate * mu)
        directions[k] = (theta - own) / lengths[k]
    return theta - share @ lengths * (share @ directions)


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 2.0)])
def test_by_hand(momentum, mu):
    federation = copies()
    optimizer = optax.sgd(RATE, momentum or None)
    training = {"batch_size": 2, "epochs": 2}
    states, records = rounds_of("fednova", federation, 3, optimizer, {"mu": mu}, **training)
    plain, _ = rounds_of("fedprox", federation, 3, optimizer, {"mu": mu}, **training)
    theta, steps = vectors(states[0].models)[0], 2 * -(-np.array(COPIES) // 2)
    for number in range(3):
        theta = averaged(federation, theta, steps, momentum=momentum, mu=mu)
        np.testing.assert_allclose(vectors(states[number + 1].models)[0], theta, rtol=1e-4, atol=1e-5)
    assert np.abs(vectors(plain[-1].models)[0] - theta).max() > 1e-2
    assert records[0].up == 6 * (4 + 1 + 1) * 4  # d_k, a_k and n_k


def test_of_equal_steps_it_is_fedprox():
    equal = {"batch_size": 2, "steps": 5, "rounds": 3, "knobs": {"mu": 1.5}}
    expected = vectors(play("fedprox", **equal)[2][-1].models)
    np.testing.assert_allclose(vectors(play("fednova", **equal)[2][-1].models), expected, rtol=1e-6, atol=1e-6)


def test_clients_draw_their_epochs_anew_in_every_round():
    """Finds the draws of three clients that explain a round."""
    federation = toys.make_federation((2, 5, 3), "regression")
    knobs, drawn = {"least_epochs": 2, "most_epochs": 4}, []
    states, _ = rounds_of("fednova", federation, 12, knobs=knobs, steps=1)
    for before, after in itertools.pairwise(states):
        theta, found = vectors(before.models)[0], vectors(after.models)[0]
        every = list(itertools.product((2, 3, 4), repeat=3))
        errors = [np.abs(averaged(federation, theta, steps) - found).max() for steps in every]
        drawn.append(every[int(np.argmin(errors))])
        assert min(errors) < 1e-5
    for k in range(3):
        assert {epochs[k] for epochs in drawn} == {2, 3, 4}
    assert any(len(set(epochs)) > 1 for epochs in drawn)


def test_epochs_that_are_all_alike_are_the_solver_s():
    drawn = play("fednova", knobs={"least_epochs": 2, "most_epochs": 2}, **MINI | {"epochs": 1})[2][-1]
    toys.assert_trees_close(drawn.models, play("fednova", **MINI)[2][-1].models)


def test_more_epochs_are_more_mini_batches_for_the_ledger():
    problem = toys.make_problem(toys.make_federation(SIZES, "regression"), batch_size=2)
    passes = lambda **knobs: toys.make_algorithm("fednova", problem, **knobs).ledger.passes
    assert (passes(), passes(most_epochs=5)) == (1, 5)


def test_the_way_follows_the_schedule():
    """The round's learning rate cancels in a_k and scales the steps; with rate 0, nothing moves."""
    federation = copies()
    schedule = lambda number: jnp.where(number < 2, 0.5**number, 0.0)
    states, _ = rounds_of("fednova", federation, 3, batch_size=1, schedule=schedule)
    theta = averaged(federation, vectors(states[0].models)[0], COPIES)
    np.testing.assert_allclose(vectors(states[1].models)[0], theta, rtol=1e-4, atol=1e-5)
    theta = averaged(federation, theta, COPIES, rate=RATE / 2)
    np.testing.assert_allclose(vectors(states[2].models)[0], theta, rtol=1e-4, atol=1e-5)
    toys.assert_trees_close(states[3].models, states[2].models)


def test_of_one_client_it_is_fedavg_whatever_the_optimizer():
    federation = toys.make_federation((5,), "regression")
    options = {"optimizer": optax.adam(0.05), "batch_size": 2, "epochs": 3}
    found, fedavg = (rounds_of(name, federation, 3, **options)[0][-1].models for name in ("fednova", "fedavg"))
    toys.assert_trees_close(found, fedavg, rtol=1e-5, atol=1e-6)
