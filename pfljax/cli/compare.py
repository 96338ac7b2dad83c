"""Compares methods on the same splits, seeds and cohorts: a table (markdown, CSV, JSON) and a figure.

    pfljax compare --algorithms=local,fedavg,fedavg_plus,federico --seeds=0,1,2

Each cell, a method with a seed, is a run of its own in OUT/METHOD/seed-N; a finished cell is not run again. With
--splits=0,1,2 every split of the data is trained on with every seed.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from pfljax import report
from pfljax.api.cells import Cell
from pfljax.api.comparison import Table, method_row, over, titled_by
from pfljax.cli import build, sweep
from pfljax.cli.flags import define_data, define_devices, define_evaluation, define_sweep, define_training
from pfljax.cli.launch import Command
from pfljax.cli.settings import Settings
from pfljax.core.errors import RunError


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    define_sweep(registry, ["local", "fedavg", "fedavg_plus", "federico"], ["0", "1", "2"], "runs/compare")
    define_training(registry)
    define_data(registry)
    define_devices(registry)
    define_evaluation(registry)


def run(settings: Settings) -> None:
    """The command."""
    names, trials = build.read_methods(settings), sweep.trials(settings)
    settings = settings.with_defaults(names)
    names = sweep.able(settings, names, trials[0])
    out, rows, failed, summary = Path(settings.out), [], {}, {}
    sweep.check(settings, [(settings, name, out / name) for name in names], trials)
    build.print_defaults(settings)
    for number, name in enumerate(names, 1):
        try:
            summary = sweep.cells(settings, name, trials, out / name)[0]
        except RunError as error:  # the others' results are worth having
            print(f"  {name}: {error}")
            failed[name] = error
        else:
            row = method_row(name, [Cell.read(out / name / trial.folder) for trial in trials])
            rows.append(row | {"tuned": str(sweep.chosen(out / name))})
        print(f"{number} of {len(names)} methods done: {name}")
    if not rows:
        raise next(iter(failed.values()))
    scored = summary.get("scored_clients")
    title = titled_by(summary["dataset"], scored, summary["num_clients"], settings.rounds)
    title = f"{title}, {over(sweep.named(trials), len(trials))}"
    table = Table(title, rows, summary["task"])
    report.save(table.plot(), out / "comparison.png")
    sweep.write_table(table.title, *table.columns(), rows, out, "comparison.png")
    for row in rows:
        if row["unaccounted"]:
            print(f"* {row['algorithm']}: epsilon does not count {row['unaccounted']}")
    if failed:
        raise RunError(f"not in the table: {'; '.join(f'{name}: {error}' for name, error in failed.items())}")


COMMAND = Command(__doc__ or "", define, run)
