"""Blocks of a client's examples."""

import numpy as np

from pfljax.contract.types import Split
from pfljax.local.batches import block_counts


def test_the_loops_over_blocks_are_counted_as_they_run():
    """Of 10 examples, two blocks of 4 are full and the rest is one of 2; of 3, none is, and the rest takes two."""
    size = np.array([10, 3, 0])
    split = Split(np.zeros((3, 12, 2)), np.zeros((3, 12)), size)
    assert block_counts("full_4_of_12", [split]).tolist() == [2, 0, 0]
    assert block_counts("rest_4_2_of_12", [split]).tolist() == [1, 2, 0]
    assert block_counts("rest_5_of_12", [split]).tolist() == [2, 1, 0]
    assert block_counts("full_4_of_9", [split]) is None and block_counts("other", [split]) is None
