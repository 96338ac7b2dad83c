"""The plan and exchange of a run on an accelerator: what compiles to the least estimated time within memory."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.host import cache_folder
from pfljax.exchange import targets
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.targets import Target
from pfljax.folder import files
from pfljax.stores import estimating, memory
from pfljax.stores.experiment import Experiment

SECONDS = 60.0  # after which no further program is compiled


def chosen(experiment: Experiment) -> ExecutionPlan:
    """The run's plan, with the fastest of what it leaves open ("auto") by estimates, if they can be made here.

    They can on one host's accelerators of a known kind. The choice is kept in the cache folder.
    """
    plan = experiment.problem.plan
    target = target_of(plan) if plan.auto or plan.peers == "auto" else None
    if target is None:
        return plan
    wanted = [choice for choice in estimating.choices(experiment, target) if _allowed(plan, *choice)]
    if not plan.auto:  # the user's chunk need not be among those that are tried
        wanted = [(plan.chunk, exchange) for exchange in dict.fromkeys(exchange for _, exchange in wanted)]
    if len(wanted) < 2:
        return plan
    cache = cache_folder()
    path = None if cache is None else cache / "plans" / f"{_digest(experiment, target)}.json"
    found = None if path is None else _read(path, wanted)
    if found is None:
        found = _fastest(experiment, target, wanted)
        # Continue if nothing fits, or the cache cannot be written.
        with contextlib.suppress(OSError):
            if found and path:
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write_json(path, {"chunk": found[0], "exchange": found[1]})
    if found is None:
        return plan
    chunk, exchange = found
    # "auto" gathers, and passes models around a ring if memory turns out to be too small.
    return dataclasses.replace(plan, chunk=chunk, peers="ring" if exchange == "ring" else plan.peers)


def target_of(plan: ExecutionPlan) -> Target | None:
    """The plan's devices as a target with their own memory; None: CPUs, other hosts' devices, or an unknown kind."""
    chip = targets.chip_of(plan.device) if jax.process_count() == 1 else None
    if chip is None:
        return None
    options = {} if chip.clock else targets.UNTUNED
    return Target("here", list(plan.mesh.devices.flat), chip._replace(memory=memory.device_limit()), options)


def _allowed(plan: ExecutionPlan, chunk: int, exchange: str) -> bool:
    return plan.peers in ("auto", exchange) or not exchange


def _fastest(experiment: Experiment, target: Target, wanted: list[tuple[int, str]]) -> tuple[int, str] | None:
    """The chunk and exchange with the least estimated time that fit; None: nothing does, or none can be compiled."""
    try:
        rows, _ = estimating.compiled_rows(experiment, target, wanted, SECONDS)
    except jax.errors.JaxRuntimeError:  # the run compiles its own programs, and says what is wrong
        return None
    best = min((row for row in rows if row.fits), key=lambda row: row.milliseconds or math.inf, default=None)
    return (best.chunk, best.exchange) if best else None


def _read(path: Path, wanted: list[tuple[int, str]]) -> tuple[int, str] | None:
    """An earlier choice; None: there is none, or the file is damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ArgumentError):
        found = json.loads(path.read_text())
        choice = found["chunk"], found["exchange"]
        return choice if choice in wanted else None
    return None


def _digest(experiment: Experiment, target: Target) -> str:
    """Digest of everything that the choice depends on."""
    plan, train = experiment.problem.plan, experiment.federation.train
    shapes = jax.tree.map(lambda leaf: [list(leaf.shape), str(leaf.dtype)], jax.tree.leaves(train))
    steps = hashlib.sha256(np.asarray(experiment.steps, np.int64).tobytes()).hexdigest()
    known: dict[str, Any] = {
        "program": experiment.program(),
        "clients": [experiment.problem.num_clients, experiment.problem.cohort_size, shapes, steps],
        "store": experiment.client_store,
        "devices": [target.devices[0].device_kind, len(target.devices), target.chip.memory],
        "plan": [plan.auto, plan.chunk, plan.peers],
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:32]
