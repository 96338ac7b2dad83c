"""Measuring the rounds of a run: compile time, seconds, memory and traffic. Nothing is scored."""

from __future__ import annotations

import dataclasses
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfljax.api.run import make_problem
from pfljax.contract import tree
from pfljax.contract.errors import RunError
from pfljax.contract.types import ClientData
from pfljax.data import Federation
from pfljax.exchange import pools
from pfljax.exchange.plan import Peers, make_plan
from pfljax.folder import fingerprint
from pfljax.local.training import LocalTraining
from pfljax.planner.profiling import profiler
from pfljax.run import compiled, memory
from pfljax.run.compiled import Compiled
from pfljax.run.experiment import Experiment
from pfljax.stores.registry import store_of
from pfljax.stores.store import shapes_of
from pfljax.training import compiling
from pfljax.training.compiling import Dispatch

MEASURES = (
    "parameters",
    "clients_per_round",
    "chunk",
    "rounds",
    "compile_seconds",
    "seconds_per_round",
    "fastest_round",
    "slowest_round",
    "seconds_again",
    "client_updates_per_second",
    "argument_bytes",
    "output_bytes",
    "temporary_bytes",
    "peak_device_bytes",
    "peak_resident_bytes",
    "disk_bytes",
    "bytes_down",
    "bytes_up",
)
SPLITS = ("train", "validation", "test")


def like_one(
    method: Any,
    example: Federation,
    model: Any,
    local: LocalTraining,
    plan: tuple[str, int, int, Peers, int],
    client_store: str,
    num_clients: int,
    cohort_size: int,
) -> Experiment:
    """Makes a run of clients that are like one client; its federation consists of their shapes on the devices.

    Args:
        method, model, local, client_store: As in `Run`.
        example: A federation of one client.
        plan: The arguments of `make_plan`.
        num_clients: K.
        cohort_size: S.
    """
    mapped = make_plan(*plan)

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        leaf = jax.ShapeDtypeStruct((num_clients, *leaf.shape[1:]), leaf.dtype)
        sharding = mapped.sharding(leaf, by_rows=True)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    splits = {name: tree.map_rows(shape, getattr(example, name)) for name in SPLITS}
    shapes = dataclasses.replace(example, **splits, group=np.zeros(0, np.int32))
    problem = make_problem(example, model, local, 1.0, mapped)
    problem = problem._replace(num_clients=num_clients, cohort_size=cohort_size)
    return fingerprint.identified(Experiment(method, problem, shapes, client_store=client_store))


def dispatcher(
    experiment: Experiment,
    rounds: Compiled,
    clients: ClientData,
    trace: Path | None = None,
    period: int | None = None,
) -> Dispatch:
    """Initializes the state. Returns a function that runs the next round on it; see `compiling.dispatcher`.

    Args:
        experiment: The run.
        rounds: The compiled rounds of `compiling.compile_to_fit`.
        clients: The clients' data.
        trace: Folder for a profiler trace of additional rounds.
        period: Number of rounds after which round numbers, and so cohorts, repeat; None: never.
    """
    key = jax.random.key(0)

    def key_for(purpose: int) -> Any:
        return experiment.keys(key, key) if purpose else key

    if trace:
        dispatch = compiling.dispatcher(rounds, key_for, clients)
        print(f"  {profiler(trace)(dispatch)}", flush=True)
    return compiling.dispatcher(rounds, key_for, clients, period)


def on_a_device(stacked: Any) -> int:
    """Returns the bytes that shapes with shardings take on one device."""

    def local(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)

    return tree.num_bytes(jax.tree.map(local, stacked))


def check_fit(need: int, what: str, limit: int | None = None) -> None:
    """Raises `RunError` if `what` needs more bytes than a run may plan with; by default, in the host's memory."""
    limit = memory.host_free() if limit is None else limit
    if need > memory.SHARE * limit:
        available = memory.readable(int(memory.SHARE * limit))
        text = f"needs {memory.readable(need)}, but only {available} (of {memory.readable(limit)})"
        raise RunError(f"out of memory: {what}: {text} is available")


