"""Bytes that a round of each method moves, from its listing: what clients receive, and what they send.

Nothing is sent twice, the number of examples n_k is one number beside a model, and a client without examples sends
nothing.
"""

from typing import Any, NamedTuple

import pytest
from by_hand import play

NUMBER = 4  # bytes of a number in single precision
LINEAR = 4 * NUMBER  # a linear regression on three features
EMPTY = (2, 0, 5, 1, 3)  # one of five clients has no examples


class Round(NamedTuple):
    """A round and its traffic.

    Attributes:
        method: The name of the method.
        down: Bytes that all clients receive.
        up: Bytes that all clients send.
        options: As of `by_hand.play`; four clients with a linear regression by default.
    """

    method: str
    down: float
    up: float
    options: dict[str, Any] = {}


ROUNDS = [
    Round("fedavg", down=4 * LINEAR, up=4 * (LINEAR + NUMBER)),
    # c and the change of c_k beside the model
    Round("scaffold", down=4 * 2 * LINEAR, up=4 * (2 * LINEAR + NUMBER)),
    # h stays at the server, and g_k with its client
    Round("feddyn", down=5 * LINEAR, up=4 * (LINEAR + NUMBER), options={"sizes": EMPTY}),
]


@pytest.mark.parametrize("row", ROUNDS, ids=[row.method for row in ROUNDS])
def test_what_a_round_moves(row):
    played = play(row.method, **{"rounds": 1, "epochs": 1} | row.options)
    record = played.records[0]
    assert (record.down, record.up) == (row.down, row.up)
