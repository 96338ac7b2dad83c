"""The memory plan: how much memory a run will need, and how many clients fit at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pfljax.contract import processes
from pfljax.contract.errors import OutOfMemory
from pfljax.contract.host import free_memory, readable
from pfljax.contract.types import Topology
from pfljax.exchange.plan import ExecutionPlan

SHARE = 0.9  # fraction of a device's memory that a run may plan with


def host_free() -> int:
    """Returns the free host memory in bytes; the minimum over processes."""
    return int(processes.least(free_memory()))


def device_limit() -> int:
    """Returns the memory of one device in bytes: an accelerator's own, or a CPU device's share of free host memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(processes.least(stats["bytes_limit"]))
    return host_free() // len(jax.local_devices())


def peak_bytes() -> int | None:
    """Returns the peak memory use of a device in bytes; None if it does not report that."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Memory of a compiled round on one device, in bytes.

    Attributes:
        arguments: State and data.
        outputs: Outputs that do not reuse the arguments' memory.
        temporaries: Intermediate values.
        limit: Memory of the device.
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


def memory_plan(compiled: Any) -> MemoryPlan:
    """Reads the memory plan from a compiled function."""
    stats = compiled.memory_analysis()
    return MemoryPlan(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        limit=device_limit(),
    )


def next_smaller(plan: ExecutionPlan, num_clients: int, topology: Topology) -> ExecutionPlan | None:
    """Returns a plan that needs less memory: first a ring instead of gathered peer models, then half the chunk size.

    Clients that are side by side only as far as a cache has room come one by one.
    """
    if topology.between_clients and plan.peers == "auto" and plan.num_devices > 1:
        return dataclasses.replace(plan, peers="ring")
    per_device = -(-num_clients // plan.num_devices)
    at_once = min(plan.chunk or per_device, per_device)
    if at_once <= 1:
        return None
    return dataclasses.replace(plan, chunk=1 if plan.in_cache else at_once // 2)


def check_host(need: int) -> None:
    """Raises `OutOfMemory` if clients' rows of `need` bytes do not fit in host memory, in addition to their data."""
    free = host_free()
    if need > SHARE * free:
        raise OutOfMemory(
            f"out of memory: clients' rows need {readable(need)}, "
            f"but only {readable(free)} is free on the host; "
            "use fewer clients (num_clients) or a smaller model"
        )


def too_large(memory: MemoryPlan, what: str = "a round") -> OutOfMemory:
    """Returns the error for a run that does not fit even with one client at a time."""
    return OutOfMemory(
        f"out of memory: {what} needs {readable(memory.total)} "
        f"on a device that has {readable(memory.limit)}, even with one client at a time; "
        "use fewer clients (num_clients, participation), "
        "client_store=host, a smaller model, or more devices"
    )
