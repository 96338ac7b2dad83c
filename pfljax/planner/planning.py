"""How a run would do on devices that are not here: every plan and exchange, compiled and read.

A run's own program of rounds is lowered with shapes instead of arrays, so no state is allocated. Evaluation is not
counted, neither its time nor its data.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from pfljax.contract import tree
from pfljax.contract.host import readable
from pfljax.contract.types import ClientData
from pfljax.exchange.plan import ExecutionPlan
from pfljax.local.batches import block_counts
from pfljax.planner.targets import PlanElsewhere, ProgramEstimate, Target, TooLarge, compile_for
from pfljax.run.compiled import Lowered
from pfljax.run.experiment import Experiment
from pfljax.run.memory import SHARE
from pfljax.run.replicates import ONE
from pfljax.stores.registry import store_of
from pfljax.training import choosing

NAMES = {0: "vmap", 1: "map"}
MS_PER_HOUR = 3.6e6
HELD = "state, data and frozen parameters alone do not fit"
AT_ONCE = 2  # programs that are compiled at a time


@dataclasses.dataclass(frozen=True)
class Row:
    """One plan and exchange on a target; figures are of one device and one round.

    Attributes:
        plan: "vmap", "chunk" or "map".
        chunk: Number of clients at a time; 0: all of a device's.
        exchange: "gather" or "ring"; "": the topology leaves no choice.
        fits: Whether its memory suffices.
        why: Why there are no figures, or ""; the compiler's own words if it refused.
        arguments_bytes, outputs_bytes, temporaries_bytes: Memory; arguments are state, data and frozen parameters.
        frozen_bytes: Those of the frozen parameters.
        collectives_bytes: Bytes of collectives.
        collectives: Their kinds, shapes, bytes and times.
        milliseconds: Estimated time; `compute_milliseconds` and `collectives_milliseconds` are its parts.
        hours: The same for the whole run.
        compile_seconds: How long compiling took on this machine.
        doubles: Whether it computes in 64-bit floating point.
        unknown_operations: Number of operations whose time the compiler does not know; they count as 0.
    """

    plan: str
    chunk: int
    exchange: str
    fits: bool
    why: str = ""
    arguments_bytes: int | None = None
    outputs_bytes: int | None = None
    temporaries_bytes: int | None = None
    collectives_bytes: float | None = None
    collectives: tuple[dict, ...] = ()
    compute_milliseconds: float | None = None
    collectives_milliseconds: float | None = None
    milliseconds: float | None = None
    hours: float | None = None
    compile_seconds: float = 0.0
    doubles: bool = False
    unknown_operations: int = 0
    frozen_bytes: int = 0

    @property
    def name(self) -> str:
        """Plan and exchange in words."""
        kind = f"chunk of {self.chunk}" if self.plan == "chunk" else self.plan
        return f"{kind}, {self.exchange}" if self.exchange else kind


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What compilers say of a run on a target. These are estimates, not measurements.

    Attributes:
        target: The devices, such as "tpu:v5e:4x4".
        devices: Their number.
        memory_bytes: Memory of one device.
        rests_on: What estimated times rest on.
        method: The method's name.
        num_clients, cohort_size, rounds: Of the run.
        rows: A row for each plan and exchange that was tried.
        recommended: The choices of the fastest row that fits, by argument of `Execution`; empty: nothing fits.
        hours: For the whole run with these choices; None: nothing fits.
        notes: What was left out and why, and what may help.
    """

    target: str
    devices: int
    memory_bytes: int
    rests_on: str
    method: str
    num_clients: int
    cohort_size: int
    rounds: int
    rows: tuple[Row, ...]
    recommended: dict[str, Any]
    hours: float | None
    notes: tuple[str, ...]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Returns heads and lines of a table."""
        heads = [
            "plan",
            "fits",
            "arguments",
            "outputs",
            "temporaries",
            "collectives",
            "ms a round",
            "hours",
        ]
        return heads, [_line(row) for row in self.rows]

    def __str__(self) -> str:
        heads, body = self.table()
        widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            for line in [heads, *body]
        ]
        return "\n".join([*lines, *self.notes])


def _line(row: Row) -> list[str]:
    def size(value):
        return "" if value is None else readable(value)

    def number(value):
        return "" if value is None else f"{value:,.3g}"

    sizes = row.arguments_bytes, row.outputs_bytes, row.temporaries_bytes, row.collectives_bytes
    return [
        row.name,
        "yes" if row.fits else "no",
        *map(size, sizes),
        number(row.milliseconds),
        number(row.hours),
    ]


def estimate_for(
    experiment: Experiment,
    target: Target,
    seconds: float = math.inf,
    say: Callable[[str], None] | None = None,
) -> Estimate:
    """Compiles a run's rounds for a target with every plan and exchange.

    Args:
        experiment: The run; `problem.rounds` is the number of rounds that hours are for.
        target: The devices.
        seconds: Time after which no further program is begun, if its like took too long; the first is always compiled.
        say: Called with a line about each program.
    """
    problem = experiment.problem
    plan = target.plan(0, "auto", experiment.problem.plan.model_devices)
    wanted = choosing.choices(experiment, plan)
    rows, notes = compiled_rows(experiment, target, wanted, seconds, say)
    best = min(
        (row for row in rows if row.fits), key=lambda row: row.milliseconds or 0.0, default=None
    )
    return Estimate(
        target.name,
        len(target.devices),
        target.chip.memory,
        rests_on(target, rows),
        experiment.name,
        problem.num_clients,
        problem.cohort_size,
        problem.rounds,
        tuple(rows),
        recommended(best),
        best.hours if best else None,
        (
            *held_once(rows),
            *(f"{row.name}: {row.why}" for row in rows if row.why),
            *notes,
            *advice(experiment, target, best),
        ),
    )


def held_once(rows: Sequence[Row]) -> list[str]:
    """What each device holds of frozen parameters."""
    frozen = max((row.frozen_bytes for row in rows), default=0)
    return (
        [f"each device holds the frozen parameters once: {readable(frozen)} of the arguments"]
        if frozen
        else []
    )


def rests_on(target: Target, rows: Sequence[Row]) -> str:
    """What the rows' times rest on, in words."""
    unknown = max((row.unknown_operations for row in rows), default=0)
    return target.rests_on + (
        f"; up to {unknown} operations without an estimate count as 0" if unknown else ""
    )


