"""Compares methods on the same splits, seeds and cohorts: a table (markdown, CSV, JSON) and a figure.

    pfljax compare --algorithms=local,fedavg,fedavg_plus,federico --seeds=0,1,2

Each pair of method and seed is a run in OUT/METHOD/seed-N. Finished runs are not repeated. Several processes may share
OUT: each trains runs that no other is training, and all write the same table. With --splits=0,1,2, every seed is run on
every split of the data.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from pfljax import report
from pfljax.api.comparison import Table, method_row, over, titled_by
from pfljax.api.study import Cell
from pfljax.cli import build, sweep, workers
from pfljax.cli.build import Trial
from pfljax.cli.flags import define_data, define_devices, define_evaluation, define_sweep, define_training
from pfljax.cli.launch import Command
from pfljax.cli.settings import Settings
from pfljax.contract.errors import RunError


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    define_sweep(registry, ["local", "fedavg", "fedavg_plus", "federico"], ["0", "1", "2"], "runs/compare")
    workers.define(registry)
    define_training(registry)
    define_data(registry)
    define_devices(registry)
    define_evaluation(registry)


def run(settings: Settings) -> None:
    """Runs the command."""
    names, trials = build.read_methods(settings), sweep.trials(settings)
    settings = settings.with_defaults(names)
    names = sweep.able(settings, names, trials[0])
    out = Path(settings.out)
    sweep.check(settings, [(settings, name, out / name) for name in names], trials)
    build.print_defaults(settings)
    if settings.workers > 1 or settings.cluster != "none":
        workers.run(settings)
    cells, failed = train(settings, names, trials, out)
    missing = sum(each.count(None) for each in cells.values())
    if missing:  # with --cells
        print(f"unfinished runs of other processes: {missing}; the process that finishes last writes the table")
        return
    titled = {name: method_row(name, [cell for cell in cells[name] if cell]) for name in cells}
    rows = [row | {"tuned": str(sweep.chosen(settings, name, out / name))} for name, row in titled.items()]
    summary = next(cell for each in cells.values() for cell in each if cell).summary
    title = titled_by(summary["dataset"], summary.get("scored_clients"), summary["num_clients"], settings.rounds)
    table = Table(f"{title}, {over(sweep.named(trials), len(trials))}", rows, summary["task"])
    report.save(table.plot(), out / "table.png")
    sweep.write_table(table.title, *table.columns(), rows, out, "table.png")
    for row in rows:
        if row["unaccounted"]:
            print(f"* {row['algorithm']}: epsilon does not include {row['unaccounted']}")
    if failed:
        raise RunError(f"not in the table: {'; '.join(f'{name}: {error}' for name, error in failed.items())}")


def train(
    settings: Settings, names: Sequence[str], trials: Sequence[Trial], out: Path
) -> tuple[dict[str, list[Cell | None]], dict[str, RunError]]:
    """Returns the cells of all methods but those that fail, and these methods' errors.

    Trains first what no other process is training, then waits for the rest. With --cells=i/n, trains only this
    process's share; cells of others that are not finished are None.
    """
    place, num = workers.share(settings)
    cells: dict[str, list[Cell | None]] = {}
    failed: dict[str, RunError] = {}
    for wait, (number, name) in itertools.product((False, True), enumerate(names)):
        own = [trial for n, trial in enumerate(trials, number * len(trials)) if n % num == place]
        if name in failed or None not in cells.get(name, [None]):
            continue
        try:
            cells[name] = sweep.cells_now(settings, name, trials, out / name, own=own, wait=wait)
        except RunError as error:  # keep the other methods' results
            print(f"  {name}: {error}")
            failed[name] = error
        if name in failed or None not in cells[name]:
            done = len(failed) + sum(None not in each for each in cells.values())
            print(f"{done} of {len(names)} methods done: {name}")
    if len(failed) == len(names):
        raise next(iter(failed.values()))
    return {name: cells[name] for name in names if name not in failed}, failed


COMMAND = Command(__doc__ or "", define, run)
