"""Tables of comparisons: what a clock adds to them."""

import numpy as np

from pfljax import Clock, FedAvg, compare, data
from pfljax.api.comparison import times_text, times_to
from pfljax.models import MLP


def test_times_to_a_target_by_hand():
    """The time of each run's first evaluation at the target or beyond."""
    curves, clock = np.array([[0.1, 0.7, 0.6], [0.2, 0.3, 0.4]]), np.array([[0.0, 3.0, 8.0], [0.0, 4.0, 9.0]])
    assert times_to(0.6, curves, clock, 1) == [3.0, None]
    assert times_to(0.15, curves, clock, -1) == [0.0, None]
    assert times_text([3.0, None]) == "3, never in 1"
    assert times_text([2.0, 4.0]) == "3 ± 1.414 (2)"
    assert times_text([None, None]) == "-, never in 2"


def test_a_clock_adds_columns():
    clients = data.digits(num_clients=4, train_examples=10, test_examples=4)
    heads = []
    for clock in (Clock(), None):
        table = compare([FedAvg()], clients, MLP(hidden=()), clock=clock, target=0.0, rounds=4, eval_every=2)
        found, body = table.columns()
        assert [len(line) for line in body] == [len(found)]
        heads.append({head for head in found if "simulated" in head})
    assert heads == [{"simulated s", "simulated s to 0.0 %"}, set()]
