"""Measures how time, memory and traffic grow with the number of clients: a table (JSON, CSV) and a figure.

    pfljax scaling --algorithms=local,fedavg,federico --num_clients=10,100,1000

Measures a grid of methods, numbers of clients K, clients per round S, plans and devices, on random pixels of a given
shape (so that no data set limits K) or on --data_file. For each cell, the table contains the compile time, seconds per
round, client updates per second, bytes of the compiled round on a device, peak memory, and bytes sent and received in
a round.

A cell that does not fit in memory is skipped before its data are generated, and the table says why. Each finished cell
is saved at once, so the same command continues where it stopped.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from pfljax import report
from pfljax.cli import build
from pfljax.cli.flags import DATA, RUNS, WHAT, define_devices, define_training
from pfljax.cli.launch import Command
from pfljax.cli.measure import Cell, described_data, row_of
from pfljax.cli.parsing import Group
from pfljax.cli.settings import PRESETS, FlagError, Settings
from pfljax.cli.study import Study, total_bytes
from pfljax.stores import memory
from pfljax.training.progress import told

MOST_CLIENTS = 10**12  # more than fit in memory: each such cell reports that
WORKLOADS = PRESETS / "scaling"
say = functools.partial(print, flush=True)


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    Group(WHAT, registry).several("algorithms", ["federico"], "methods, or all; also FILE.py:NAME")
    define_training(registry, rounds=5)
    add = Group(DATA, registry)
    add.several("num_clients", ["10", "100", "1000"], "numbers of clients K", int, at_most=MOST_CLIENTS)
    add.several("cohort", ["0"], "numbers of clients per round S; 0: all", int, at_least=0, at_most=MOST_CLIENTS)
    add.whole("train_examples", 20, "training examples per client", least=1)
    add.several("shape", ["28", "28", "1"], "shape of an example", int, distinct=False)
    add.whole("num_classes", 10, "number of classes C", least=2)
    add.text("data_file", None, "npz with x, y and optionally is_test, divided evenly; default: random pixels")
    define_devices(registry, lists=True)
    add = Group(RUNS, registry)
    add.whole("total_rounds", 0, "number of rounds to project the hours for; 0: no projection", least=0)
    known = sorted(path.stem for path in WORKLOADS.glob("*.flags"))
    add.choice("preset", None, known, "flags of a known workload")
    add.text("out", "runs/scaling", "folder for the table and the figure; finished cells in it are kept")


def run(settings: Settings) -> None:
    """Runs the command."""
    if settings.preset:
        settings = settings.with_preset(WORKLOADS / f"{settings.preset}.flags")
    settings.refuse("participation", "use --cohort to set the number of clients in a round")
    settings.refuse("eval_clients", "nothing is scored; rounds are only timed")
    settings.refuse("class_weights", "it affects neither time nor memory")
    for flag in ("shape", "num_classes"):
        if settings.data_file:
            settings.refuse(flag, "--data_file determines it")
    settings.check_read()
    cells, found = grid(settings), Study(settings)
    note = "" if settings.data_file else ": time and memory are realistic, accuracy is not"
    say(f"on {described_data(settings)}{note}")
    try:
        fill(found, cells)
    except KeyboardInterrupt:
        say(f"finished cells are in {found.out}; the same command continues from there")
        raise
    found.write()
    lines: dict[str, Sequence[dict]] = dict(found.lines())
    if not lines:
        raise FlagError(f"--num_clients: no cell can be measured; see the reasons in {found.out}")
    memory_label = "MiB on a device" if settings.client_store == "device" else "MiB resident"
    report.save(report.scaling_figure(lines, memory_label), found.out / "scaling.png")
    show(settings, [row for own in lines.values() for row in own])
    say(f"table: {found.out / 'scaling.csv'}, .json; figure: {found.out / 'scaling.png'}")


def most_devices(settings: Settings) -> int:
    """Returns the largest requested number of devices; 0 stands for all."""
    numbers = settings.numbers("devices", int)
    return 0 if 0 in numbers else max(numbers)


def grid(settings: Settings) -> list[Cell]:
    """Returns the cells that the flags ask for, except those with a cohort larger than K."""
    names = build.read_methods(settings)
    found = len(jax.local_devices())
    devices = [number or found for number in settings.numbers("devices", int)]
    chunks = [f"chunk-{number}" for number in settings.numbers("chunk", int)]
    plans: list[str] = []
    for plan in settings.plan:
        plans += chunks if plan == "chunk" else [plan]
    sizes = itertools.product(settings.numbers("num_clients", int), settings.numbers("cohort", int))
    cells = []
    for name, (num_clients, cohort), plan, number in itertools.product(names, list(sizes), plans, devices):
        cell = Cell(name, num_clients, cohort, plan, number)
        if cohort > num_clients:
            say(f"{title(cell)}, S={cohort}: skipped, the cohort is larger than K")
        else:
            cells.append(cell)
    if not cells:
        raise settings.error("cohort", "accepted: at most --num_clients")
    return list(dict.fromkeys(cells))


def title(cell: Cell) -> str:
    """Returns a cell's name for printing."""
    return f"{cell.algorithm}, K={cell.num_clients}"


