"""The general form, with a surrogate that a user would write."""

import numpy as np
import pytest
import toys
from by_hand import by_hand, entry, play

from pfljax.algorithms import METHODS
from pfljax.algorithms.common import surrogates


@pytest.fixture(scope="module")
def example():
    yield toys.load_example("own_surrogate")
    METHODS.pop("moreau")  # no method of the tests after these


STRENGTH = 3.0


def pfedme(rounds):
    """Local steps on the loss near w give theta; local steps in u on mu / 2 |theta - u|^2 are averaged."""
    w = rounds.start("models")[0]
    for _ in rounds:
        thetas = [
            rounds.descend(k, w, lambda theta, w=w: STRENGTH * (theta - w)) for k in rounds.clients
        ]
        moved = []
        for theta in thetas:
            u = w
            for _ in range(rounds.epochs):
                u = u - rounds.rate * STRENGTH * (u - theta)
            moved.append(u)
        w = rounds.mean(moved)
        yield {"models": [w], "rows": thetas}


def test_rounds_of_pfedme_by_hand(example):
    by_hand("moreau", pfedme, hyperparameters={"mu": STRENGTH}, rounds=2)


def test_without_a_server_it_is_the_same_on_the_complete_graph(example):
    rounds = play("moreau", hyperparameters={"mu": STRENGTH}, rounds=2, sizes=(5, 5, 5, 5))
    surrogate = example.Moreau(mu=STRENGTH).surrogate(rounds.problem)
    graph = surrogates.CommunicationGraph(graph="complete")
    algorithm = surrogates.decentralized(rounds.problem, surrogate, graph)
    states, _ = toys.train(algorithm, rounds.problem, rounds.federation.client_data, 2)
    found = entry(states[-1], "models")
    expected = np.broadcast_to(entry(rounds.states[-1], "models"), found.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_the_example_learns(example):
    assert example.main(rounds=8).accuracy > 0.6
