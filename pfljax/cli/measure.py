"""One cell of a scaling study: its data, whether it fits into memory, and its measures."""

from __future__ import annotations

import dataclasses
import functools
import math
import resource
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from pfljax import data
from pfljax.cli import build, timing
from pfljax.cli.settings import VALIDATION_FRACTION, Settings
from pfljax.contract import method, tree
from pfljax.contract.errors import RunError
from pfljax.contract.pooled import Pooled
from pfljax.contract.types import Split
from pfljax.data import Federation, sources
from pfljax.exchange import lifting, pools
from pfljax.exchange.plan import ExecutionPlan, Peers, make_plan
from pfljax.stores import compiled, memory
from pfljax.stores.experiment import Experiment
from pfljax.training import loop, scoring

# Columns of a measured cell's row, after the cell's own.
MEASURES = (
    *("parameters", "clients_per_round", "chunk", "rounds", "compile_seconds"),
    *("seconds_per_round", "fastest_round", "slowest_round", "seconds_again"),
    *("client_updates_per_second", "argument_bytes", "output_bytes", "temporary_bytes", "peak_device_bytes"),
    *("peak_resident_bytes", "disk_bytes", "bytes_down", "bytes_up", "projected_hours"),
)

DISTINCT = 10_000  # random images that clients share if data are not on the devices


class Cell(NamedTuple):
    """A point of the grid. Its fields are the columns that identify a row."""

    algorithm: str
    num_clients: int
    cohort: int  # 0: all
    plan: str
    devices: int

    @property
    def clients_per_round(self) -> int:
        """S."""
        return self.cohort or self.num_clients

    def make_plan(self, exchange: Peers) -> ExecutionPlan:
        """Returns how its clients are mapped to devices."""
        kind, _, chunk = self.plan.partition("-")
        return make_plan(kind, int(chunk or 0), self.devices, exchange)


@functools.lru_cache(maxsize=1)
def load(path: str) -> sources.Source:
    """Returns the file's examples."""
    return sources.npz(path)


def described_data(settings: Settings) -> str:
    """Describes the training data."""
    if settings.data_file:
        shape = "x".join(map(str, load(settings.data_file).x.shape[1:]))
        return f"{Path(settings.data_file).name}, examples of {shape}"
    return f"random pixels {'x'.join(settings.shape)}"


def build_clients(settings: Settings, cell: Cell, num_clients: int) -> Federation:
    """Returns `num_clients` of the cell's clients, with training and, if the method needs them, validation examples.

    Raises:
        RunError: if the file has too few examples.
    """
    train = settings.train_examples
    validates = method.get(cell.algorithm).info.validates
    size = train + (max(1, round(VALIDATION_FRACTION * train)) if validates else 0)
    if settings.data_file is None:
        shape = tuple(settings.numbers("shape", int))
        distinct = 0 if settings.client_store == "device" else DISTINCT
        need = 4 * min(num_clients, distinct or num_clients) * size * math.prod(shape)
        check_fit(need, memory.host_free(), "data on the host")
        federation = data.random_pixels(num_clients, size, shape, settings.num_classes, 0, distinct=distinct)
        x, y = federation.train.x, federation.train.y
        task, num_classes = federation.task, federation.num_classes
    else:
        source = load(settings.data_file)
        rows = np.arange(len(source.y)) if source.is_test is None else np.flatnonzero(~source.is_test)
        if len(rows) < cell.num_clients * size:
            raise RunError(f"the file has {len(rows)} training examples, but {cell.num_clients} x {size} are needed")
        rows = np.random.default_rng(0).permutation(rows)[: num_clients * size].reshape(num_clients, size)
        x, y, task, num_classes = source.x[rows], source.y[rows], source.task, source.num_classes

    def part(start: int, stop: int) -> Split:
        examples = dataclasses.replace(x, index=x.index[:, start:stop]) if isinstance(x, Pooled) else x[:, start:stop]
        return Split(examples, y[:, start:stop], np.full(num_clients, stop - start, np.int32))

    parts = part(0, train), part(train, size), part(0, 0)
    return Federation(*parts, np.zeros(num_clients, np.int32), task, num_classes, described_data(settings))


def shapes_of(settings: Settings, cell: Cell, plan: ExecutionPlan) -> Federation:
    """Returns the shapes of the cell's clients on the devices, derived from one client's data."""
    one = build_clients(settings, cell, 1)

    def shape(leaf):
        leaf = jax.ShapeDtypeStruct((cell.num_clients, *leaf.shape[1:]), leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=plan.sharding(leaf, by_rows=True))

    splits = {name: tree.map_rows(shape, getattr(one, name)) for name in ("train", "validation", "test")}
    return dataclasses.replace(one, **splits, distribution=np.zeros(0, np.int32))


def build_experiment(settings: Settings, cell: Cell) -> Experiment:
    """Builds the cell's run from shapes."""
    plan = cell.make_plan(settings.exchange)
    shapes = shapes_of(settings, cell, plan)
    model = build.build_model(settings, shapes)
    local = build.build_local(settings.of_method(cell.algorithm), shapes)
    return timing.build(
        build.build_method(settings, cell.algorithm),
        shapes,
        model,
        local.bind(model),
        plan,
        cell.clients_per_round,
        client_store=settings.client_store,
        common_init=settings.common_init,
        keep_optimizer=settings.keep_optimizer,
        n_min=settings.train_examples,
        learning_rate=local.learning_rate,
    )


