"""Measures how time, memory and traffic grow with the number of clients: a table (JSON, CSV) and a figure.

    pfljax scaling --methods=local,fedavg,federico --num_clients=10,100,1000

Measures a grid of methods, numbers of clients K, clients per round S, plans and devices, on random pixels of a given
shape (so that no data set limits K) or on --data_file. For each cell, the table contains the compile time, seconds per
round, client updates per second, bytes of the compiled round on a device, peak memory, and bytes sent and received in
a round.

A cell that does not fit in memory is skipped before its data are generated, and the table says why. Each finished cell
has a folder in OUT/cells, so the same command continues where it stopped, and several processes may share OUT.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from pfljax import data, report
from pfljax.api import STORES, announced, environment
from pfljax.api.measuring import MEASURES, Experiment, check_fit, like_one, measure
from pfljax.api.study import taken
from pfljax.cli import build, tables
from pfljax.cli.flag_help import HELP
from pfljax.cli.flags import (
    DATA,
    RUNS,
    WHAT,
    Sweep,
    define_devices,
    define_training,
    define_verbose,
)
from pfljax.cli.launch import Command
from pfljax.cli.names import current
from pfljax.cli.parsing import Group
from pfljax.cli.settings import PRESETS, VALIDATION_FRACTION, FlagError, Settings
from pfljax.contract import processes
from pfljax.contract.errors import ArgumentError, RunError
from pfljax.contract.host import readable
from pfljax.contract.pooled import Pooled
from pfljax.contract.types import Split
from pfljax.data import Federation, preparation, sources
from pfljax.folder import files, fingerprint, former
from pfljax.folder.folders import setting_text
from pfljax.settings import method

MOST_CLIENTS = 10**12  # more than fit in memory: each such cell reports that
DISTINCT = 10_000  # random images that clients share if data are not on the devices
WORKLOADS = PRESETS / "scaling"
CELL = "cell.json"
# Flags that may differ between studies that share a folder: those that span the grid, and those that change no cell.
FREE = (
    "methods",
    "num_clients",
    "cohort",
    "plan",
    "chunk",
    "devices",
    "out",
    "preset",
    "total_rounds",
    "rerun",
    "verbose",
    "participation",
    "fine_tune_epochs",
    "planned_rounds",
    "coordinator",
    "process_id",
    "profile",
)
say = functools.partial(print, flush=True)


class GridCell(NamedTuple):
    """A point of the grid. Its fields are the columns that identify a row."""

    method: str
    num_clients: int
    cohort: int  # 0: all
    plan: str
    devices: int

    def __str__(self) -> str:
        size = f"K={self.num_clients}, S={self.clients_per_round}"
        return f"{self.method}, {size}, {self.plan}, {self.devices} device(s)"

    @property
    def clients_per_round(self) -> int:
        """S."""
        return self.cohort or self.num_clients

    def folder(self, out: Path) -> Path:
        return out / "cells" / "-".join(map(str, self))


def define(registry: flags.FlagValues) -> None:
    text = "Methods to measure, or all; FILE.py:NAME for your own."
    Group(WHAT, registry).several("methods", ["federico_friends"], text)
    define_training(registry, rounds=5, scored=False)
    add = Group(DATA, registry)
    clients = ["10", "100", "1000"]
    add.several("num_clients", clients, "Numbers of clients.", int, at_most=MOST_CLIENTS)
    add.several("cohort", ["0"], HELP["cohort"], int, at_least=0, at_most=MOST_CLIENTS)
    add.add("train_examples", int, 20, "Number of training examples per client.", at_least=1)
    add.several("shape", ["28", "28", "1"], HELP["shape"], int, distinct=False)
    add.add("num_classes", int, 10, HELP["num_classes"], at_least=2)
    text = "npz file with x, y and optionally is_test, divided evenly. Default: random pixels."
    add.add("data_file", Path, None, text)
    define_devices(registry, lists=True)
    define_verbose(registry)
    add = Group(RUNS, registry)
    add.add("total_rounds", int, 0, HELP["total_rounds"], at_least=0)
    presets = sorted(path.stem for path in WORKLOADS.glob("*.flags"))
    add.add("preset", str, None, HELP["preset"], choices=presets)
    add.declare(Sweep, "rerun")
    text = "Folder for the table and the figure. Finished cells in it are not repeated."
    add.add("out", Path, "runs/scaling", text)


def run(settings: Settings) -> None:
    if settings.preset:
        settings = settings.with_preset(WORKLOADS / f"{settings.preset}.flags")
    settings.refuse("participation", "use --cohort to set the number of clients in a round")
    settings.refuse("eval_clients", "nothing is scored; rounds are only timed")
    settings.refuse("never_trained", "nothing is scored; rounds are only timed")
    settings.refuse("class_weights", "it affects neither time nor memory")
    for flag in ("shape", "num_classes"):
        if settings.data_file:
            settings.refuse(flag, "--data_file determines it")
    settings.check_read()
    cells = grid(settings)
    out = Path(settings.out)
    if STORES[settings.client_store].on_disk and jax.process_count() > 1:
        text = "its files are in a temporary folder; accepted with several processes: host"
        raise settings.error("client_store", text)
    is_study = (out / "cells").is_dir()
    is_other = out.exists() and not is_study and (not out.is_dir() or any(out.iterdir()))
    if is_other:
        text = "contains something other than a scaling study; choose a new folder"
        raise settings.error("out", text)
    note = "" if settings.data_file else ": time and memory are realistic, accuracy is not"
    say(f"on {described_data(settings)}{note}")
    try:
        rows = fill(settings, cells, out)
    except KeyboardInterrupt:
        say(f"finished cells are in {out}; the same command continues from there")
        raise
    measured = [row for row in rows if row["status"] == "measured"]
    # only the first process needs to see the files
    if not processes.from_first(np.int32(len(measured))):
        raise FlagError(f"--num_clients: no cell can be measured; see the reasons in {out}")
    if not processes.is_first():
        return
    memory_label = "MiB on a device" if STORES[settings.client_store].on_devices else "MiB resident"
    report.save(report.scaling_figure(lines(settings, measured), memory_label), out / "scaling.png")
    show(settings, measured)
    say(f"table: {out / 'scaling.csv'}, .json; figure: {out / 'scaling.png'}")


def most_devices(settings: Settings) -> int:
    """Returns the largest requested number of devices; 0 stands for all."""
    numbers = settings.numbers("devices", int)
    return 0 if 0 in numbers else max(numbers)


def grid(settings: Settings) -> list[GridCell]:
    """Returns the cells that the flags ask for, except those with a cohort larger than K."""
    names = build.read_methods(settings)
    num_devices = len(jax.local_devices())
    devices = [number or num_devices for number in settings.numbers("devices", int)]
    chunks = [f"chunk-{number}" for number in settings.numbers("chunk", int)]
    plans = []
    for plan in settings.plan:
        plans += chunks if plan == "chunk" else [plan]
    sizes = itertools.product(settings.numbers("num_clients", int), settings.numbers("cohort", int))
    cells = []
    for name, (num_clients, cohort), plan, number in itertools.product(
        names, list(sizes), plans, devices
    ):
        cell = GridCell(name, num_clients, cohort, plan, number)
        if cohort > num_clients:
            say(f"{name}, K={num_clients}, S={cohort}: skipped, the cohort is larger than K")
        else:
            cells.append(cell)
    if not cells:
        raise settings.error("cohort", "accepted: at most --num_clients")
    return list(dict.fromkeys(cells))


def described_data(settings: Settings) -> str:
    if settings.data_file:
        shape = "x".join(map(str, load(settings.data_file).x.shape[1:]))
        return f"{Path(settings.data_file).name}, examples of {shape}"
    return f"random pixels {'x'.join(settings.shape)}"


@functools.lru_cache(maxsize=1)
def load(path: str) -> sources.Source:
    return sources.npz(path)


def build_clients(settings: Settings, cell: GridCell, num_clients: int) -> Federation:
    """Returns `num_clients` of the cell's clients, with training and, if the method needs them, validation examples.

    Raises `RunError` if the file has too few examples.
    """
    train = settings.train_examples
    validates = method.get(cell.method).info.validates
    size = train + (max(1, round(VALIDATION_FRACTION * train)) if validates else 0)
    if settings.data_file is None:
        shape = tuple(settings.numbers("shape", int))
        distinct = 0 if STORES[settings.client_store].on_devices else DISTINCT
        need = 4 * min(num_clients, distinct or num_clients) * size * math.prod(shape)
        check_fit(need, "data on the host")
        pixels = data.random_pixels(
            num_clients, size, shape, settings.num_classes, 0, distinct=distinct
        )
        x = pixels.train.x
        y = pixels.train.y
        task = pixels.task
        num_classes = pixels.num_classes
    else:
        source = load(settings.data_file)
        rows = np.arange(len(source.y))
        if source.is_test is not None:
            rows = np.flatnonzero(~source.is_test)
        if len(rows) < cell.num_clients * size:
            need = f"{cell.num_clients} x {size} are needed"
            raise RunError(f"the file has {len(rows)} training examples, but {need}")
        shuffled = np.random.default_rng(0).permutation(rows)
        rows = shuffled[: num_clients * size].reshape(num_clients, size)
        prepare = preparation.fit(source, np.sort(rows[:, :train], axis=None))
        x = prepare(source.x, rows.ravel())
        x = x if prepare.scaling is None else prepare.scaling(x)
        x = x.reshape(*rows.shape, *x.shape[1:])
        y = source.y[rows]
        task = source.task
        num_classes = source.num_classes

    def split(start: int, stop: int) -> Split:
        """The examples of all clients from one position to another."""
        if isinstance(x, Pooled):
            examples: Any = dataclasses.replace(x, index=x.index[:, start:stop])
        else:
            examples = x[:, start:stop]
        return Split(examples, y[:, start:stop], np.full(num_clients, stop - start, np.int32))

    return Federation(
        split(0, train),
        split(train, size),
        split(0, 0),
        np.zeros(num_clients, np.int32),
        task,
        num_classes,
        described_data(settings),
    )


def build_experiment(settings: Settings, cell: GridCell) -> Experiment:
    """Builds the cell's run from one of its clients. Raises `RunError`; see `build_clients`."""
    kind, _, chunk = cell.plan.partition("-")
    plan = kind, int(chunk or 0), cell.devices, settings.exchange, settings.model_devices
    client = build_clients(settings, cell, 1)
    return like_one(
        build.build_method(settings, cell.method),
        client,
        build.build_model(settings, client),
        build.build_local(settings.for_method(cell.method)),
        plan,
        settings.client_store,
        cell.num_clients,
        cell.clients_per_round,
    )