def compiled_rows(
    experiment: Experiment,
    target: Target,
    wanted: Iterable[tuple[int, str]],
    seconds: float,
    say: Callable[[str], None] | None = None,
) -> tuple[list[Row], list[str]]:
    """Compiles two programs at a time. Returns the rows of the wanted chunks and exchanges, and what was left out."""
    begin = time.perf_counter()
    notes = []
    longest = 0.0
    found: list[Row | Future[Row]] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for chunk, exchange in wanted:
            running = [each for each in found if isinstance(each, Future) and not each.done()]
            if len(running) >= AT_ONCE:
                wait(running, return_when=FIRST_COMPLETED)
            done = [each.result() for each in found if isinstance(each, Future) and each.done()]
            longest = max((row.compile_seconds for row in done), default=0.0)
            passed = time.perf_counter() - begin
            name = Row(NAMES.get(chunk, "chunk"), chunk, exchange, False).name
            if found and passed + longest > seconds:
                notes.append(f"{name}: left out, since {passed:.0f} of {seconds:g} s have passed")
                continue
            row, compiling = prepare(experiment, target, chunk, exchange)
            if compiling is not None and say:
                say(f"compiling {name}")
            found.append(row if compiling is None else pool.submit(compiling))
            if row.why == HELD:
                notes.append("all other plans: left out, since they hold the same")
                break
        return [each.result() if isinstance(each, Future) else each for each in found], notes


def recommended(best: Row | None) -> dict[str, Any]:
    """The arguments of `Execution` that a row stands for."""
    if best is None:
        return {}
    chunk = {"chunk": best.chunk} if best.plan == "chunk" else {}
    return {"plan": best.plan, **chunk, **({"exchange": best.exchange} if best.exchange else {})}


