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
from pfljax.contract.speech import logger
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
DOES_NOT_FIT = "state, data and frozen parameters alone do not fit"
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
        table = [heads, *body]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines: list[str] = []
        for row in table:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells))
        return "\n".join([*lines, *self.notes])


def _line(row: Row) -> list[str]:
    """A row's cells of `Estimate.table`."""

    def size(value: float | None) -> str:
        return "" if value is None else readable(value)

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:,.3g}"

    return [
        row.name,
        "yes" if row.fits else "no",
        size(row.arguments_bytes),
        size(row.outputs_bytes),
        size(row.temporaries_bytes),
        size(row.collectives_bytes),
        number(row.milliseconds),
        number(row.hours),
    ]


def estimate_for(
    experiment: Experiment,
    target: Target,
    seconds: float = math.inf,
) -> Estimate:
    """Compiles a run's rounds for a target with every plan and exchange.

    Args:
        experiment: The run; `problem.rounds` is the number of rounds that hours are for.
        target: The devices.
        seconds: Time after which no further program is begun, if its like took too long; the first is always compiled.
    """
    problem = experiment.problem
    plan = target.plan(0, "auto", problem.plan.model_devices)
    choices = choosing.choices(experiment, plan)
    rows, left_out = compiled_rows(experiment, target, choices, seconds)
    fitting = [row for row in rows if row.fits]
    best = min(fitting, key=lambda row: row.milliseconds or 0.0, default=None)

    reasons = [f"{row.name}: {row.why}" for row in rows if row.why]
    notes = [*held_once(rows), *reasons, *left_out, *advice(experiment, target, best)]
    return Estimate(
        target=target.name,
        devices=len(target.devices),
        memory_bytes=target.chip.memory,
        rests_on=rests_on(target, rows),
        method=experiment.name,
        num_clients=problem.num_clients,
        cohort_size=problem.cohort_size,
        rounds=problem.rounds,
        rows=tuple(rows),
        recommended=recommended(best),
        hours=best.hours if best else None,
        notes=tuple(notes),
    )


def held_once(rows: Sequence[Row]) -> list[str]:
    """What each device holds of frozen parameters."""
    frozen = max((row.frozen_bytes for row in rows), default=0)
    if not frozen:
        return []
    return [f"each device holds the frozen parameters once: {readable(frozen)} of the arguments"]


def rests_on(target: Target, rows: Sequence[Row]) -> str:
    """What the rows' times rest on, in words."""
    unknown = max((row.unknown_operations for row in rows), default=0)
    if not unknown:
        return target.rests_on
    return f"{target.rests_on}; up to {unknown} operations without an estimate count as 0"


def compiled_rows(
    experiment: Experiment,
    target: Target,
    wanted: Iterable[tuple[int, str]],
    seconds: float,
) -> tuple[list[Row], list[str]]:
    """Compiles two programs at a time. Returns the rows of the wanted chunks and exchanges, and what was left out."""
    begin = time.perf_counter()
    notes: list[str] = []
    rows: list[Row | Future[Row]] = []  # in order; those that compile are futures
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for chunk, exchange in wanted:
            # Wait for one of the compilers. How long they took tells whether another one has time.
            futures = [row for row in rows if isinstance(row, Future)]
            running = [future for future in futures if not future.done()]
            if len(running) >= AT_ONCE:
                wait(running, return_when=FIRST_COMPLETED)
            compiled = [future.result() for future in futures if future.done()]
            longest = max((row.compile_seconds for row in compiled), default=0.0)
            passed = time.perf_counter() - begin
            name = Row(NAMES.get(chunk, "chunk"), chunk, exchange, fits=False).name
            if rows and passed + longest > seconds:
                notes.append(f"{name}: left out, since {passed:.0f} of {seconds:g} s have passed")
                continue

            row, compiling = prepare(experiment, target, chunk, exchange)
            if compiling is None:
                rows.append(row)
            else:
                logger.info("compiling %s", name)
                rows.append(pool.submit(compiling))
            if row.why == DOES_NOT_FIT:
                notes.append("all other plans: left out, since they hold the same")
                break
        return [row.result() if isinstance(row, Future) else row for row in rows], notes


def recommended(best: Row | None) -> dict[str, Any]:
    """The arguments of `Execution` that a row stands for."""
    if best is None:
        return {}
    choices: dict[str, Any] = {"plan": best.plan}
    if best.plan == "chunk":
        choices["chunk"] = best.chunk
    if best.exchange:
        choices["exchange"] = best.exchange
    return choices


