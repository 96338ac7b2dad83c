"""Ditto by hand on quadratics."""

from by_hand import by_hand

STRENGTH = 2.0


def ditto(rounds):
    """Algorithm 1: w is FedAvg's, and client k's v_k is pulled toward w as it was received."""
    w = rounds.start("models")[0]
    own = list(rounds.start("rows.params"))
    for _ in rounds:
        for k in rounds.clients:
            own[k] = rounds.descend(k, own[k], lambda v, w=w: STRENGTH * (v - w))
        w = rounds.mean([rounds.descend(k, w) for k in rounds.clients])
        yield {"models": [w], "rows.params": own, "predictions": [[v] for v in own]}


def test_ditto_by_hand():
    by_hand("ditto", ditto, hyperparameters={"mu": STRENGTH}, epochs=3)
