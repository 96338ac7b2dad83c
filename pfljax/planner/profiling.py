"""Profiling: traces a few warm rounds and reads from the trace where their time goes.

Traces open in TensorBoard and XProf; trace.json.gz also opens in Perfetto.
"""

from __future__ import annotations

import datetime
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

ROUNDS = 3  # number of rounds in a trace

# Operations are named after XLA opcodes, JAX primitives or NCCL kernels. A fusion contains no collective, whatever its
# name begins with, so only a number may follow.
COLLECTIVE = re.compile(
    r"nccl|%?(all[-_]reduce|all-reduce-scatter|reduce[-_]scatter|all[-_]gather|(ragged[-_])?all[-_]to[-_]all"
    r"|collective-(permute|broadcast)|psum(_scatter|_invariant)?|pmax|pmin|ppermute|pbroadcast|send|recv)"
    r"(-start|-done)?(?![-\w])"
)
DEVICE = re.compile(r"/device:\w+:\d+")  # the plane of a GPU or TPU


class Op(NamedTuple):
    """One execution of an operation on a device, in nanoseconds."""

    device: str
    start: float
    stop: float
    collective: bool


class Shares(NamedTuple):
    """Seconds per round, split by kind.

    The kinds compute, exchange and host add up to `wall`. They are NaN if the trace has no device events.

    Attributes:
        wall: Total seconds per round while tracing.
        compute: Time in which a device executes anything except collectives.
        exchange: Time in which it executes collectives, including waiting for the other devices.
        host: Time in which it executes nothing: dispatch, Python, copies of results.
        untraced: Seconds per round without the tracer. Tracing slows down programs with many small operations.
        directory: Folder of the trace.
    """

    wall: float
    compute: float
    exchange: float
    host: float
    untraced: float
    directory: Path


def profiler(directory: Path) -> Callable[[Callable[[], Any]], str]:
    """A function that plays some rounds, traces them into a folder, and says in one line where their time goes."""

    def traced(dispatch: Callable[[], Any]) -> str:
        dispatch()  # the first one warms up
        return describe(profile(directory, dispatch))

    return traced


def profile(directory: Path, dispatch: Callable[[], Any]) -> Shares:
    """Runs some rounds without the tracer and as many with it, and reads the trace.

    A trace contains every executed operation, easily 100,000 per round on a CPU. The untraced rounds show how much time
    the tracer adds: one or two microseconds per operation.

    Args:
        directory: Folder for the trace, which gets its own subfolder of plugins/profile/.
        dispatch: Runs a compiled, warmed-up round and waits for it.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing Python calls is slow and useless for compiled rounds
    # JAX's names have a resolution of seconds.
    options.session_id = f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    untraced = _play(dispatch)
    with jax.profiler.trace(directory, profiler_options=options):
        wall = _play(dispatch)

    ops: list[Op] = []
    folder = directory / "plugins" / "profile" / options.session_id
    for file in folder.glob("*.xplane.pb"):
        data = jax.profiler.ProfileData.from_file(str(file))
        ops += read(data)
    compute, exchange, host = shares(ops, wall)
    return Shares(
        wall=wall / ROUNDS,
        compute=compute / ROUNDS,
        exchange=exchange / ROUNDS,
        host=host / ROUNDS,
        untraced=untraced / ROUNDS,
        directory=directory,
    )


def _play(dispatch: Callable[[], Any]) -> float:
    """Runs `ROUNDS` rounds. Returns the seconds that they took."""
    begin = time.perf_counter()
    for number in range(ROUNDS):
        with jax.profiler.StepTraceAnnotation("dispatch", step_num=number):
            dispatch()
    return time.perf_counter() - begin


def read(data: jax.profiler.ProfileData) -> list[Op]:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the operations in a trace. GPUs and TPUs have their own planes; CPU devices are host threads."""
    with warnings.catch_warnings():
        # Python 3.13 warns about jaxlib's iterators on first use; turned into an error, that ends the process.
        warnings.filterwarnings(
            "ignore", "builtin type .* has no __module__ attribute", DeprecationWarning
        )
        planes = list(data.planes)
        ops: list[Op] = []
        for plane in planes:
            device = DEVICE.match(plane.name)
            if device:
                ops += _device_ops(device.group(), plane)
        if ops:
            return ops
        for plane in planes:
            if plane.name == "/host:CPU":
                ops += _host_ops(plane)
        return ops


