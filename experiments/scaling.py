"""How a method's time, memory and traffic grow with the number of clients: a table (JSON, CSV) and a figure.

    python -m experiments.scaling --algorithms=local,fedavg,federico --num_clients=10,100,1000

A grid over methods, clients K, clients a round S, plans and devices. On random pixels of a chosen shape, so that K is
not bound to a data set, or on --data_file. Of each cell: compile time, seconds a round, client updates a second, the
compiled round's bytes on a device (arguments: state and data; what of the outputs needs memory beside them;
temporaries), the most memory in use, and the bytes that travel in a round.

A cell that does not fit into memory is skipped before its data are made, and says why. A finished cell is in the files
at once: the same command goes on where it stopped.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import itertools
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from experiments import common, sweeps, timing
from pfljax import data, report
from pfljax.algorithms import METHODS
from pfljax.core import tree
from pfljax.core.types import RunError, Split, UsageError
from pfljax.data import Federation, sources
from pfljax.engine.plan import ExecutionPlan, make_plan
from pfljax.training import files, loop, memory

FLAGS = flags.FLAGS
PRESETS = sweeps.PRESETS / "scaling"
# Flags in which runs that share a folder may differ: what the grid spans, and what does not change a cell.
FREE = (
    *("algorithms", "num_clients", "cohort", "plan", "chunk", "devices", "out", "preset", "total_rounds"),
    *("participation", "eval_every", "checkpoint_every", "fine_tune_epochs"),
    *("coordinator", "process_id", "profile"),
)
say = functools.partial(print, flush=True)

common.define_training_flags(rounds=5)
common.define_device_flags(lists=True)
flags.DEFINE_list("algorithms", ["federico"], "methods, or all")
flags.DEFINE_list("num_clients", ["10", "100", "1000"], "numbers of clients K")
flags.DEFINE_list("cohort", ["0"], "numbers of clients a round S; 0: all")
flags.DEFINE_integer("train_examples", 20, "training examples a client", lower_bound=1)
flags.DEFINE_list("shape", ["28", "28", "1"], "of an example")
flags.DEFINE_integer("num_classes", 10, "C", lower_bound=2)
flags.DEFINE_string("data_file", None, "npz with x, y and, optionally, is_test, dealt evenly; default: random pixels")
flags.DEFINE_integer("total_rounds", 0, "rounds for which the hours are projected; 0: none", lower_bound=0)
flags.DEFINE_enum("preset", None, sorted(path.stem for path in PRESETS.glob("*.flags")), "settings of a known workload")
flags.DEFINE_string("out", "runs/scaling", "folder of the table and the figure; finished cells in it are kept")


class Cell(NamedTuple):
    """A place in the grid; the columns of a row by which it is found again."""

    algorithm: str
    num_clients: int
    cohort: int  # 0: all
    plan: str
    devices: int

    @property
    def clients_per_round(self) -> int:
        return self.cohort or self.num_clients

    def make_plan(self) -> ExecutionPlan:
        """How its clients are mapped."""
        kind, _, chunk = self.plan.partition("-")
        return make_plan(kind, int(chunk or 0), self.devices, FLAGS.exchange)


# What is known of a cell that was measured; a row has these columns after the cell's own.
MEASURES = (
    *("parameters", "clients_per_round", "chunk", "rounds", "compile_seconds", "seconds_per_round"),
    *("client_updates_per_second", "argument_bytes", "output_bytes", "temporary_bytes", "peak_device_bytes"),
    *("peak_resident_bytes", "bytes_down", "bytes_up", "projected_hours"),
)


def most_devices() -> int:
    """Of the numbers of devices the largest, 0 standing for all."""
    numbers = sweeps.numbers("devices", int, least=0)
    return 0 if 0 in numbers else max(numbers)


def grid() -> list[Cell]:
    """The cells that the flags ask for, without those whose cohort is larger than K."""
    names = sweeps.method_names()
    found = len(jax.local_devices())
    devices = [number or found for number in sweeps.numbers("devices", int, least=0)]
    chunks = [f"chunk-{number}" for number in common.whole_numbers("chunk")]
    plans: list[str] = []
    for plan in FLAGS.plan:
        if plan not in ("auto", "vmap", "map", "chunk"):
            raise UsageError(f"--plan={plan}: accepted: auto, vmap, map, chunk, separated by commas")
        plans += chunks if plan == "chunk" else [plan]
    sizes = itertools.product(common.whole_numbers("num_clients"), sweeps.numbers("cohort", int, least=0))
    cells = []
    for name, (num_clients, cohort), plan, number in itertools.product(names, list(sizes), plans, devices):
        cell = Cell(name, num_clients, cohort, plan, number)
        if cohort > num_clients:
            say(f"{title(cell)}, S={cohort}: left out, the cohort is larger than K")
        else:
            cells.append(cell)
    if not cells:
        raise UsageError(f"--cohort={','.join(FLAGS.cohort)}: accepted: at most --num_clients")
    return list(dict.fromkeys(cells))


@functools.lru_cache(maxsize=1)
def load(path: str) -> sources.Source:
    """The file's examples."""
    return sources.npz(path)