def advice(experiment: Experiment, target: Target, best: Row | None) -> list[str]:
    """What may help: a number of clients that divides, another store."""
    lines: list[str] = []
    num_clients = experiment.problem.num_clients
    # that clients are divided over
    devices = len(target.devices) // experiment.problem.plan.model_devices
    if num_clients % devices and experiment.client_store == "device":
        fewer = num_clients // devices * devices
        more = -(-num_clients // devices) * devices
        divisible = f"{fewer} or {more}" if fewer else f"{more}"
        lines.append(
            f"{num_clients} clients cannot be divided over {devices} devices, "
            f"so each device holds all; {divisible} clients can"
        )
    if best is None:
        lines.append(
            "nothing fits; fewer clients, more devices, a smaller model or client_store = host may"
        )
    return lines


def prepare(
    experiment: Experiment, target: Target, chunk: int, exchange: str
) -> tuple[Row, Callable[[], Row] | None]:
    """Returns the row of one plan without a compiler's figures, and what compiles it if it may fit."""
    model_devices = experiment.problem.plan.model_devices
    plan: Any = target.plan(chunk, exchange or "auto", model_devices)  # type: ignore[arg-type]
    plan = plan.for_steps(experiment.steps, experiment.problem.cohort_size)
    lowered, data = lower(experiment, plan)
    room = SHARE * target.chip.memory

    # What a device holds whatever the compiler does.
    frozen_bytes = on_a_device(lowered.frozen)
    arguments_bytes = on_a_device((lowered.state, data)) + frozen_bytes + lowered.ahead
    row = Row(
        plan=NAMES.get(chunk, "chunk"),
        chunk=chunk,
        exchange=exchange,
        fits=False,
        arguments_bytes=arguments_bytes,
        frozen_bytes=frozen_bytes,
    )
    if arguments_bytes > room:
        return dataclasses.replace(row, why=DOES_NOT_FIT), None
    models_bytes = tree.num_bytes(lowered.state.models)
    if exchange == "gather" and models_bytes > room * model_devices:
        why = f"a copy of all models takes {readable(models_bytes)}"
        return dataclasses.replace(row, why=why), None

    loop_lengths = lengths(experiment, plan)

    def compiling() -> Row:
        estimate = compile_for(target, lowered.program, loop_lengths)
        if isinstance(estimate, TooLarge):
            why = " ".join(estimate.text.split())[:200]
            return dataclasses.replace(row, why=why, compile_seconds=estimate.compile_seconds)
        return _with_figures(row, estimate, lowered, room, experiment.problem.rounds)

    return row, compiling


def _with_figures(
    row: Row, estimate: ProgramEstimate, lowered: Lowered, room: float, rounds: int
) -> Row:
    """A row with a compiler's figures."""
    return dataclasses.replace(
        row,
        fits=estimate.total_bytes + lowered.ahead <= room,
        arguments_bytes=estimate.arguments_bytes + lowered.ahead,
        outputs_bytes=estimate.outputs_bytes,
        temporaries_bytes=estimate.temporaries_bytes,
        collectives_bytes=estimate.collectives_bytes,
        collectives=tuple(collective._asdict() for collective in estimate.collectives),
        compute_milliseconds=estimate.compute_milliseconds,
        collectives_milliseconds=estimate.collectives_milliseconds,
        milliseconds=estimate.milliseconds,
        hours=rounds * estimate.milliseconds / MS_PER_HOUR,
        compile_seconds=estimate.compile_seconds,
        doubles=estimate.doubles,
        unknown_operations=estimate.unknown,
    )


def lower(experiment: Experiment, plan: PlanElsewhere) -> tuple[Lowered, Any]:
    """Lowers a run's rounds for devices that are not here. Returns the program and the shapes of the clients' data."""
    store = store_of(experiment)
    federation = experiment.federation

    def put(part: Any) -> Any:
        return store.put(plan, ONE, [part], federation.num_clients)

    data = ClientData(put(federation.train), put(federation.validation))
    if federation.attacker is not None:
        data = data._replace(attacker=put(federation.attacker))
    lowered = store.lower_segment(experiment, data, plan, 1, ONE)
    return lowered, data if store.on_devices else ()


def on_a_device(shapes: Any) -> int:
    """Bytes of arrays on one device, from their shapes with shardings."""
    num_bytes = 0
    for leaf in jax.tree.leaves(shapes):
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None:
            local_shape = sharding.shard_shape(leaf.shape)
            num_bytes += math.prod(local_shape) * leaf.dtype.itemsize
    return num_bytes


def lengths(experiment: Experiment, plan: ExecutionPlan) -> Callable[[str], float | None]:
    """How often a loop whose length depends on clients' data runs, by the scope that names it; None: not known."""
    federation = experiment.federation
    cohort = experiment.problem.cohort_size
    sizes = np.asarray(federation.train.size)

    @functools.cache
    def length_of(scope: str) -> float | None:
        if scope == "steps":
            counts = experiment.steps
        else:
            counts = block_counts(scope, (federation.train, federation.validation))
        if counts is None:
            return None
        return plan.repetitions(counts, cohort, sizes)

    return length_of
