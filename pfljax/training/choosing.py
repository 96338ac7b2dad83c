"""The plan and exchange of a run on an accelerator: what plays a round in the least time there.

Each plan that the run leaves open is compiled. If it fits, it plays two rounds, the second of which
is timed. The fastest one is kept in the cache folder, by program and device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfljax.contract.errors import ArgumentError, RunError
from pfljax.contract.host import cache_folder
from pfljax.exchange.plan import ExecutionPlan
from pfljax.folder import files
from pfljax.run import memory
from pfljax.run.experiment import Experiment
from pfljax.stores.registry import store_of

CHUNKS = (32, 8)  # numbers of clients at a time that are tried besides one and all
SECONDS = 60.0  # after which no further plan is tried

Choice = tuple[int, str]  # the chunk, and the exchange: "gather", "ring" or ""
PlayedSeconds = Callable[[ExecutionPlan], float | None]  # of a warm round; None: it does not fit


def chosen(experiment: Experiment, played_seconds: PlayedSeconds) -> ExecutionPlan:
    """The run's plan, with the fastest of what it leaves open ("auto") on an accelerator.

    Args:
        experiment: The run.
        played_seconds: Compiles a plan and plays its rounds.
    """
    plan = experiment.problem.plan
    leaves_open = plan.auto or plan.peers == "auto"
    if not leaves_open or not is_measured(plan) or store_of(experiment).on_disk:
        return plan
    wanted = [choice for choice in choices(experiment, plan) if _is_allowed(plan, choice)]
    if not plan.auto:  # the user's chunk need not be among those that are tried
        exchanges = dict.fromkeys(exchange for _, exchange in wanted)
        wanted = [(plan.chunk, exchange) for exchange in exchanges]
    if len(wanted) < 2:
        return plan

    path = _path(experiment)
    choice = None if path is None else _read(path, wanted)
    if choice is None:
        choice = _fastest(plan, wanted, played_seconds)
        if choice is None:
            return plan
        # Continue if the cache cannot be written.
        with contextlib.suppress(OSError):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write_json(path, {"chunk": choice[0], "exchange": choice[1]})
    return planned(plan, choice)


def is_measured(plan: ExecutionPlan) -> bool:
    """Whether plans are tried on these devices: one host's accelerators.

    On a CPU, one client at a time is known to be best; several hosts would have to agree.
    """
    return jax.process_count() == 1 and plan.device.platform != "cpu"


def choices(experiment: Experiment, plan: ExecutionPlan) -> Iterator[Choice]:
    """The chunks and exchanges to try on a plan's devices, the most telling first."""
    topology = experiment.algorithm(plan).topology
    moves_between_devices = topology.between_clients and plan.num_devices > 1
    exchanges = ("gather", "ring") if moves_between_devices else ("",)
    per_device = -(-experiment.problem.cohort_size // plan.num_devices)
    chunks = [0]
    if per_device > 1:
        chunks.append(1)
    chunks += [chunk for chunk in CHUNKS if chunk < per_device]
    for chunk in chunks:
        for exchange in exchanges:
            yield chunk, exchange


def planned(plan: ExecutionPlan, choice: Choice) -> ExecutionPlan:
    """The plan with a choice.

    "auto" gathers, and passes models around a ring if memory turns out to be too small.
    """
    chunk, exchange = choice
    peers = "ring" if exchange == "ring" else plan.peers
    return dataclasses.replace(plan, chunk=chunk, peers=peers)


def _is_allowed(plan: ExecutionPlan, choice: Choice) -> bool:
    _, exchange = choice
    return plan.peers in ("auto", exchange) or not exchange


def _fastest(
    plan: ExecutionPlan, wanted: list[Choice], played_seconds: PlayedSeconds
) -> Choice | None:
    """The choice whose round takes the least time; None: none fits."""
    begin = time.perf_counter()
    fastest = None
    least = float("inf")
    for choice in wanted:
        if fastest is not None and time.perf_counter() - begin > SECONDS:
            break
        try:
            seconds = played_seconds(planned(plan, choice))
        except (RunError, jax.errors.JaxRuntimeError):  # the run compiles it, too, and says why
            continue
        if seconds is not None and seconds < least:
            fastest = choice
            least = seconds
    return fastest


def _path(experiment: Experiment) -> Path | None:
    """The file with an earlier choice; None: nothing is cached."""
    cache = cache_folder()
    return None if cache is None else cache / "plans" / f"{_digest(experiment)}.json"


def _read(path: Path, wanted: list[Choice]) -> Choice | None:
    """An earlier choice; None: there is none, or the file is damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ArgumentError):
        content = json.loads(path.read_text())
        choice = (content["chunk"], content["exchange"])
        return choice if choice in wanted else None
    return None


def _digest(experiment: Experiment) -> str:
    """Digest of everything that the choice depends on."""
    plan = experiment.problem.plan
    leaves = jax.tree.leaves(experiment.federation.train)
    shapes = [[list(leaf.shape), str(leaf.dtype)] for leaf in leaves]
    steps = hashlib.sha256(np.asarray(experiment.steps, np.int64).tobytes()).hexdigest()
    limit = None  # of a CPU's memory, what is free changes all the time
    if plan.device.platform != "cpu":
        limit = memory.device_limit()
    known: dict[str, Any] = {
        "program": experiment.program(),
        "clients": [experiment.problem.num_clients, experiment.problem.cohort_size, shapes, steps],
        "store": experiment.client_store,
        "devices": [plan.device.device_kind, plan.num_devices, limit],
        "plan": [plan.auto, plan.chunk, plan.peers],
    }
    text = json.dumps(known, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
