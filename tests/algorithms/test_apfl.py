"""APFL by hand on quadratics."""

import numpy as np
import pytest
from by_hand import by_hand


def apfl(rate):
    """Algorithm 1: each client trains a copy of w, its own v, and once in a round its mixing weight alpha."""

    def reference(rounds):
        w = rounds.start("models")[0]
        v = rounds.start("clients.row.personal.params")
        alpha = np.full(len(v), 0.3)
        for _ in rounds:
            trained = []
            for k in rounds.clients:
                own = w
                for step in range(rounds.epochs):
                    slope = rounds.gradient(k, alpha[k] * v[k] + (1 - alpha[k]) * own)
                    moved = alpha[k] - rate * (v[k] - own) @ slope  # Eq. 10
                    own = own - rounds.rate * rounds.gradient(k, own)
                    v[k] = v[k] - rounds.rate * alpha[k] * slope
                    if step == 0:
                        alpha[k] = np.clip(moved, 0, 1)
                trained.append(own)
            w = rounds.mean(trained)
            mixed = alpha[:, None] * v + (1 - alpha)[:, None] * w
            yield {
                "models": [w],
                "clients.row.personal.params": v,
                "clients.row.alpha": alpha,
                "predictions": mixed[:, None],
            }

    return reference


@pytest.mark.parametrize("rate", [0.0, 0.05, 10.0])
def test_apfl_by_hand(rate):
    options = {"hyperparameters": {"alpha": 0.3, "alpha_learning_rate": rate}, "rounds": 2}
    rounds = by_hand("apfl", apfl(rate), rtol=1e-3, atol=1e-4, **options)
    is_cut = set(np.round(rounds.states[-1].rows.alpha, 3).tolist()) & {0.0, 1.0}
    assert bool(is_cut) == (rate == 10)
