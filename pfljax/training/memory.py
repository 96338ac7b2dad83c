"""The memory plan: what a run will need, before it starts, and the chunk of clients that fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pfljax.core import tree
from pfljax.core.errors import OutOfMemory
from pfljax.core.host import free_memory, readable
from pfljax.core.types import State
from pfljax.engine import processes
from pfljax.engine.plan import ExecutionPlan

SHARE = 0.9  # of a device's memory that a run may plan with


def host_free() -> int:
    """Bytes of the host's memory that are free; of several processes', the least."""
    return int(processes.least(free_memory()))


def device_limit() -> int:
    """Bytes that one device has for us: the accelerator's own, or this CPU device's share of the free memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(processes.least(stats["bytes_limit"]))
    return host_free() // len(jax.local_devices())


def peak_bytes() -> int | None:
    """The most that a device has had in use, where it tells."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a compiled round on one device.

    Attributes:
        arguments: State and data.
        outputs: Of them, what does not reuse the arguments' memory.
        temporaries: Everything in between.
        limit: What the device has.
    """

    arguments: int
    outputs: int
    temporaries: int
    limit: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporaries

    @property
    def fits(self) -> bool:
        return self.total <= SHARE * self.limit


def of_compiled(compiled: Any) -> MemoryPlan:
    """Reads the plan off a compiled function."""
    stats = compiled.memory_analysis()
    fresh = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return MemoryPlan(stats.argument_size_in_bytes, fresh, stats.temp_size_in_bytes, device_limit())


def next_smaller(plan: ExecutionPlan, num_clients: int, topology: str) -> ExecutionPlan | None:
    """The plan that needs less memory: no gathered copies of peers' models, then half as many clients at a time."""
    if topology in ("peers", "push") and plan.peers == "auto" and plan.num_devices > 1:
        return dataclasses.replace(plan, peers="ring")
    per_device = -(-num_clients // plan.num_devices)
    at_once = min(plan.chunk or per_device, per_device)
    return dataclasses.replace(plan, chunk=at_once // 2) if at_once > 1 else None


def check_host(state: State, runs: int = 1) -> None:
    """Sees to it that the clients' rows fit the host beside their data, which are there already.

    Args:
        state: Of one run.
        runs: How many runs there are.

    Raises:
        OutOfMemory: if they do not.
    """
    leaves = [tree.num_bytes(leaf) for leaf in jax.tree.leaves((state.models, state.optimizer, state.clients))]
    need = runs * sum(leaves) + max(leaves, default=0)  # a leaf more, while it is copied from its making
    free = host_free()
    if need > SHARE * free:
        raise OutOfMemory(
            f"out of memory: the clients' state needs {readable(need)} on a host that has {readable(free)}; use fewer "
            "clients (num_clients) or a smaller model"
        )


def too_large(memory: MemoryPlan, what: str = "a round") -> OutOfMemory:
    """The error for a run that does not fit even one client at a time."""
    return OutOfMemory(
        f"out of memory: {what} needs {readable(memory.total)} on a device that has {readable(memory.limit)}, even "
        "with one client at a time; use fewer clients (num_clients, participation), "
        "client_store=host, a smaller model, or more devices"
    )
