"""q-FFL by hand on quadratics, and its default constant."""

import numpy as np
import pytest
import toys
from by_hand import by_hand
from quadratics import OPTIMIZER, SIZES, loss_of, vectors

from pfljax.contract.errors import ArgumentError

Q = 2.0
LIPSCHITZ = 4.0


def q_ffl(rounds):
    """Algorithm 2: the sum of F^q Delta w, by the sum of q F^(q - 1) |Delta w|^2 + L F^q."""
    w = rounds.start("models")[0]
    for _ in rounds:
        moved = 0.0
        steps = 0.0
        for k in rounds.clients:
            loss = loss_of(rounds.federation, k, w)
            delta = LIPSCHITZ * (w - rounds.descend(k, w))
            moved += loss**Q * delta
            steps += Q * loss ** (Q - 1) * delta @ delta + LIPSCHITZ * loss**Q
        w = w - moved / steps
        yield {"models": [w]}


def test_q_ffl_by_hand():
    by_hand("q_ffl", q_ffl, rounds=2, hyperparameters={"q": Q, "lipschitz": LIPSCHITZ})


@pytest.mark.slow
def test_q_ffl_s_lipschitz_constant_is_one_over_the_learning_rate():
    federation = toys.make_federation(SIZES, "regression")
    problem = toys.make_problem(federation, OPTIMIZER)
    clients = federation.client_data

    def moved(problem, **hyperparameters):
        states, _ = toys.train(
            toys.make_algorithm("q_ffl", problem, **hyperparameters), problem, clients, 2
        )
        return vectors(states[-1].models)

    by_default = moved(problem._replace(learning_rate=0.25))
    np.testing.assert_allclose(by_default, moved(problem, lipschitz=4.0), rtol=1e-5)
    assert np.abs(by_default - moved(problem, lipschitz=1.0)).max() > 1e-3
    unknown = problem._replace(learning_rate=None)
    with pytest.raises(
        ArgumentError, match=r"^q_ffl\.lipschitz: accepted: .*learning rate is unknown$"
    ):
        toys.make_algorithm("q_ffl", unknown)
    np.testing.assert_allclose(moved(unknown, lipschitz=4.0), by_default, rtol=1e-5)
