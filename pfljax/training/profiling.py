"""Where a round's time goes: a profiler trace of a few warm rounds, and the shares that are read back from it.

A trace opens in TensorBoard or XProf, its trace.json.gz in Perfetto.
"""

from __future__ import annotations

import datetime
import math
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from pfljax.core.errors import ArgumentError, RunError

MIN_ROUNDS = 3  # of a trace

# Operations are named by XLA's opcode, JAX's primitive or NCCL's kernel. A fusion has no collective in it, whatever its
# name begins with, so that nothing but a number may follow.
COLLECTIVE = re.compile(
    r"nccl|%?(all[-_]reduce|all-reduce-scatter|reduce[-_]scatter|all[-_]gather|(ragged[-_])?all[-_]to[-_]all"
    r"|collective-(permute|broadcast)|psum(_scatter|_invariant)?|pmax|pmin|ppermute|pbroadcast|send|recv)"
    r"(-start|-done)?(?![-\w])"
)
DEVICE = re.compile(r"/device:\w+:\d+")  # the plane of a GPU or a TPU


class Op(NamedTuple):
    """One execution of an operation on a device, in nanoseconds."""

    device: str
    start: float
    stop: float
    collective: bool


class Shares(NamedTuple):
    """Seconds a round under the tracer, and of them those of each kind, which add up to it.

    Attributes:
        wall: All of them.
        compute: A device executes anything but collectives.
        exchange: It executes collectives, which includes waiting for the other devices to arrive at them.
        host: It executes nothing: dispatch, Python, copies of results. Not a number, as the two before, if the trace
            has no device events.
        untraced: Seconds a round without the tracer, which slows programs of many small operations down.
        directory: Where the trace is.
    """

    wall: float
    compute: float
    exchange: float
    host: float
    untraced: float
    directory: Path


def check(directory: Path) -> None:
    """Sees to it that a trace can be written, making the folder.

    Raises:
        ArgumentError: where it cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        text = f"{error.strerror}; name a folder that can be written to, new or not"
        raise ArgumentError("profile", text, directory) from error


def profile(directory: Path, dispatch: Callable[[], int]) -> Shares:
    """Plays some rounds untraced and as many traced, and reads the trace back.

    A trace holds every operation that was executed, on a CPU easily 100,000 a round, so that a dispatch is best one
    round. The untraced rounds tell what the tracer adds, which is a microsecond or two an operation.

    Args:
        directory: Takes the trace, in a folder of its own below plugins/profile/.
        dispatch: Plays rounds that are compiled and warm, waits for them, and returns how many (one at least).
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every Python call: much time, and no use for compiled rounds
    options.session_id = f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"  # JAX's own names differ by seconds only
    rounds, seconds = _play(dispatch)
    untraced = seconds / rounds
    with jax.profiler.trace(directory, profiler_options=options):
        rounds, seconds = _play(dispatch)
    files = (directory / "plugins" / "profile" / options.session_id).glob("*.xplane.pb")
    ops = [op for file in files for op in read(jax.profiler.ProfileData.from_file(str(file)))]
    parts = [part / rounds for part in (seconds, *shares(ops, seconds))]
    return Shares(*parts, untraced=untraced, directory=directory)


def _play(dispatch: Callable[[], int]) -> tuple[int, float]:
    """Rounds and seconds of as many dispatches as `MIN_ROUNDS` take."""
    rounds, begin = 0, time.perf_counter()
    for number in range(MIN_ROUNDS):
        with jax.profiler.StepTraceAnnotation("dispatch", step_num=number):
            rounds += dispatch()
        if rounds >= MIN_ROUNDS:
            break
    if not rounds:
        raise RunError("profile: there was no round to play")
    return rounds, time.perf_counter() - begin


def read(data: jax.profiler.ProfileData) -> list[Op]:  # pyright: ignore[reportInvalidTypeForm]
    """What the devices executed, by a trace: GPUs and TPUs have planes of their own, CPU devices are host threads."""
    with warnings.catch_warnings():
        # Python 3.13 warns of jaxlib's iterators as they are first used; as an error, that ends the process.
        warnings.filterwarnings("ignore", "builtin type .* has no __module__ attribute", DeprecationWarning)
        planes = list(data.planes)
        devices = [(found.group(), plane) for plane in planes if (found := DEVICE.match(plane.name))]
        ops = [op for name, plane in devices for op in _of_device(name, plane)]
        return ops or [op for plane in planes if plane.name == "/host:CPU" for op in _of_host(plane)]


def _of_device(device: str, plane: Any) -> Iterable[Op]:
    """A TPU's operations have lines of their own; a GPU's are the kernels of its streams.

    A TPU's SparseCores, planes of their own, are part of the device.
    """
    lines = list(plane.lines)
    ops = [line for line in lines if line.name in ("XLA Ops", "Async XLA Ops")]
    for line in ops or [line for line in lines if line.name.startswith("Stream")]:
        for event in line.events:
            name = str(dict(event.stats).get("hlo_op", ""))
            if not name and event.name.startswith(("Memcpy", "Memset")):
                continue  # the host's copies, not the program's
            collective = any(COLLECTIVE.match(text) for text in (name, event.name))
            yield Op(device, event.start_ns, event.start_ns + event.duration_ns, collective)


def _of_host(plane: Any) -> Iterable[Op]:
    """Events of operations; one that goes on in other threads ends with a later event "end: NAME" of the same id."""
    begun, ended = [], {}
    for line in plane.lines:
        for event in line.events:
            name, stats = event.name, dict(event.stats)
            if name.startswith("end: "):
                ended[name, stats.get("_c")] = event.start_ns
            elif "hlo_op" in stats and "device_ordinal" in stats:
                stop = event.start_ns + event.duration_ns
                begun.append((name, stats.get("_p"), f"CPU:{stats['device_ordinal']}", event.start_ns, stop))
    for name, number, device, start, stop in begun:
        stop = max(stop, ended.get((f"end: {name}", number), stop))
        yield Op(device, start, stop, bool(COLLECTIVE.match(name)))


def shares(ops: list[Op], seconds: float) -> tuple[float, float, float]:
    """Compute, exchange and host of `seconds`, the devices' mean.

    Operations overlap and nest (a loop lasts as long as its body), so what counts is the time that any of them covers.
    """
    devices: dict[str, list[Op]] = {}
    for op in ops:
        devices.setdefault(op.device, []).append(op)
    if not devices:
        return math.nan, math.nan, math.nan
    busy = np.mean([covered((op.start, op.stop) for op in own) for own in devices.values()])
    exchange = np.mean([covered((op.start, op.stop) for op in own if op.collective) for own in devices.values()])
    # A device's clock may differ a little from the host's.
    busy, exchange = (min(float(part) / 1e9, seconds) for part in (busy, exchange))
    return busy - exchange, exchange, seconds - busy


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of (start, stop) pairs."""
    total, reached = 0.0, -math.inf
    for start, stop in sorted(intervals):
        total += max(stop - max(start, reached), 0.0)
        reached = max(reached, stop)
    return total


def describe(shares: Shares) -> str:
    """The line for the user."""
    line = f"profile: {1e3 * shares.wall:.2f} ms a round ({1e3 * shares.untraced:.2f} ms untraced)"
    if math.isnan(shares.host):
        return f"{line}; the trace has no device events; trace in {shares.directory}"
    names = ("compute", "exchange", "host")
    parts = ", ".join(f"{name} {100 * getattr(shares, name) / shares.wall:.0f} %" for name in names)
    return f"{line}: {parts}; trace in {shares.directory}"
