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

    def place_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Pooled):
            leaf = divide(plan, leaf, num, axis)
        if not isinstance(leaf, Pooled):
            return plan.place(leaf, num, axis)
        num_processes = jax.process_count() if leaf.spread else 1
        pool = plan.place(leaf.pool, leaf.pool.shape[axis] * num_processes, axis, leaf.spread)
        index = plan.place(leaf.index, num, axis)
        return Pooled(pool, index, leaf.spread)

    return jax.tree.map(place_leaf, stacked, is_leaf=is_pooled)


def divide(plan: ExecutionPlan, examples: Pooled, num: int, axis: int) -> Pooled | np.ndarray:
    """The examples for this process's devices and clients, still on the host.

    Args:
        plan: The execution plan.
        examples: NumPy pool and index; both have a leading axis of runs if `axis` is 1.
        num: Number of clients on all processes.
        axis: The index axis of clients.
    """
    spread = plan.num_devices > 1 and num % plan.num_devices == 0
    num_devices = plan.num_devices // jax.process_count() if spread else 1
    first_device = num_devices * jax.process_index() if spread else 0
    examples = jax.tree.map(_on_host, examples)
    runs = [examples.for_run(run) for run in range(len(examples.index))] if axis else [examples]
    index = np.stack([run.index for run in runs])

    # The rows of each run's pool that each device needs. Every device gets as many, for
    # equal shapes, and one more row of zeros, for padding.
    num_runs, num_clients, n_max = index.shape
    by_device = index.reshape(num_runs, num_devices, num_clients // num_devices, n_max)
    needed = [[_used(part) for part in positions_of_devices] for positions_of_devices in by_device]
    longest = max(len(rows) for positions_of_devices in needed for rows in positions_of_devices)
    size = 1 + processes.most(longest)

    # Copies for each client, where they take hardly more memory than a pool and its index.
    features = runs[0].shape[2:]
    example_bytes = examples.dtype.itemsize * math.prod(features)
    pool_bytes = num_runs * num_devices * size * example_bytes
    if index.size * example_bytes <= GAIN * (pool_bytes + index.nbytes):
        copies = np.stack([run[...] for run in runs])
        return copies if axis else copies[0]

    # The pools of all devices, one after the other, and an index into them.
    pool = np.zeros((num_runs, num_devices * size, *features), examples.dtype)
    positions = np.full(by_device.shape, -1, np.int32)
    for run, positions_of_devices in enumerate(needed):
        for device, rows in enumerate(positions_of_devices):
            start = device * size
            pool[run, start : start + len(rows)] = runs[run].rows(rows)
            new_position = np.empty(len(runs[run].pool), np.int32)
            new_position[rows] = (first_device + device) * size + np.arange(len(rows))
            part = by_device[run, device]
            positions[run, device] = np.where(part < 0, -1, new_position[part])
    positions = positions.reshape(index.shape)
    return Pooled(pool, positions, spread) if axis else Pooled(pool[0], positions[0], spread)


def _on_host(leaf: Any) -> Any:
    """A device's array as a NumPy array; a pool that stays in its file as it is."""
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def _used(index: np.ndarray) -> np.ndarray:
    """Rows of the pool that an index refers to, ascending."""
    return np.flatnonzero(np.bincount(index[index >= 0]))
