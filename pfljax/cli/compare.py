"""Compares methods on the same splits, seeds and cohorts: a table (markdown, CSV, JSON) and a figure.

    pfljax compare --algorithms=local,fedavg,fedavg_plus,federico --seeds=0,1,2

Each pair of method and seed is a run in OUT/METHOD/seed-N. Finished runs are not repeated. Several processes may share
OUT: each trains runs that no other is training, and all write the same table. With --splits=0,1,2, every seed is run on
every split of the data. With --reference=local, the table also has each method's paired difference to local.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from absl import flags

from pfljax import report
from pfljax.api.comparison import EPSILONS, check_reference, compare, table_of, trained
from pfljax.api.study import Cell
from pfljax.cli import build, sweep, workers
from pfljax.cli.flags import RUNS, define_data, define_devices, define_evaluation, define_sweep, define_training
from pfljax.cli.launch import Command
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings
from pfljax.contract.errors import RunError
from pfljax.folder import planned


def define(registry: flags.FlagValues) -> None:
    define_sweep(registry, ["local", "fedavg", "fedavg_plus", "federico"], ["0", "1", "2"], "runs/compare")
    Group(RUNS, registry).declare(compare, "reference", "target")
    workers.define(registry)
    define_training(registry)
    define_data(registry)
    define_devices(registry)
    define_evaluation(registry)


def run(settings: Settings) -> None:
    names, trials = build.read_methods(settings), sweep.trials(settings)
    settings = settings.with_defaults(names)
    names = sweep.able(settings, names, trials[0])
    check_reference(settings.reference, names)
    out = Path(settings.out)
    sweep.check(settings, [(settings, name, out / name) for name in names], trials)
    (place, num), several, failed = workers.share(settings), workers.several(settings), {}
    build.print_defaults(settings)
    planned.write(out, [out / name / trial.folder for name in names for trial in trials], settings.rounds)
    if several:
        workers.run(settings)

    def train(name: str, wait: bool) -> list[Cell | None]:
        """Returns a method's cells; with --cells=i/n, trains only this process's share."""
        first = names.index(name) * len(trials)
        own = [trial for number, trial in enumerate(trials, first) if number % num == place]
        try:
            return sweep.cells_now(settings, name, trials, out / name, own=own, wait=wait)
        except RunError as error:  # keep the other methods' results
            print(f"  {name}: {error}")
            failed[name] = error
            return []

    cells = {name: each for name, each in trained(names, train, print).items() if each}
    if not cells:
        raise next(iter(failed.values()))
    missing = sum(each.count(None) for each in cells.values())
    if missing:  # with --cells
        print(f"unfinished runs of other processes: {missing}; the process that finishes last writes the table")
        return
    table = table_of(cells, settings.reference, trials, settings.target)
    rows = [row | sweep.chosen(settings, row["method"], out / row["method"]) for row in table.rows]
    table = dataclasses.replace(table, rows=rows)
    report.save(table.plot(), out / "table.png")
    sweep.write_table(table.title, *table.columns(), rows, out, "table.png")
    for row in rows:
        for name, omitted in EPSILONS.items():
            if row[omitted]:
                print(f"* {row['method']}: {name.replace('_', ' ')} does not include {row[omitted]}")
    if failed:
        raise RunError(f"not in the table: {'; '.join(f'{name}: {error}' for name, error in failed.items())}")


COMMAND = Command(__doc__ or "", define, run)
