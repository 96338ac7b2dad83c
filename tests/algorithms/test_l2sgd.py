"""L2SGD by hand on quadratics."""

import numpy as np
from quadratics import SIZES, descend, play, vectors


def test_l2sgd_by_hand():
    federation, _, states, _, predictions = play("l2sgd", epochs=2, knobs={"pull": 0.3})
    mean, own = vectors(states[0].models)[0], vectors(states[0].clients.model)
    for _ in range(2):
        own = np.array([descend(federation, k, 0.7 * own[k] + 0.3 * mean, 2) for k in range(4)])
        mean = np.average(own, axis=0, weights=SIZES)
    np.testing.assert_allclose(vectors(predictions.models)[:, 0], own, rtol=1e-4, atol=1e-5)
