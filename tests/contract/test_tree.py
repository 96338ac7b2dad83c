"""Trees: parts of them."""

import numpy as np
import toys

from pfljax.contract import tree


def test_partition_and_combine_undo_each_other():
    params = {"a": {"w": np.ones(2)}, "b": {"w": np.zeros(3)}}
    mask = {"a": {"w": True}, "b": {"w": False}}
    chosen, rest = tree.partition(params, mask)
    assert chosen["b"]["w"] is None and rest["a"]["w"] is None
    toys.assert_trees_close(tree.combine(chosen, rest), params)
    toys.assert_trees_close(tree.combine(rest, chosen), params)
