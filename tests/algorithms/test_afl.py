"""AFL by hand on quadratics."""

import numpy as np
from by_hand import by_hand
from quadratics import loss_of, nearest_on_simplex

RATE = 0.3


def afl(rounds):
    """The server ascends the mixture weights by the losses of the model that clients receive."""
    w = rounds.start("models")[0]
    share = rounds.start("server.state")
    np.testing.assert_allclose(share, rounds.sizes / rounds.sizes.sum(), rtol=1e-6)
    for _ in rounds:
        losses = np.array([loss_of(rounds.federation, k, w) for k in rounds.clients])
        w = rounds.mean([rounds.descend(k, w) for k in rounds.clients], weights=share)
        share = nearest_on_simplex(share + RATE * losses)
        yield {"models": [w], "server.state": share}
    assert (share == 0).any()


def test_afl_by_hand():
    by_hand(
        "afl", afl, epochs=1, hyperparameters={"weights_learning_rate": RATE}, rtol=1e-3, atol=1e-4
    )