def fill(found: Study, cells: Sequence[Cell]) -> None:
    """Measures the cells that are not finished."""
    for number, cell in enumerate(cells, 1):
        place = f"S={cell.clients_per_round}, {cell.plan}, {cell.devices} device(s)"
        what = f"{number}/{len(cells)} {title(cell)}, {place}"
        if found.finished(cell):
            say(f"{what}: already finished, read from {found.out / 'scaling.json'}")
            continue
        with told(what, say):
            found.rows[cell] = row = row_of(found.settings, cell)
        found.write()
        seconds, reason = row["seconds_per_round"], row["reason"]
        say(f"{what}: " + (f"skipped: {reason}" if reason else f"{seconds:.4g} s per round"))


def show(settings: Settings, rows: Sequence[dict]) -> None:
    """Prints the measured rows."""
    text = {"method": "algorithm", "plan": "plan"}
    counts = {"K": "num_clients", "S": "clients_per_round", "devices": "devices"}
    model = f"{settings.model} ({rows[0]['parameters']:,} parameters)"
    table = Table(title=f"{model} on {described_data(settings)}, {settings.train_examples} examples per client")
    for head in (
        *text,
        *counts,
        "compile s",
        "s per round",
        "(range)",
        "again",
        "updates/s",
        "memory",
        "RSS",
        "disk",
        "down, up",
    ):
        table.add_column(head, justify="left" if head in text else "right")
    size = lambda number: memory.readable(number) if number is not None else "?"
    for row in rows:
        table.add_row(
            *(row[name] for name in text.values()),
            *(f"{row[name]:,}" for name in counts.values()),
            *(f"{row['compile_seconds']:.1f}", f"{row['seconds_per_round']:.4g}"),
            f"{row['fastest_round']:.3g}-{row['slowest_round']:.3g}",
            "" if row["seconds_again"] is None else f"{row['seconds_again']:.4g}",
            f"{row['client_updates_per_second']:,.0f}",
            *(size(total_bytes(row)), size(row["peak_resident_bytes"]), size(row["disk_bytes"])),
            f"{size(row['bytes_down'])}, {size(row['bytes_up'])}",
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    total = settings.total_rounds
    for row in rows if total else ():
        updates = total * row["clients_per_round"]
        say(
            f"{row['algorithm']}, K={row['num_clients']}: {total:,} rounds, {updates:,} client updates, "
            f"would take {row['projected_hours']:.3g} hours: a projection from {row['rounds']} timed rounds"
        )


COMMAND = Command(__doc__ or "", define, run, keep_compiled=False, devices=most_devices)