def on_a_device(stacked) -> int:
    """Returns the bytes that shapes with shardings take on one device."""
    local = lambda leaf: jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    return tree.num_bytes(jax.tree.map(local, stacked))


def check_fit(need: int, limit: int, what: str) -> None:
    """Raises `RunError` if `what` needs more bytes than a run may plan with."""
    if need > memory.SHARE * limit:
        has = f"{memory.readable(int(memory.SHARE * limit))} (of {memory.readable(limit)})"
        raise RunError(f"out of memory: {what}: needs {memory.readable(need)}, but only {has} is available")


def check_state(experiment: Experiment) -> int:
    """Checks that state and data fit in memory, from their shapes. Returns the bytes of the copy on a CPU host.

    Raises:
        RunError: if they do not fit.
    """
    plan, clients = experiment.problem.plan, experiment.federation.client_data
    algorithm = experiment.algorithm(plan)
    state = jax.eval_shape(functools.partial(lifting.init, algorithm, plan), jax.random.key(0), clients)
    copy = 5 * tree.num_bytes(clients) // 4  # includes the test examples that random_pixels generates
    if experiment.client_store == "disk":
        check_fit(copy, memory.host_free(), "clients' data on the host")
        return 0
    if experiment.client_store == "host":
        largest = max(map(tree.num_bytes, jax.tree.leaves(state)))  # a second copy while it is moved
        check_fit(copy + tree.num_bytes(state) + largest, memory.host_free(), "clients' state and data on the host")
        return 0
    state = compiled.shaped(state, compiled.state_shardings(algorithm, plan, state))
    check_fit(copy, memory.host_free(), "data on the host")
    copy = copy // len(jax.local_devices()) if jax.default_backend() == "cpu" else 0
    check_fit(on_a_device((state, clients)) + copy, memory.device_limit(), "state and data on a device")
    return copy


def measure(settings: Settings, cell: Cell) -> dict:
    """Measures a cell: compiles it, times `--rounds` rounds, and reads the memory analysis and the records.

    Raises:
        RunError: if it does not fit in memory.
    """
    jax.clear_caches()  # each cell compiles everything it needs
    experiment = build_experiment(settings, cell)
    copy = check_state(experiment)
    resident, device = PeakResident(), memory.peak_bytes()
    if settings.client_store == "disk" and jax.process_count() > 1:
        raise settings.error(
            "client_store", "its files are in a temporary folder; accepted with several processes: host"
        )
    folder = tempfile.TemporaryDirectory()
    experiment = dataclasses.replace(experiment, directory=Path(folder.name))
    rounds = loop.compile_to_fit(experiment, experiment.federation.client_data, 1)
    clients = build_clients(settings, cell, cell.num_clients).client_data
    if settings.client_store == "device":
        need = max(rounds.making.total if rounds.making else 0, rounds.memory.total) + copy
        check_fit(need, memory.device_limit(), "initializing the state, or a round, on a device")
        clients = pools.place(rounds.plan, clients, cell.num_clients)
    trace = Path(settings.profile) / "-".join(map(str, cell)) if settings.profile else None
    dispatch = timing.start(experiment, rounds, clients, 1, trace, period=settings.rounds)
    dispatch()  # warm-up
    seconds, records = zip(*[dispatch() for _ in range(settings.rounds)], strict=True)
    on_disk = settings.client_store == "disk"
    again = [dispatch()[0] for _ in range(settings.rounds)] if on_disk else []  # now all clients have rows
    per_round, peak = float(np.median(seconds)), memory.peak_bytes()
    disk = sum(path.stat().st_blocks * 512 for path in Path(folder.name).iterdir())
    folder.cleanup()
    return dict.fromkeys(MEASURES) | {
        "parameters": scoring.num_parameters(experiment.problem.model),
        "clients_per_round": cell.clients_per_round,
        "chunk": rounds.plan.chunk,
        "rounds": settings.rounds,
        "compile_seconds": rounds.compile_seconds,
        "seconds_per_round": per_round,
        "fastest_round": min(seconds),
        "slowest_round": max(seconds),
        "seconds_again": float(np.median(again)) if again else None,
        "client_updates_per_second": cell.clients_per_round / per_round,
        "argument_bytes": rounds.memory.arguments,
        "output_bytes": rounds.memory.outputs,
        "temporary_bytes": rounds.memory.temporaries,
        # A device reports the peak of the whole process: it is this cell's peak if it has risen.
        "peak_device_bytes": peak if peak != device else None,
        "peak_resident_bytes": resident.read(),
        "disk_bytes": disk,
        "bytes_down": float(np.mean([record.down for record in records])),
        "bytes_up": float(np.mean([record.up for record in records])),
    }


class PeakResident:
    """Peak resident memory of this process from now on, including what earlier cells left in memory."""

    def __init__(self):
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
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        except (OSError, StopIteration):
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return most if sys.platform == "darwin" else 1024 * most


def row_of(settings: Settings, cell: Cell) -> dict:
    """Returns the cell's row: its measurements, or the reason why it was skipped."""
    row = {"status": "skipped", "reason": None, **cell._asdict(), **dict.fromkeys(MEASURES)}
    try:
        return row | {"status": "measured"} | measure(settings, cell)
    except (RunError, MemoryError) as error:
        return row | {"reason": str(error)}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return row | {"reason": str(error).splitlines()[0]}
