"""FedPer by hand: only the base is shared."""

import jax
from by_hand import by_hand
from networks import BODY, HEAD, row


def fedper(rounds):
    """Clients train both parts, and send the base."""
    theta = row(rounds.states[0].models[BODY], 0)
    heads = [row(rounds.states[0].rows[HEAD], k) for k in rounds.clients]
    for _ in rounds:
        trained = [rounds.descend(k, {BODY: theta, HEAD: heads[k]}) for k in rounds.clients]
        theta = rounds.mean([params[BODY] for params in trained])
        heads = [params[HEAD] for params in trained]
        base = jax.tree.map(lambda leaf: leaf[None], theta)
        yield {f"models.{BODY}": base, f"rows.{HEAD}": heads}


def test_rounds_by_hand_share_the_base_only():
    rounds = by_hand("fedper", fedper, hidden=(3,), rounds=2)
    assert jax.tree.leaves(rounds.states[-1].models[HEAD]) == []
