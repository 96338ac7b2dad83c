"""pFedMe: the Moreau minimizer of quadratics, and FedAvg as a limit."""

import jax
import numpy as np
import toys
from quadratics import RATE, SIZES, play, quadratic, vectors


def test_pfedme_s_personal_model_is_the_moreau_minimizer():
    """On a quadratic theta = (2 A + lambda)^-1 (2 b + lambda w), and w steps by eta lambda (w - theta)."""
    strength = 2.0
    knobs = {"strength": strength, "steps": 400, "rate": 0.05, "beta": 0.5}
    federation, algorithm, states, _, predictions = play("pfedme", rounds=1, epochs=2, knobs=knobs)
    start = vectors(states[0].models)[0]
    minimizer = lambda k, w: np.linalg.solve(
        2 * quadratic(federation, k)[0] + strength * np.eye(4), 2 * quadratic(federation, k)[1] + strength * w
    )
    trained = []
    for k in range(4):
        w = start.copy()
        for _ in range(2):
            theta = minimizer(k, w)
            w = w - RATE * strength * (w - theta)  # Eq. 8
        trained.append(w)
        np.testing.assert_allclose(vectors(predictions.models)[k], [theta], rtol=1e-3, atol=1e-4)
    mean = np.average(trained, axis=0, weights=SIZES)
    np.testing.assert_allclose(vectors(states[1].models)[0], 0.5 * start + 0.5 * mean, rtol=1e-3, atol=1e-4)
    problem = toys.make_problem(federation)
    adapted = toys.adapt(algorithm, problem, jax.random.key(0), states[-1], federation.client_data)
    w = vectors(states[-1].models)[0]
    np.testing.assert_allclose(vectors(adapted.models)[1], [minimizer(1, w)], rtol=1e-3, atol=1e-4)