def advice(experiment: Experiment, target: Target, best: Row | None) -> list[str]:
    """What may help: a number of clients that divides, another store."""
    found = []
    num = experiment.problem.num_clients
    # that clients are divided over
    devices = len(target.devices) // experiment.problem.plan.model_devices
    if num % devices and experiment.client_store == "device":
        near = [n for n in (num // devices * devices, -(-num // devices) * devices) if n]
        found.append(
            f"{num} clients cannot be divided over {devices} devices, so each device holds all; "
            f"{' or '.join(map(str, near))} clients can"
        )
    if best is None:
        found.append(
            "nothing fits; fewer clients, more devices, a smaller model or client_store = host may"
        )
    return found


def prepare(
    experiment: Experiment, target: Target, chunk: int, exchange: str
) -> tuple[Row, Callable[[], Row] | None]:
    """Returns the row of one plan without a compiler's figures, and what compiles it if it may fit."""
    model_devices = experiment.problem.plan.model_devices
    plan: Any = target.plan(chunk, exchange or "auto", model_devices)  # type: ignore[arg-type]
    plan = plan.for_steps(experiment.steps, experiment.problem.cohort_size)
    lowered, data = lower(experiment, plan)
    room = SHARE * target.chip.memory
    frozen = on_a_device(lowered.frozen)
    held = on_a_device((lowered.state, data)) + frozen + lowered.ahead
    row = Row(
        NAMES.get(chunk, "chunk"), chunk, exchange, False, arguments_bytes=held, frozen_bytes=frozen
    )
    if held > room:
        return dataclasses.replace(row, why=HELD), None
    everyone = tree.num_bytes(lowered.state.models)
    if exchange == "gather" and everyone > room * model_devices:
        return dataclasses.replace(
            row, why=f"a copy of all models takes {readable(everyone)}"
        ), None
    of_loops = lengths(experiment, plan)

    def compiling() -> Row:
        found = compile_for(target, lowered.program, of_loops)
        if isinstance(found, TooLarge):
            why = " ".join(found.text.split())[:200]
            return dataclasses.replace(row, why=why, compile_seconds=found.compile_seconds)
        return _row_of(row, found, lowered, room, experiment.problem.rounds)

    return row, compiling


def _row_of(row: Row, found: ProgramEstimate, lowered: Lowered, room: float, rounds: int) -> Row:
    """A row with a compiler's figures."""
    return dataclasses.replace(
        row,
        fits=found.total_bytes + lowered.ahead <= room,
        arguments_bytes=found.arguments_bytes + lowered.ahead,
        outputs_bytes=found.outputs_bytes,
        temporaries_bytes=found.temporaries_bytes,
        collectives_bytes=found.collectives_bytes,
        collectives=tuple(each._asdict() for each in found.collectives),
        compute_milliseconds=found.compute_milliseconds,
        collectives_milliseconds=found.collectives_milliseconds,
        milliseconds=found.milliseconds,
        hours=rounds * found.milliseconds / MS_PER_HOUR,
        compile_seconds=found.compile_seconds,
        doubles=found.doubles,
        unknown_operations=found.unknown,
    )


def lower(experiment: Experiment, plan: PlanElsewhere) -> tuple[Lowered, Any]:
    """Lowers a run's rounds for devices that are not here. Returns the program and the shapes of the clients' data."""
    store = store_of(experiment)
    federation = experiment.federation

    def put(part):
        return store.put(plan, ONE, [part], federation.num_clients)

    data = ClientData(put(federation.train), put(federation.validation))
    if federation.attacker is not None:
        data = data._replace(attacker=put(federation.attacker))
    lowered = store.lower_segment(experiment, data, plan, 1, ONE)
    return lowered, data if store.on_devices else ()


def on_a_device(shapes: Any) -> int:
    """Bytes of arrays on one device, from their shapes with shardings."""
    leaves = [
        leaf for leaf in jax.tree.leaves(shapes) if getattr(leaf, "sharding", None) is not None
    ]
    local = [math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves]
    return sum(size * leaf.dtype.itemsize for size, leaf in zip(local, leaves, strict=True))


def lengths(experiment: Experiment, plan: ExecutionPlan) -> Callable[[str], float | None]:
    """How often a loop whose length depends on clients' data runs, by the scope that names it; None: not known."""
    federation = experiment.federation
    cohort = experiment.problem.cohort_size
    sizes = np.asarray(federation.train.size)

    @functools.cache
    def of(scope: str) -> float | None:
        counts = block_counts(scope, (federation.train, federation.validation))
        counts = experiment.steps if scope == "steps" else counts
        return None if counts is None else plan.repetitions(counts, cohort, sizes)

    return of
