"""Clients' optimizers of a shared model, which last from round to round, by hand."""

import itertools

import numpy as np
import optax
import pytest
import toys
from quadratics import OPTIMIZER, RATE, gradient, vectors
from staged import client_notes, staged

from pfljax.stages.faults import Faults

SIZES = (3, 5, 2, 4)
MOMENTUM = 0.9
FEDERATION = toys.make_federation(SIZES, "regression")
SGD = optax.sgd(RATE, momentum=MOMENTUM)


def played(problem, rounds=4, **settings):
    """(states, records) of FedAvg."""
    method = toys.make_algorithm("fedavg", problem)
    algorithm = staged(problem, method, FEDERATION, **settings)
    return toys.train(algorithm, problem, FEDERATION.client_data, rounds)


@pytest.mark.parametrize("keeps", [True, False])
def test_momentum_lasts_if_it_is_kept(keeps):
    """m_k <- beta m_k + g_k(theta); theta_k = theta - eta m_k, one full batch a round."""
    problem = toys.make_problem(FEDERATION, SGD)._replace(keep_optimizer=keeps)
    states, _ = played(problem)
    memory = np.zeros((len(SIZES), 4))
    theta = vectors(states[0].models)[0]
    for state in states[1:]:
        gradients = np.array([gradient(FEDERATION, k, theta) for k in range(len(SIZES))])
        memory = MOMENTUM * keeps * memory + gradients
        theta = theta - RATE * np.average(memory, axis=0, weights=SIZES)
        np.testing.assert_allclose(vectors(state.models)[0], theta, rtol=1e-4, atol=1e-6)


def test_who_fails_before_training_keeps_its_optimizer():
    problem = toys.make_problem(FEDERATION, SGD)._replace(keep_optimizer=True)
    states, records = played(problem, faults=Faults(dropout=0.5))
    started = [np.asarray(client_notes(state, "optimizers").started) for state in states]
    assert not started[0].any()
    failed = int(records[0].metrics["failed_clients"])
    assert 0 < failed < len(SIZES)
    assert started[1].sum() == len(SIZES) - failed
    for before, after in itertools.pairwise(started):
        assert (before <= after).all()


def test_nothing_is_kept_where_nothing_lasts():
    for keeps in (True, False):
        problem = toys.make_problem(FEDERATION, OPTIMIZER)._replace(keep_optimizer=keeps)
        state = toys.start(
            staged(problem, toys.make_algorithm("fedavg", problem), FEDERATION),
            problem,
            FEDERATION.client_data,
        )
        assert "optimizers" not in state.rows.notes


def test_a_schedule_goes_on_in_the_rounds_of_a_client():
    """Its step counts last in any run: rates fall with the steps that a client has taken."""
    rates = [RATE, RATE / 2, RATE / 4, RATE / 8]
    schedule = optax.piecewise_constant_schedule(RATE, {1: 0.5, 2: 0.5, 3: 0.5})
    problem = toys.make_problem(FEDERATION, optax.sgd(schedule))
    states, _ = played(problem)
    theta = vectors(states[0].models)[0]
    for rate, state in zip(rates, states[1:], strict=True):
        gradients = np.array([gradient(FEDERATION, k, theta) for k in range(len(SIZES))])
        theta = theta - rate * np.average(gradients, axis=0, weights=SIZES)
        np.testing.assert_allclose(vectors(state.models)[0], theta, rtol=1e-4, atol=1e-6)
