"""q-FFL by hand on quadratics, its default constant, and that it evens losses out."""

import numpy as np
import optax
import pytest
import toys
from quadratics import RATE, SIZES, descend, loss_of, play, vectors

from pfljax.contract.errors import ArgumentError


def test_q_ffl_by_hand():
    q, lipschitz = 2.0, 4.0
    federation, _, states, _, _ = play("q_ffl", epochs=2, knobs={"q": q, "lipschitz": lipschitz})
    w = vectors(states[0].models)[0]
    for number in range(2):
        moved, steps = 0.0, 0.0
        for k in range(4):
            loss = loss_of(federation, k, w)
            delta = lipschitz * (w - descend(federation, k, w, 2))
            moved = moved + loss**q * delta
            steps += q * loss ** (q - 1) * delta @ delta + lipschitz * loss**q
        w = w - moved / steps
        np.testing.assert_allclose(vectors(states[number + 1].models)[0], w, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_q_ffl_s_lipschitz_constant_is_one_over_the_learning_rate():
    federation = toys.make_federation(SIZES, "regression")
    problem, clients = toys.make_problem(federation, optax.sgd(RATE)), federation.client_data

    def moved(problem, **knobs):
        states, _ = toys.train(toys.make_algorithm("q_ffl", problem, **knobs), problem, clients, 2)
        return vectors(states[-1].models)

    by_default = moved(problem._replace(learning_rate=0.25))
    np.testing.assert_allclose(by_default, moved(problem, lipschitz=4.0), rtol=1e-5)
    assert np.abs(by_default - moved(problem, lipschitz=1.0)).max() > 1e-3
    unknown = problem._replace(learning_rate=None)
    with pytest.raises(ArgumentError, match=r"^q_ffl\.lipschitz: accepted: .*learning rate is unknown$"):
        toys.make_algorithm("q_ffl", unknown)
    np.testing.assert_allclose(moved(unknown, lipschitz=4.0), by_default, rtol=1e-5)
