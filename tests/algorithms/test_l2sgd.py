"""L2SGD by hand on quadratics."""

import numpy as np
from by_hand import by_hand

PULL = 0.3


def l2sgd(rounds):
    """Clients start from a mixture of their own model and the mean of the round before."""
    mean = rounds.start("models")[0]
    own = rounds.start("clients.row.params")
    for _ in rounds:
        mixed = (1 - PULL) * own + PULL * mean
        own = np.array([rounds.descend(k, mixed[k]) for k in rounds.clients])
        mean = rounds.mean(own)
        yield {"models": [mean], "clients.row.params": own, "predictions": own[:, None]}


def test_l2sgd_by_hand():
    by_hand("l2sgd", l2sgd, hyperparameters={"pull": PULL})