def described_data() -> str:
    """What is trained on."""
    if FLAGS.data_file:
        return f"{Path(FLAGS.data_file).name}, examples of {'x'.join(map(str, load(FLAGS.data_file).x.shape[1:]))}"
    return f"random pixels {'x'.join(FLAGS.shape)}"


def build_data(cell: Cell, num_clients: int) -> Federation:
    """`num_clients` of the cell's clients, with training examples and, where the method needs them, others to validate.

    Raises:
        RunError: if the file has too few examples.
    """
    train = FLAGS.train_examples
    validates = METHODS[cell.algorithm].validates
    size = train + (max(1, round(common.VALIDATION_FRACTION * train)) if validates else 0)
    if FLAGS.data_file is None:
        federation = data.random_pixels(num_clients, size, common.whole_numbers("shape"), FLAGS.num_classes, 0)
        x, y = federation.train.x, federation.train.y
        task, num_classes = federation.task, federation.num_classes
    else:
        source = load(FLAGS.data_file)
        rows = np.arange(len(source.y)) if source.is_test is None else np.flatnonzero(~source.is_test)
        if len(rows) < cell.num_clients * size:
            raise RunError(f"the file has {len(rows)} training examples, and {cell.num_clients} x {size} are asked for")
        rows = np.random.default_rng(0).permutation(rows)[: num_clients * size].reshape(num_clients, size)
        x, y, task, num_classes = source.x[rows], source.y[rows], source.task, source.num_classes
    part = lambda start, stop: Split(x[:, start:stop], y[:, start:stop], np.full(num_clients, stop - start, np.int32))
    distribution = np.zeros(num_clients, np.int32)
    parts = part(0, train), part(train, size), part(0, 0)
    return Federation(*parts, distribution, task, num_classes, described_data())


def shapes_of(cell: Cell, plan: ExecutionPlan) -> Federation:
    """The cell's clients as shapes on the devices, from one client's data."""
    one = build_data(cell, 1)

    def shape(leaf):
        leaf = jax.ShapeDtypeStruct((cell.num_clients, *leaf.shape[1:]), leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=plan.sharding(leaf, by_rows=True))

    splits = {name: jax.tree.map(shape, getattr(one, name)) for name in ("train", "validation", "test")}
    return dataclasses.replace(one, **splits, distribution=np.zeros(0, np.int32))


def on_a_device(stacked) -> int:
    """Bytes of shapes with shardings on one device."""
    local = lambda leaf: jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    return tree.num_bytes(jax.tree.map(local, stacked))


def check_fit(need: int, limit: int, what: str) -> None:
    """Raises RunError if `what` needs more bytes than may be planned with."""
    if need > memory.SHARE * limit:
        has = f"{memory.readable(memory.SHARE * limit)} (of {memory.readable(limit)})"
        raise RunError(f"out of memory: {what}: {memory.readable(need)} needed, {has} there")


def check_state(setup: loop.Setup, shapes: Federation) -> int:
    """Sees to it that state and data fit, from their shapes alone; the bytes of the host's copy beside a CPU's device.

    Raises:
        RunError: if they do not.
    """
    algorithm = setup.make(setup.plan)
    state = jax.eval_shape(algorithm.init, jax.random.key(0), shapes.client_data)
    copy = 5 * tree.num_bytes(shapes.client_data) // 4  # with the test examples that random_pixels makes too
    if setup.client_store == "host":
        largest = max(
            tree.num_bytes(leaf) for leaf in jax.tree.leaves(state)
        )  # while it is copied from where it is made
        check_fit(copy + tree.num_bytes(state) + largest, memory.host_free(), "clients' state and data on the host")
        return 0
    shardings = loop.state_shardings(algorithm, setup.plan, state)
    state = jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), state, shardings)
    check_fit(copy, memory.host_free(), "data on the host")
    copy = copy // len(jax.local_devices()) if jax.default_backend() == "cpu" else 0
    check_fit(on_a_device((state, shapes.client_data)) + copy, memory.device_limit(), "state and data on a device")
    return copy


