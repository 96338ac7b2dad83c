"""FedNova by hand on quadratics, its draws of epochs, and its limits."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from by_hand import by_hand
from quadratics import MINI, OPTIMIZER, RATE, SIZES, gradient, play, vectors

COPIES = (1, 6, 2, 5, 0, 4, 3)
MOMENTUM = optax.sgd(RATE, 0.9)


def copies(sizes=COPIES):
    """Clients with n_k copies of one example, so that every mini-batch has the full gradient."""
    federation = toys.make_federation(sizes, "regression")
    for leaf in (federation.train.x, federation.train.y):
        for k, size in enumerate(sizes):
            leaf[k, :size] = leaf[k, :1]
    return federation


def server_step(federation, theta, steps, *, momentum=0.0, mu=0.0, rate=RATE):
    """The server's next model, by the paper's a_k in closed form."""
    sizes = federation.train.size
    share = sizes / sizes.sum()
    directions = np.zeros((len(sizes), len(theta)))
    lengths = np.zeros(len(sizes))
    for k in np.flatnonzero(sizes):
        own = theta.copy()
        speed = np.zeros_like(theta)
        for _ in range(steps[k]):
            speed = momentum * speed + gradient(federation, k, own) + mu * (own - theta)
            own = own - rate * speed
        lengths[k] = (steps[k] - momentum * (1 - momentum ** steps[k]) / (1 - momentum)) / (
            1 - momentum
        )
        if mu:
            lengths[k] = (1 - (1 - rate * mu) ** steps[k]) / (rate * mu)
        directions[k] = (theta - own) / lengths[k]
    return theta - share @ lengths * (share @ directions)


def fednova(momentum, mu):
    """A round of mini-batches of two; clients with more examples take more steps."""

    def reference(rounds):
        theta = rounds.start("models")[0]
        steps = rounds.epochs * -(-rounds.sizes // 2)
        for _ in rounds:
            theta = server_step(rounds.federation, theta, steps, momentum=momentum, mu=mu)
            yield {"models": [theta]}

    return reference


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 2.0)])
def test_by_hand(momentum, mu):
    optimizer = MOMENTUM if momentum else OPTIMIZER
    options = {"federation": copies(), "optimizer": optimizer, "batch_size": 2}
    by_hand("fednova", fednova(momentum, mu), hyperparameters={"mu": mu}, **options)


@pytest.mark.slow
def test_of_equal_steps_it_is_fedprox():
    equal = {"batch_size": 2, "steps": 5, "rounds": 3, "hyperparameters": {"mu": 1.5}}
    expected = vectors(play("fedprox", **equal)[2][-1].models)
    np.testing.assert_allclose(
        vectors(play("fednova", **equal)[2][-1].models), expected, rtol=1e-6, atol=1e-6
    )


def test_clients_draw_their_epochs_anew_in_every_round():
    """Finds the draws of three clients that explain a round, in place of the solver's three epochs."""
    federation = copies((2, 5, 3))
    hyperparameters = {"min_epochs": 2, "max_epochs": 4}
    states = toys.play(
        "fednova", federation, 12, OPTIMIZER, hyperparameters, batch_size=2, epochs=3
    ).states
    every = list(itertools.product((2, 3, 4), repeat=3))
    drawn = []
    for before, after in itertools.pairwise(states):
        theta = vectors(before.models)[0]
        found = vectors(after.models)[0]
        steps = np.array(every) * [1, 3, 2]
        errors = [np.abs(server_step(federation, theta, each) - found).max() for each in steps]
        drawn.append(every[int(np.argmin(errors))])
        assert min(errors) < 1e-5
    for k in range(3):
        assert {epochs[k] for epochs in drawn} == {2, 3, 4}
    assert any(len(set(epochs)) > 1 for epochs in drawn)


@pytest.mark.long
def test_epochs_that_are_all_alike_are_the_solver_s():
    drawn = play(
        "fednova", hyperparameters={"min_epochs": 2, "max_epochs": 2}, **MINI | {"epochs": 1}
    )[2][-1]
    toys.assert_trees_close(drawn.models, play("fednova", **MINI)[2][-1].models)


def test_more_epochs_are_more_mini_batches_for_the_ledger():
    problem = toys.make_problem(toys.make_federation(SIZES, "regression"), batch_size=2)

    def passes(**hyperparameters):
        return toys.make_algorithm("fednova", problem, **hyperparameters).ledger.passes

    assert (passes(), passes(max_epochs=5)) == (1, 5)


def falling(number):
    """Learning rates of 1, 1/2, 0, ... times the solver's."""
    return jnp.where(number < 2, 0.5**number, 0.0)


def of_a_schedule(rounds):
    """The round's learning rate scales the steps and a_k; with rate 0, nothing moves."""
    theta = rounds.start("models")[0]
    steps = rounds.epochs * -(-rounds.sizes // 2)
    for rate in (RATE, RATE / 2):
        theta = server_step(rounds.federation, theta, steps, mu=2.0, rate=rate)
        yield {"models": [theta]}
    yield {"models": [theta]}


def test_the_way_follows_the_schedule():
    options = {"hyperparameters": {"mu": 2.0}, "federation": copies(), "batch_size": 2}
    by_hand("fednova", of_a_schedule, schedule=falling, **options)


@pytest.mark.long
def test_of_one_client_it_is_fedavg_whatever_the_optimizer():
    federation = toys.make_federation((5,), "regression")
    options = {"optimizer": optax.adam(0.05), "batch_size": 2, "epochs": 3}
    found, fedavg = (
        toys.play(name, federation, 3, **options).states[-1].models
        for name in ("fednova", "fedavg")
    )
    toys.assert_trees_close(found, fedavg, rtol=1e-5, atol=1e-6)
