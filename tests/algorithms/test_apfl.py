"""APFL by hand on quadratics."""

import numpy as np
import pytest
from quadratics import RATE, SIZES, gradient, play, vectors


@pytest.mark.parametrize("rate", [0.0, 0.05, 10.0])
def test_apfl_by_hand(rate):
    knobs = {"alpha": 0.3, "rate": rate}
    federation, _, states, _, predictions = play("apfl", epochs=2, knobs=knobs)
    w, v, alpha = vectors(states[0].models)[0], vectors(states[0].clients.models.own.model), np.full(4, 0.3)
    for number in range(2):
        trained = []
        for k in range(4):
            own = w.copy()
            for step in range(2):
                slope = gradient(federation, k, alpha[k] * v[k] + (1 - alpha[k]) * own)
                moved = alpha[k] - rate * (v[k] - own) @ slope  # Eq. 10
                own, v[k] = own - RATE * gradient(federation, k, own), v[k] - RATE * alpha[k] * slope
                alpha[k] = np.clip(moved, 0, 1) if step == 0 else alpha[k]
            trained.append(own)
        w = np.average(trained, axis=0, weights=SIZES)
        np.testing.assert_allclose(states[number + 1].clients.alpha, alpha, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        vectors(predictions.models)[:, 0], alpha[:, None] * v + (1 - alpha)[:, None] * w, rtol=1e-3, atol=1e-4
    )
    assert rate < 10 or set(np.round(alpha, 3)) & {0.0, 1.0}  # cut to [0, 1]
