"""LG-FedAvg by hand: only upper layers are shared."""

import jax
import numpy as np
from by_hand import by_hand
from networks import BODY, HEAD, row


def lg_fedavg(rounds):
    """Clients train all layers, and send the upper ones."""
    upper = row(rounds.states[0].models[HEAD], 0)
    lower = [row(rounds.states[0].rows[BODY], k) for k in rounds.clients]
    for _ in rounds:
        trained = [rounds.descend(k, {BODY: lower[k], HEAD: upper}) for k in rounds.clients]
        upper = rounds.mean([params[HEAD] for params in trained])
        lower = [params[BODY] for params in trained]
        yield {
            f"models.{HEAD}": jax.tree.map(lambda leaf: leaf[None], upper),
            f"rows.{BODY}": lower,
            "predictions": [[{BODY: own, HEAD: upper}] for own in lower],
        }


def test_rounds_by_hand_share_upper_layers_only():
    rounds = by_hand("lg_fedavg", lg_fedavg, hidden=(3,))
    assert jax.tree.leaves(rounds.states[-1].models[BODY]) == []
    kernels = rounds.states[0].rows[BODY]["kernel"]
    assert np.ptp(kernels, axis=0).max() > 0.1  # clients' own layers start apart