def check_state(experiment: Experiment) -> int:
    """Checks that state and data fit in memory, from their shapes. Returns the bytes of the copy on a CPU host.

    Raises:
        RunError: if they do not fit.
    """
    plan = experiment.problem.plan
    clients = experiment.federation.client_data
    store = store_of(experiment)
    state = shapes_of(experiment, clients)
    # includes the test examples that random_pixels generates
    copy = 5 * tree.num_bytes(clients) // 4
    if store.on_disk:
        check_fit(copy, "clients' data on the host")
        return 0
    if not store.on_devices:
        # a second copy while it is moved
        largest = max(map(tree.num_bytes, jax.tree.leaves(state)))
        check_fit(copy + tree.num_bytes(state) + largest, "clients' state and data on the host")
        return 0
    state = compiled.shaped(state, compiled.state_shardings(plan, state))
    check_fit(copy, "data on the host")
    copy = copy // len(jax.local_devices()) if plan.device.platform == "cpu" else 0
    need = on_a_device((state, clients)) + copy
    check_fit(need, "state and data on a device", memory.device_limit())
    return copy


def measure(
    experiment: Experiment,
    data: Callable[[], ClientData],
    num_rounds: int,
    trace: Path | None = None,
) -> dict[str, int | float | None]:
    """Measures a run: compiles it, times some rounds, and reads the memory analysis and the records.

    Args:
        experiment: The run. Its federation consists of shapes on the devices.
        data: Returns the clients' data; called after it is known that they fit.
        num_rounds: Number of timed rounds.
        trace: Folder for a profiler trace of additional rounds.

    Returns:
        A value for each of `MEASURES`; None where it is not known.

    Raises:
        RunError: if it does not fit in memory.
    """
    jax.clear_caches()  # each run compiles everything it needs
    copy = check_state(experiment)
    resident = PeakResident()
    device = memory.peak_bytes()
    problem = experiment.problem
    store = store_of(experiment)
    with tempfile.TemporaryDirectory() as folder:
        experiment = dataclasses.replace(experiment, directory=Path(folder))
        rounds = compiling.compile_to_fit(experiment, experiment.federation.client_data, 1)
        clients = data()
        if store.on_devices:
            initializing = rounds.making.total if rounds.making else 0
            need = max(initializing, rounds.memory.total) + copy
            what = "initializing the state, or a round, on a device"
            check_fit(need, what, memory.device_limit())
            clients = pools.place(rounds.plan, clients, problem.num_clients)
        dispatch = dispatcher(experiment, rounds, clients, trace, period=num_rounds)
        dispatch()  # warm-up
        seconds, records = zip(*[dispatch() for _ in range(num_rounds)], strict=True)
        # now all clients have rows
        again = [dispatch()[0] for _ in range(num_rounds)] if store.on_disk else []
        per_round = float(np.median(seconds))
        peak = memory.peak_bytes()
        disk = sum(path.stat().st_blocks * 512 for path in Path(folder).iterdir())
    return {
        "parameters": problem.model.num_parameters,
        "clients_per_round": problem.cohort_size,
        "chunk": rounds.plan.chunk,
        "rounds": num_rounds,
        "compile_seconds": rounds.compile_seconds,
        "seconds_per_round": per_round,
        "fastest_round": min(seconds),
        "slowest_round": max(seconds),
        "seconds_again": float(np.median(again)) if again else None,
        "client_updates_per_second": problem.cohort_size / per_round,
        "argument_bytes": rounds.memory.arguments,
        "output_bytes": rounds.memory.outputs,
        "temporary_bytes": rounds.memory.temporaries,
        # A device reports the peak of the whole process: it is this run's peak if it has risen.
        "peak_device_bytes": peak if peak != device else None,
        "peak_resident_bytes": resident.read(),
        "disk_bytes": disk,
        "bytes_down": float(np.mean([record.down for record in records])),
        "bytes_up": float(np.mean([record.up for record in records])),
    }


class PeakResident:
    """Peak resident memory of this process from now on, including what earlier runs left in memory."""

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak on Linux
            self.before = 0
        except OSError:
            self.before = self._peak()

    def read(self) -> int | None:
        """Returns the peak in bytes; None if it is below the earlier peak."""
        peak = self._peak()
        return peak if peak > self.before else None

    @staticmethod
    def _peak() -> int:
        """The peak in bytes, of the process's whole life or since it was reset."""
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        except (OSError, StopIteration):
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return most if sys.platform == "darwin" else 1024 * most
