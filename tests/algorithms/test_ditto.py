"""Ditto by hand on quadratics."""

import numpy as np
from quadratics import SIZES, descend, play, vectors


def test_ditto_by_hand():
    federation, _, states, _, predictions = play("ditto", epochs=3, knobs={"strength": 2.0})
    w, own = vectors(states[0].models)[0], vectors(states[0].clients.own.model)
    for _ in range(2):
        for k in range(4):
            own[k] = descend(federation, k, own[k], 3, lambda v, w=w: 2.0 * (v - w))
        w = np.average([descend(federation, k, w, 3) for k in range(4)], axis=0, weights=SIZES)
    np.testing.assert_allclose(vectors(predictions.models)[:, 0], own, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(vectors(states[-1].models)[0], w, rtol=1e-4, atol=1e-5)