def measure(cell: Cell) -> dict:
    """A cell's measures: compiles, times `--rounds` rounds, reads the memory analysis and the records.

    Raises:
        RunError: if it does not fit into memory.
    """
    jax.clear_caches()  # every cell compiles all that it needs
    plan = cell.make_plan()
    shapes = shapes_of(cell, plan)
    model = common.build_model(shapes)
    setup = timing.setup(
        cell.algorithm,
        common.method_config(cell.algorithm),
        shapes,
        model,
        common.build_solver(model),
        plan,
        cell.clients_per_round,
        rounds_per_dispatch=1,
        common_init=FLAGS.common_init,
        keep_optimizer=FLAGS.keep_optimizer,
        n_min=FLAGS.train_examples,
        client_store=FLAGS.client_store,
    )
    copy = check_state(setup, shapes)
    resident, device = PeakResident(), memory.peak_bytes()
    compiled = loop.compile_to_fit(setup, shapes.client_data)
    clients = build_data(cell, cell.num_clients).client_data
    if setup.client_store == "device":
        need = max(compiled.making.total, compiled.memory.total) + copy
        check_fit(need, memory.device_limit(), "making the state, or a round, on a device")
        clients = loop.place(compiled.plan, clients, cell.num_clients)
    trace = Path(FLAGS.profile) / "-".join(str(part) for part in cell) if FLAGS.profile else None
    dispatch = timing.start(compiled, clients, rounds_per_dispatch=1, trace=trace)
    dispatch()  # to warm up
    seconds, records = zip(*[dispatch() for _ in range(FLAGS.rounds)], strict=True)
    per_round = float(np.median(seconds))
    peak = memory.peak_bytes()
    values = (
        *(loop.parameters(model), cell.clients_per_round, compiled.plan.chunk, FLAGS.rounds),
        *(compiled.compile_seconds, per_round, cell.clients_per_round / per_round),
        *(compiled.memory.arguments, compiled.memory.outputs, compiled.memory.temporaries),
        # A device tells the most of the whole process: it is this cell's if it has risen.
        *(peak if peak != device else None, resident.read()),
        *(float(np.mean([record.down for record in records])), float(np.mean([record.up for record in records]))),
        None,
    )
    return dict(zip(MEASURES, values, strict=True))


class PeakResident:
    """The most memory that this process, with what it kept of cells before, has resident from now on."""

    def __init__(self):
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
            self.before = 0
        except OSError:
            self.before = self._peak()

    def read(self) -> int | None:
        """Bytes; None if they are fewer than before."""
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


def row_of(cell: Cell) -> dict:
    """The cell's row, measured or skipped with the reason."""
    row = {"status": "skipped", "reason": None, **cell._asdict(), **dict.fromkeys(MEASURES)}
    try:
        return row | {"status": "measured"} | measure(cell)
    except (RunError, MemoryError) as error:
        return row | {"reason": str(error)}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return row | {"reason": str(error).splitlines()[0]}