def common(settings: Settings) -> dict:
    """Returns what the cells of a study have in common."""
    same = {f"--{name}": value for name, value in settings.values.items() if name not in FREE}
    return files.plain(
        same | {"jax": jax.__version__, "device": jax.local_devices()[0].device_kind}
    )


def read(folder: Path) -> dict:
    """Returns the content of a cell's file; empty if there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        content = former.read_scaling(folder / CELL)
        is_whole = {"status", *GridCell._fields, *MEASURES} <= content["row"].keys()
        if is_whole and all(isinstance(content[name], dict) for name in ("settings", "program")):
            return content | {"settings": current(content["settings"])}
    return {}


def differences(before: dict, now: dict) -> list[str]:
    """Says which settings of a cell differ from those of now."""
    texts = []
    for name, value in now.items():
        value_before = before.get(name, value)
        if value_before != value:
            texts.append(f"{name} was {setting_text(value_before)} and is {setting_text(value)}")
    return texts


def finished(settings: Settings, cells: Sequence[GridCell], out: Path) -> np.ndarray:
    """Returns whether each cell was already measured, with these settings and the same program.

    Raises `ArgumentError` if a cell in the folder has other settings, or one of `cells` another program; with
    --rerun=changed, they are not finished.
    """
    done = set[GridCell]()
    now = common(settings)
    cells_by_folder = {cell.folder(out): cell for cell in cells}

    def check() -> None:
        for folder in sorted(out.glob("cells/*")):
            content = read(folder)
            if not content:
                continue
            different = differences(content["settings"], now)
            text = f"with other settings: {'; '.join(different)}" if different else ""
            cell = cells_by_folder.get(folder)
            if different or content["row"]["status"] != "measured":
                cell = None
            if cell:
                program = build_experiment(settings, cell).program()
                changed = fingerprint.differences(content["program"], program)
                if changed:
                    text = f"by another program; what differs: {', '.join(changed)}"
            if text and settings.rerun == "never":
                why = f"{folder} was measured {text}; accepted: changed, to measure it again"
                raise ArgumentError("rerun", why)
            if cell and not text:
                done.add(cell)

    processes.first(check)
    return processes.from_first(np.array([cell in done for cell in cells], np.int32))


def fill(settings: Settings, cells: Sequence[GridCell], out: Path) -> list[dict]:
    """Measures the cells that are neither finished nor being measured by another process.

    Returns the study's rows, also those of earlier grids.
    """
    done = finished(settings, cells, out)
    for number, cell in enumerate(cells):
        what = f"{number + 1}/{len(cells)} {cell}"
        folder = cell.folder(out)
        with contextlib.ExitStack() as locks:
            if not done[number] and not taken(locks, folder):
                say(f"{what}: another process is measuring it")
                continue
            # another process may just have finished it
            if done[number] or finished(settings, [cell], out)[0]:
                say(f"{what}: already finished, read from {folder}")
                continue
            with announced(what):
                row, program = row_of(settings, cell)
            files.write_json(
                folder / CELL, {"row": row, "settings": common(settings), "program": program}
            )
        write(settings, cells, out)
        seconds = row["seconds_per_round"]
        reason = row["reason"]
        outcome = f"skipped: {reason}" if reason else f"{seconds:.4g} s per round"
        say(f"{what}: {outcome}")
    return write(settings, cells, out)


def row_of(settings: Settings, cell: GridCell) -> tuple[dict, dict]:
    """Returns the cell's row, with its measurements or the reason why it was skipped, and its program."""
    row = {"status": "skipped", "reason": None, **cell._asdict(), **dict.fromkeys(MEASURES)}
    row["clients_per_round"] = cell.clients_per_round
    trace = Path(settings.profile) / "-".join(map(str, cell)) if settings.profile else None
    try:
        experiment = build_experiment(settings, cell)

        def clients():
            return build_clients(settings, cell, cell.num_clients)

        measured = measure(experiment, lambda: clients().client_data, settings.rounds, trace)
        return row | {"status": "measured"} | measured, experiment.program()
    except (RunError, MemoryError) as error:
        reason = str(error)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
    return row | {"reason": reason}, {}


