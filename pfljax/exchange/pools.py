"""Placement of pooled examples: each device gets the ones that its clients need, unless copies cost little."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from pfljax.contract import processes
from pfljax.contract.pooled import Pooled, is_pooled
from pfljax.exchange.plan import ExecutionPlan

GAIN = 1.15  # largest size of per-client copies, relative to a pool and its index


def place(plan: ExecutionPlan, stacked: Any, num: int, axis: int = 0) -> Any:
    """Puts stacked host arrays on the devices, with the rows (at `axis`) of `num` clients spread over them.

    If the number of clients is not divisible by the number of devices, every device has everything. Pooled examples
    become an array if that takes at most `GAIN` times the memory, since an array is read without an index.
    """

    def one(leaf):
        if isinstance(leaf, Pooled):
            leaf = divide(plan, leaf, num, axis)
        if not isinstance(leaf, Pooled):
            return plan.place(leaf, num, axis)
        rows = leaf.pool.shape[axis] * (jax.process_count() if leaf.spread else 1)
        return Pooled(
            plan.place(leaf.pool, rows, axis, leaf.spread),
            plan.place(leaf.index, num, axis),
            leaf.spread,
        )

    return jax.tree.map(one, stacked, is_leaf=is_pooled)


def divide(plan: ExecutionPlan, examples: Pooled, num: int, axis: int) -> Pooled | np.ndarray:
    """The examples for this process's devices and clients, still on the host.

    Args:
        plan: The execution plan.
        examples: NumPy pool and index; both have a leading axis of runs if `axis` is 1.
        num: Number of clients on all processes.
        axis: The index axis of clients.
    """
    spread = plan.num_devices > 1 and num % plan.num_devices == 0
    parts = plan.num_devices // jax.process_count() if spread else 1
    first = parts * jax.process_index() if spread else 0
    examples = jax.tree.map(
        lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, examples
    )
    runs = [examples.of_run(run) for run in range(len(examples.index))] if axis else [examples]
    index = np.stack([run.index for run in runs])
    divided = index.reshape(len(index), parts, index.shape[1] // parts, index.shape[2])
    used = [[_used(part) for part in of_run] for of_run in divided]
    # a row of zeros, for padding
    size = 1 + processes.most(max(len(ids) for of_run in used for ids in of_run))
    features = runs[0].shape[2:]
    row = examples.dtype.itemsize * math.prod(features)
    if index.size * row <= GAIN * (len(index) * parts * size * row + index.nbytes):
        copies = np.stack([run[...] for run in runs])
        return copies if axis else copies[0]
    pool = np.zeros((len(index), parts * size, *features), examples.dtype)
    places = np.full(divided.shape, -1, np.int32)
    for r, of_run in enumerate(used):
        for d, ids in enumerate(of_run):
            pool[r, d * size : d * size + len(ids)] = runs[r].rows(ids)
            place_of = np.empty(len(runs[r].pool), np.int32)
            place_of[ids] = (first + d) * size + np.arange(len(ids))
            places[r, d] = np.where(divided[r, d] < 0, -1, place_of[divided[r, d]])
    places = places.reshape(index.shape)
    return Pooled(pool, places, spread) if axis else Pooled(pool[0], places[0], spread)


def _used(index: np.ndarray) -> np.ndarray:
    """Rows of the pool that an index refers to, ascending."""
    return np.flatnonzero(np.bincount(index[index >= 0]))
