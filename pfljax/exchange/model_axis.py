"""The second axis of the mesh, `model`: one client's model is spread over several devices.

Clients are mapped by hand over the axis `clients`. The axis `model` is left to JAX's partitioner, which follows the
shardings of the state's arrays: `parts` says which dimension of an array is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
from jax.sharding import PartitionSpec

from pfljax.contract.types import PyTree

MODEL = "model"  # axis of the device mesh
WORTH = 1024  # values of one model's array; smaller arrays are on every device


def spread_axis(shape: Sequence[int], devices: int, leading: int) -> int | None:
    """The dimension of an array that is spread over `devices`; None: the whole array is on each of them.

    It is the largest one that `devices` divides; of equals the last, which a product of matrices does not sum over.

    Args:
        shape: The array's shape.
        devices: Number of devices of one model.
        leading: Number of leading dimensions that stay whole, such as that of a stack.
    """
    if devices == 1 or math.prod(shape[leading:]) < WORTH:
        return None
    divisible = [axis for axis in range(leading, len(shape)) if shape[axis] % devices == 0]
    return max(divisible, key=lambda axis: (shape[axis], axis), default=None)


def spec(
    first: Sequence[str | None], shape: Sequence[int], devices: int, leading: int
) -> PartitionSpec:
    """How an array is spread: its first dimensions as `first` says, and one of the others as `parts` does."""
    cut = spread_axis(shape, devices, leading)
    if cut is None:
        return PartitionSpec(*first)
    between = [None] * (cut - len(first))
    return PartitionSpec(*first, *between, MODEL)


def devices_here() -> int:
    """Number of devices of one model where this is traced, inside `shard_map` over clients."""
    return jax.sharding.get_abstract_mesh().shape.get(MODEL, 1)


def on_parts(fn: Callable[[PyTree], PyTree], stack: PyTree) -> PyTree:
    """Applies a collective over clients to the parts of stacked models; for use inside `shard_map` over clients.

    Left to itself, the partitioner puts a model's parts together on every device before it gathers or scatters rows.
    """
    devices = devices_here()
    if devices == 1:
        return fn(stack)
    specs = jax.tree.map(lambda leaf: spec((), leaf.shape, devices, 1), stack)
    run = jax.shard_map(fn, in_specs=(specs,), out_specs=specs, axis_names={MODEL}, check_vma=False)
    return run(stack)