class Study:
    """The rows of a folder, of which the finished ones are kept over runs."""

    def __init__(self, out: Path):
        """Takes up what the folder holds.

        Raises:
            UsageError: if that is something else, or was measured with other settings.
        """
        self.out, self.config, self.rows = out, common.describe_run(), {}
        # Flags of the module that is run are known by its file.
        self.config["flags"] |= {flag.name: flag.value for flag in FLAGS.flags_by_module_dict().get(sys.argv[0], [])}
        path = out / "scaling.json"
        if not path.exists():
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise UsageError(f"--out={out}: holds something that is not a scaling study; name a new folder")
            return
        before = files.read_json(path)
        if "cells" not in before:
            raise UsageError(f"--out={out}: holds a scaling study of an earlier version; name a new folder")
        old, new = before["settings"], files.plain(self.settings())
        changed = [f"{k} was {old[k]!r} and is {v!r}" for k, v in new.items() if k in old and old[k] != v]
        if changed:
            raise UsageError(f"--out={out}: was measured with other settings: {'; '.join(changed)}; name a new folder")
        self.rows = {Cell(*(row[name] for name in Cell._fields)): row for row in before["cells"]}

    def settings(self) -> dict:
        """What cells of one study have in common."""
        same = {f"--{name}": value for name, value in self.config["flags"].items() if name not in FREE}
        return same | {"jax": jax.__version__, "device": jax.local_devices()[0].device_kind}

    def finished(self, cell: Cell) -> bool:
        """Whether the cell need not be measured."""
        return cell in self.rows and self.rows[cell]["status"] == "measured"

    def lines(self) -> Iterator[tuple[str, list[dict]]]:
        """The measured rows by what but K they are of, named by the method and what differs beside it."""
        measured = [row for row in self.rows.values() if row["status"] == "measured"]
        differ = [name for name in ("cohort", "plan", "devices") if len({row[name] for row in measured}) > 1]
        words = {"cohort": lambda n: f"S={n or 'K'}", "plan": str, "devices": lambda n: f"{n} device(s)"}
        named = lambda row: ", ".join([row["algorithm"], *(words[name](row[name]) for name in differ)])
        for name in dict.fromkeys(map(named, measured)):
            own = [row for row in measured if named(row) == name]
            yield name, [row | {"memory_bytes": total_bytes(row)} for row in own]

    def write(self) -> None:
        """Writes scaling.json and scaling.csv."""
        for row in self.rows.values():
            if row["status"] == "measured":
                hours = row["seconds_per_round"] * FLAGS.total_rounds / 3600
                row["projected_hours"] = hours if FLAGS.total_rounds else None
        rows = list(self.rows.values())
        fitted = {
            name: {
                what: report.slope([row["num_clients"] for row in own], [row[key] for row in own])
                for what, key in (("time", "seconds_per_round"), ("memory", "memory_bytes"))
            }
            for name, own in self.lines()
        }
        content = {"config": self.config, "settings": self.settings(), "data": described_data()}
        files.write_json(self.out / "scaling.json", content | {"slopes": fitted, "cells": rows})
        text = io.StringIO()
        writer = csv.DictWriter(text, ["status", "reason", *Cell._fields, *MEASURES], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        files.write_text(self.out / "scaling.csv", text.getvalue())


def total_bytes(row: dict) -> int:
    """What a round needs on a device."""
    return row["argument_bytes"] + row["output_bytes"] + row["temporary_bytes"]


def title(cell: Cell) -> str:
    """A cell for people."""
    return f"{cell.algorithm}, K={cell.num_clients}"


def show(rows: Sequence[dict]) -> None:
    """Prints the measured rows."""
    text = {"method": "algorithm", "plan": "plan"}
    counts = {"K": "num_clients", "S": "clients_per_round", "devices": "devices"}
    model = f"{FLAGS.model} ({rows[0]['parameters']:,} parameters)"
    table = Table(title=f"{model} on {described_data()}, {FLAGS.train_examples} examples a client")
    for head in (*text, *counts, "compile s", "s a round", "updates/s", "memory", "peak RSS", "down, up"):
        table.add_column(head, justify="left" if head in text else "right")
    size = lambda number: memory.readable(number) if number is not None else "?"
    for row in rows:
        table.add_row(
            *(row[name] for name in text.values()),
            *(f"{row[name]:,}" for name in counts.values()),
            *(f"{row['compile_seconds']:.1f}", f"{row['seconds_per_round']:.4g}"),
            f"{row['client_updates_per_second']:,.0f}",
            *(size(total_bytes(row)), size(row["peak_resident_bytes"])),
            f"{size(row['bytes_down'])}, {size(row['bytes_up'])}",
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for row in rows if FLAGS.total_rounds else ():
        updates = FLAGS.total_rounds * row["clients_per_round"]
        say(
            f"{row['algorithm']}, K={row['num_clients']}: {FLAGS.total_rounds:,} rounds, {updates:,} client updates, "
            f"would take {row['projected_hours']:.3g} hours: a projection from {row['rounds']} timed rounds"
        )


def fill(found: Study, cells: Sequence[Cell]) -> None:
    """Measures the cells that are not finished."""
    for number, cell in enumerate(cells, 1):
        what = f"{number}/{len(cells)} {title(cell)}, S={cell.clients_per_round}, {cell.plan}, {cell.devices} device(s)"
        if found.finished(cell):
            say(f"{what}: finished before, taken from {found.out / 'scaling.json'}")
            continue
        found.rows[cell] = row = row_of(cell)
        found.write()
        measured = row["status"] == "measured"
        say(f"{what}: " + (f"{row['seconds_per_round']:.4g} s a round" if measured else f"skipped: {row['reason']}"))


def study() -> None:
    """The command, under the settings of the preset."""
    sweeps.refuse("participation", "--cohort says how many clients are in a round")
    for flag in ("shape", "num_classes"):
        if FLAGS.data_file:
            sweeps.refuse(flag, "--data_file says it")
    cells, found = grid(), Study(Path(FLAGS.out))
    say(f"on {described_data()}" + ("" if FLAGS.data_file else ", which tell of time and memory, not of accuracy"))
    try:
        fill(found, cells)
    except KeyboardInterrupt:
        say(f"what is finished is in {found.out}; the same command goes on from there")
        raise
    found.write()
    lines = dict(found.lines())
    if not lines:
        raise UsageError(f"--num_clients: none of the cells can be measured; the reasons are in {found.out}")
    report.save(report.scaling_figure(lines), found.out / "scaling.png")
    show([row for own in lines.values() for row in own])
    say(f"table: {found.out / 'scaling.csv'}, .json; figure: {found.out / 'scaling.png'}")


def run() -> None:
    """The command."""
    with sweeps.settings(**(sweeps.preset(PRESETS / f"{FLAGS.preset}.flags") if FLAGS.preset else {})):
        study()


if __name__ == "__main__":
    common.main(run, keep_compiled=False, devices=most_devices)