def _device_ops(device: str, plane: Any) -> Iterable[Op]:
    """Returns a device's operations. On a TPU they have their own lines; on a GPU they are the kernels of its streams.

    A TPU's SparseCores have their own planes but belong to the device.
    """
    all_lines = list(plane.lines)
    lines = [line for line in all_lines if line.name in ("XLA Ops", "Async XLA Ops")]
    if not lines:
        lines = [line for line in all_lines if line.name.startswith("Stream")]
    for line in lines:
        for event in line.events:
            stats = dict(event.stats)
            name = str(stats.get("hlo_op", ""))
            if not name and event.name.startswith(("Memcpy", "Memset")):
                continue  # copies by the host, not by the program
            stop = event.start_ns + event.duration_ns
            is_collective = any(COLLECTIVE.match(text) for text in (name, event.name))
            yield Op(device, event.start_ns, stop, is_collective)


def _host_ops(plane: Any) -> Iterable[Op]:
    """Returns the operations of CPU devices. One that continues in other threads ends with an event "end: NAME"."""
    begun: list[tuple[Any, Op]] = []
    ended: dict[tuple[str, Any], float] = {}
    for line in plane.lines:
        for event in line.events:
            name = event.name
            stats = dict(event.stats)
            if name.startswith("end: "):
                ended[name, stats.get("_c")] = event.start_ns
            elif "hlo_op" in stats and "device_ordinal" in stats:
                device = f"CPU:{stats['device_ordinal']}"
                stop = event.start_ns + event.duration_ns
                op = Op(device, event.start_ns, stop, bool(COLLECTIVE.match(name)))
                ending = (f"end: {name}", stats.get("_p"))
                begun.append((ending, op))
    for ending, op in begun:
        stop = ended.get(ending, op.stop)
        yield op._replace(stop=max(op.stop, stop))


def shares(ops: list[Op], seconds: float) -> tuple[float, float, float]:
    """Splits `seconds` into compute, exchange and host time, averaged over the devices.

    Operations overlap and nest (a loop lasts as long as its body), so this measures the time that any of them covers.
    """
    devices: dict[str, list[Op]] = {}
    for op in ops:
        devices.setdefault(op.device, []).append(op)
    if not devices:
        return math.nan, math.nan, math.nan

    def seconds_in(groups: Iterable[list[Op]]) -> float:
        """Mean seconds in which a device executes any of its operations."""
        lengths: list[float] = []
        for group in groups:
            lengths.append(covered((op.start, op.stop) for op in group))
        # A device's clock may differ slightly from the host's.
        return min(float(np.mean(lengths)) / 1e9, seconds)

    busy = seconds_in(devices.values())
    collectives = [[op for op in group if op.collective] for group in devices.values()]
    exchange = seconds_in(collectives)
    return busy - exchange, exchange, seconds - busy


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of (start, stop) intervals."""
    total = 0.0
    reached = -math.inf
    for start, stop in sorted(intervals):
        total += max(stop - max(start, reached), 0.0)
        reached = max(reached, stop)
    return total


def describe(shares: Shares) -> str:
    """Returns the line for the user."""
    milliseconds = 1e3 * shares.wall
    untraced = 1e3 * shares.untraced
    line = f"profile: {milliseconds:.2f} ms per round ({untraced:.2f} ms untraced)"
    if math.isnan(shares.host):
        return f"{line}; the trace has no device events; trace in {shares.directory}"
    percents: list[str] = []
    for name in ("compute", "exchange", "host"):
        share = getattr(shares, name) / shares.wall
        percents.append(f"{name} {100 * share:.0f} %")
    return f"{line}: {', '.join(percents)}; trace in {shares.directory}"
