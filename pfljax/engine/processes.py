"""Several processes, one on each host, as one program: how they find each other, agree, and notice that one is gone.

All processes run the same commands on the same flags and see the same figures; the first alone writes files and prints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from pfljax.core.types import RunError, UsageError

HEARTBEAT_SECONDS = 10  # without a sign of life, after which a process counts as dead
START_SECONDS = 40  # within which all must have come
MESSAGE = 4096  # bytes of what the first process tells the others


def start(coordinator: str, num_processes: int, process_id: int) -> None:
    """Joins the other processes; before anything else touches JAX.

    Args:
        coordinator: HOST:PORT of process 0, or "auto": JAX finds all three by itself (TPU pods, SLURM, Open MPI).
        num_processes: How many there are.
        process_id: Which one this is, from 0.

    Raises:
        RunError: if they do not come together.
    """
    found = {}
    if coordinator != "auto":
        found = {"coordinator_address": coordinator, "num_processes": num_processes, "process_id": process_id}
    jax.config.update("jax_enable_preemption_service", False)  # it would take a SIGTERM for a message
    try:
        jax.distributed.initialize(
            **found, heartbeat_timeout_seconds=HEARTBEAT_SECONDS, initialization_timeout=START_SECONDS
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise RunError(
            f"--coordinator={coordinator}: the processes did not come together in {START_SECONDS} s: {reason}"
        ) from error
    if jax.device_count() != jax.process_count() * len(jax.local_devices()):
        raise UsageError("--devices: the processes have different numbers of devices; accepted: the same on all")


def is_first() -> bool:
    """Whether this is the process that writes files."""
    return jax.process_index() == 0


def from_first(value: np.ndarray) -> np.ndarray:
    """The first process's value, of one shape and type everywhere: for what depends on clocks or free memory."""
    return multihost_utils.broadcast_one_to_all(value) if jax.process_count() > 1 else value


def least(value: float) -> float:
    """The least of all processes' values, in single precision: of what each has of something."""
    if jax.process_count() == 1:
        return value
    return float(multihost_utils.process_allgather(np.float32(value)).min())


def gather_rows(rows: np.ndarray) -> np.ndarray:
    """All processes' rows (n, ...), of equal number, one after the other."""
    return multihost_utils.process_allgather(rows, tiled=True) if jax.process_count() > 1 else rows


def wait() -> None:
    """Until all processes have come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("wait")


def agree(values: dict[str, object], where: str) -> None:
    """Sees to it that all processes have the same values.

    Args:
        values: By name.
        where: What kind of names they are, such as "--", to go before a name.

    Raises:
        UsageError: naming what differs, on all processes.
    """
    if jax.process_count() == 1:
        return
    texts = {name: json.dumps(value, default=str) for name, value in sorted(values.items())}
    digests = np.array(
        [list(hashlib.sha256(f"{name}={text}".encode()).digest()) for name, text in texts.items()], np.uint8
    )
    everyones = multihost_utils.process_allgather(digests)
    differ = [
        name for name, alike in zip(texts, (everyones == everyones[:1]).all(axis=(0, 2)), strict=True) if not alike
    ]
    if differ:
        mine = ", ".join(f"{where}{name} (here {texts[name]})" for name in differ)
        raise UsageError(f"process {jax.process_index()} of {jax.process_count()} disagrees with another on {mine}")


def first(check: Callable[[], None]) -> None:
    """Runs a check on the first process; what it raises is raised on all."""
    if jax.process_count() == 1:
        return check()
    told, error = np.zeros(MESSAGE, np.uint8), None
    if is_first():
        try:
            check()
        except UsageError as raised:
            error = raised
            text = np.frombuffer(str(raised).encode()[:MESSAGE], np.uint8)
            told[: len(text)] = text
    told = multihost_utils.broadcast_one_to_all(told)
    if error is not None:
        raise error
    if told.any():
        raise UsageError(told.tobytes().rstrip(b"\0").decode(errors="replace"))