def write(settings: Settings, cells: Sequence[GridCell], out: Path) -> list[dict]:
    """Writes scaling.json and scaling.csv from the cells' files. Returns their rows: first `cells`, then others."""
    with contextlib.ExitStack() as locks:
        taken(locks, out, wait=True)
        now = common(settings)
        contents = [read(path) for path in sorted(out.glob("cells/*"))]
        rows = [content["row"] for content in contents if content and content["settings"] == now]
        order = {cell: number for number, cell in enumerate(cells)}

        def position(row: dict) -> int:
            cell = GridCell(*(row[name] for name in GridCell._fields))
            return order.get(cell, len(cells))

        rows.sort(key=position)
        for row in rows:
            hours = settings.total_rounds * (row["seconds_per_round"] or 0) / 3600
            row["projected_hours"] = hours or None
        slopes = {}
        for name, line in lines(settings, rows).items():
            clients = [row["num_clients"] for row in line]
            slopes[name] = {
                "time": report.slope(clients, [row["seconds_per_round"] for row in line]),
                "memory": report.slope(clients, [row["memory_bytes"] for row in line]),
            }
        flags = {"flags": dict(sorted(settings.values.items())), "command": build.command()}
        content = {
            "config": flags | environment(),
            "settings": now,
            "data": described_data(settings),
            "slopes": slopes,
            "cells": rows,
        }
        files.write_json(out / "scaling.json", content)
        columns = ["status", "reason", *GridCell._fields, *MEASURES, "projected_hours"]
        body = [[row.get(name) for name in columns] for row in rows]
        files.write_csv(out / "scaling.csv", [columns, *body])
    return rows


