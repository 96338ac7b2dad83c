"""Several processes, one per host, as one program: startup, agreement and detection of dead processes.

All processes run the same program with the same arguments and see the same results. Only the first process writes
files, except for clients' rows on disk.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from pfljax.contract import cores
from pfljax.contract.errors import ArgumentError, RunError

HEARTBEAT_SECONDS = 10  # a process without a heartbeat for this long counts as dead
START_SECONDS = 40  # time limit for all processes to join
MESSAGE = 16384  # bytes of a message from the first process
CUT = 1000  # maximum characters of each part of a message, of at most 6 bytes each


def on_loopback(coordinator: str) -> bool:
    """Whether HOST:PORT can be reached only from this machine."""
    host = coordinator.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name, or "auto"
        return False


def start(coordinator: str, num_processes: int, process_id: int) -> None:
    """Joins the other processes; call it before anything else uses JAX.

    Process 0 listens on the given address if it is this machine's loopback, otherwise on all of this machine's
    addresses. Connections are not authenticated.

    Args:
        coordinator: HOST:PORT of process 0, or "auto": JAX finds all three by itself (TPU pods, SLURM, Open MPI).
        num_processes: Number of processes.
        process_id: Number of this process, from 0.

    Raises:
        RunError: if the processes fail to connect.
        ArgumentError: if their numbers of devices differ.
    """
    address: dict[str, Any] = {}
    if coordinator != "auto":
        address = {
            "coordinator_address": coordinator,
            "num_processes": num_processes,
            "process_id": process_id,
        }
    if on_loopback(coordinator):
        address["coordinator_bind_address"] = coordinator
    # it would treat SIGTERM as a preemption notice
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            **address,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            initialization_timeout=START_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        text = f"the processes did not connect within {START_SECONDS} s: {reason}"
        raise RunError(f"coordinator={coordinator}: {text}") from error
    if jax.device_count() != jax.process_count() * len(jax.local_devices()):
        text = "processes have different numbers of devices; accepted: the same in all"
        raise ArgumentError("devices", text)


def is_first() -> bool:
    """Whether this is the process that writes files."""
    cores.start()
    return jax.process_index() == 0


def from_first(value: Any) -> Any:
    """The first process's value, of equal shape and type everywhere; for values that depend on clocks or memory."""
    return multihost_utils.broadcast_one_to_all(value) if jax.process_count() > 1 else value


def least(value: float) -> float:
    """The smallest of all processes' values, in single precision."""
    if jax.process_count() == 1:
        return value
    values = multihost_utils.process_allgather(np.float32(value))
    return float(values.min())


def most(value: int) -> int:
    """The largest of all processes' values."""
    if jax.process_count() == 1:
        return value
    values = multihost_utils.process_allgather(np.int32(value))
    return int(values.max())


def total(values: np.ndarray) -> np.ndarray:
    """The sum of all processes' arrays, with their dtype."""
    return multihost_utils.process_allgather(values).sum(axis=0, dtype=values.dtype)


def gather_rows(rows: np.ndarray) -> np.ndarray:
    """Concatenates all processes' rows (n, ...); n is the same everywhere."""
    return multihost_utils.process_allgather(rows, tiled=True) if jax.process_count() > 1 else rows


def fetch_rows(rows: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Collects rows (n, ...) that are distributed over the processes.

    Args:
        rows: This process's rows, in order.
        owner: (n,), the process that has each row.
    """
    counts = np.bincount(owner, minlength=jax.process_count())
    # of a fixed size, since each size is compiled
    padded = np.zeros((len(owner), *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    collected = np.empty((len(owner), *rows.shape[1:]), rows.dtype)
    by_process = multihost_utils.process_allgather(padded)
    for process, process_rows in enumerate(by_process):
        collected[owner == process] = process_rows[: counts[process]]
    return collected


def whole(array: jax.Array) -> np.ndarray:
    """Returns the whole of an array that is spread over all processes' devices."""
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def wait() -> None:
    """Waits until all processes reach this point."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("wait")


def agree(values: dict[str, object]) -> None:
    """Checks that all processes have the same values of some arguments.

    Raises:
        ArgumentError: on all processes; names the first argument that differs and lists the others in its text.
    """
    if jax.process_count() == 1:
        return
    texts = {name: json.dumps(value, default=str) for name, value in sorted(values.items())}
    digests = [hashlib.sha256(f"{name}={text}".encode()).digest() for name, text in texts.items()]
    numbers = np.array([list(digest) for digest in digests], np.uint8)

    # (processes, values, bytes)
    all_numbers = multihost_utils.process_allgather(numbers)
    is_same = (all_numbers == all_numbers[:1]).all(axis=(0, 2))
    differ = [name for name, same in zip(texts, is_same, strict=True) if not same]
    if differ:
        first_name, *other_names = differ
        who = f"process {jax.process_index()} of {jax.process_count()} disagrees with another"
        others = "".join(f", also on {name} (here {texts[name]})" for name in other_names)
        raise ArgumentError(first_name, f"{who}{others}", values[first_name])


def first(check: Callable[[], None]) -> None:
    """Runs a check on the first process; if it raises an `ArgumentError`, all processes raise it."""
    # counting processes starts JAX, whose number of devices cannot change afterwards
    cores.start()
    if jax.process_count() == 1:
        return check()
    message = np.zeros(MESSAGE, np.uint8)
    error = None
    if is_first():
        try:
            check()
        except ArgumentError as raised:
            error = raised
            value = None if raised.value is None else str(raised.value)[:CUT]
            fields = (raised.argument, raised.text[:CUT], value, raised.owner)
            encoded = np.frombuffer(json.dumps(fields).encode(), np.uint8)
            message[: len(encoded)] = encoded
    message = multihost_utils.broadcast_one_to_all(message)
    if error is not None:
        raise error
    if message.any():
        content = message.tobytes().rstrip(b"\0")
        argument, text, value, owner = json.loads(content)
        raise ArgumentError(argument, text, value, owner=owner)
