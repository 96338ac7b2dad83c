"""FedProx by hand on quadratics."""

import numpy as np
from quadratics import RATE, SIZES, gradient, play, vectors


def test_fedprox_by_hand():
    federation, _, states, _, _ = play("fedprox", epochs=3, knobs={"mu": 2.0})
    theta = vectors(states[0].models)[0]
    for number in range(2):
        trained = []
        for k in range(4):
            own = theta.copy()
            for _ in range(3):
                own = own - RATE * (gradient(federation, k, own) + 2.0 * (own - theta))
            trained.append(own)
        theta = np.average(trained, axis=0, weights=SIZES)
        np.testing.assert_allclose(vectors(states[number + 1].models)[0], theta, rtol=1e-4, atol=1e-6)