def lines(settings: Settings, rows: Sequence[dict]) -> dict[str, list[dict]]:
    """Groups the measured rows that differ only in K, by their method and what else differs, for the figure."""
    rows = [row for row in rows if row["status"] == "measured"]

    def differs(name: str) -> bool:
        return len({row[name] for row in rows}) > 1

    with_cohort = differs("cohort")
    with_plan = differs("plan")
    with_devices = differs("devices")
    groups: dict[str, list[dict]] = {}
    for row in rows:
        words = [row["method"]]
        if with_cohort:
            words.append(f"S={row['cohort'] or 'K'}")
        if with_plan:
            words.append(row["plan"])
        if with_devices:
            words.append(f"{row['devices']} device(s)")
        need = row["peak_resident_bytes"] or 0
        if STORES[settings.client_store].on_devices:
            need = total_bytes(row)
        groups.setdefault(", ".join(words), []).append(row | {"memory_bytes": need})
    return groups


def total_bytes(row: dict) -> int:
    """Returns the bytes that a round needs on a device."""
    return row["argument_bytes"] + row["output_bytes"] + row["temporary_bytes"]


def show(settings: Settings, rows: Sequence[dict]) -> None:
    model = f"{settings.model} ({rows[0]['parameters']:,} parameters)"
    title = f"{model} on {described_data(settings)}, {settings.train_examples} examples per client"
    heads = [
        "method",
        "plan",
        "K",
        "S",
        "devices",
        "compile s",
        "s per round",
        "(range)",
        "again",
        "updates/s",
        "memory",
        "RSS",
        "disk",
        "down, up",
    ]

    def size(number: float | None) -> str:
        return readable(number) if number is not None else "?"

    body = []
    for row in rows:
        again = row["seconds_again"]
        cells = [row["method"], row["plan"]]
        cells += [f"{row[name]:,}" for name in ("num_clients", "clients_per_round", "devices")]
        cells += [
            f"{row['compile_seconds']:.1f}",
            f"{row['seconds_per_round']:.4g}",
            f"{row['fastest_round']:.3g}-{row['slowest_round']:.3g}",
            "" if again is None else f"{again:.4g}",
            f"{row['client_updates_per_second']:,.0f}",
            size(total_bytes(row)),
            size(row["peak_resident_bytes"]),
            size(row["disk_bytes"]),
            f"{size(row['bytes_down'])}, {size(row['bytes_up'])}",
        ]
        body.append(cells)
    tables.show(title, heads, body, text=2)
    total = settings.total_rounds
    for row in rows if total else ():
        updates = total * row["clients_per_round"]
        counts = f"{total:,} rounds, {updates:,} client updates"
        hours = f"would take {row['projected_hours']:.3g} hours"
        source = f"a projection from {row['rounds']} timed rounds"
        say(f"{row['method']}, K={row['num_clients']}: {counts}, {hours}: {source}")


COMMAND = Command(__doc__ or "", define, run, keep_compiled=False, devices=most_devices)
