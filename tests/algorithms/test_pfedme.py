"""pFedMe by hand: the Moreau minimizer of quadratics."""

import numpy as np
from by_hand import by_hand
from quadratics import RATE, quadratic

STRENGTH = 2.0
BETA = 0.5


def minimizer(federation, k, w):
    """The theta of least f_k(theta) + lambda / 2 |theta - w|^2, (2 A + lambda)^-1 (2 b + lambda w)."""
    matrix, vector = quadratic(federation, k)
    return np.linalg.solve(2 * matrix + STRENGTH * np.eye(4), 2 * vector + STRENGTH * w)


def pfedme(rounds):
    """Algorithm 1, where the steps of Eq. 7 have converged."""
    w = rounds.start("models")[0]
    for _ in rounds:
        trained = []
        personal = []
        for k in rounds.clients:
            own = w
            for _ in range(rounds.epochs):
                theta = minimizer(rounds.federation, k, own)
                own = own - RATE * STRENGTH * (own - theta)  # Eq. 8
            trained.append(own)
            personal.append([theta])
        w = (1 - BETA) * w + BETA * rounds.mean(trained)
        yield {"models": [w], "predictions": personal}


def test_pfedme_by_hand():
    hyperparameters = {
        "mu": STRENGTH,
        "personal_steps": 400,
        "personal_learning_rate": 0.05,
        "beta": BETA,
    }
    by_hand("pfedme", pfedme, rounds=2, hyperparameters=hyperparameters, rtol=1e-3, atol=1e-4)
