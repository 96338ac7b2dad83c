"""Runs several methods on several trials. Each pair is a cell with its own run; finished cells are not run again.

Commands that compare methods use this module: `cells` runs a method on all trials, `write_table` writes the results.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pfljax import api
from pfljax.api import Point, Schedule, comparison, tuning
from pfljax.api.study import Cell, Study, taken
from pfljax.cli import build
from pfljax.cli.build import Trial
from pfljax.cli.settings import Settings
from pfljax.contract import method
from pfljax.contract.errors import ArgumentError
from pfljax.report import terms

MOST_TUNING_SEEDS = 3


def trials(settings: Settings) -> list[Trial]:
    """Returns all pairs of --splits and --seeds. Without --splits, the seed also determines the split."""
    seeds = settings.numbers("seeds", int)
    if not settings.splits:
        return [Trial(seed) for seed in seeds]
    return [Trial(seed, split) for split in settings.numbers("splits", int) for seed in seeds]


def tuning_trials(settings: Settings) -> list[Trial]:
    """Returns the trials that rates and knobs are chosen on: other seeds, on the splits of the table's trials.

    So the test examples of the table choose nothing. Without --splits, each seed takes the split of one of --seeds.
    Raises `FlagError` if --tune_seeds has one of --seeds.
    """
    reported, count = settings.numbers("seeds", int), itertools.count(tuning.TUNING_SEED)
    free = itertools.islice((seed for seed in count if seed not in reported), min(len(reported), MOST_TUNING_SEEDS))
    seeds = settings.numbers("tune_seeds", int) or [*free]
    if {*seeds} & {*reported}:
        raise settings.error("tune_seeds", f"accepted: seeds other than --seeds={','.join(map(str, reported))}")
    if settings.splits:
        return [Trial(seed, split) for split in settings.numbers("splits", int) for seed in seeds]
    return [Trial(seed, split) for seed, split in zip(seeds, itertools.cycle(reported), strict=False)]


def make_run(settings: Settings, name: str, trial: Trial) -> api.Run:
    return build.build_run(settings, name, build.cached_clients(settings, trial.of_data), trial)


def check(
    settings: Settings, asked: Sequence[tuple[Settings, str, Path]], runs: Sequence[Trial], *, classes: bool = False
) -> None:
    """Checks that all cells of a table can be run, before running any.

    `asked` has settings, method and folder of each group of cells that differ only in their trial; with `classes`, the
    table contains accuracies. Raises `FlagError` for a flag that no cell uses, and `ArgumentError` for a mistake in a
    cell, or a folder that contains something else.
    """
    settings.check_read([each for each, _, _ in asked])
    for trial in runs:
        for each, name, out in asked:
            run = make_run(each, name, trial)
            if classes and run.clients.task == "regression":
                raise settings.error("dataset", "has no classes; accepted: classification data sets")
            if each.tune or each.tune_knobs:  # the runs' settings are not known yet
                tuning_trials(each)
            else:
                study_of(each).check(run, out / trial.folder)


def able(settings: Settings, names: Sequence[str], trial: Trial) -> list[str]:
    """Returns the methods that support the data. With --algorithms=all, the others are skipped and printed."""
    found = []
    for name in names:
        try:
            make_run(settings, name, trial)
        except ArgumentError as error:
            if settings.algorithms != ["all"] or error.argument != "method":
                raise
            print(f"left out: {name}: {error.text.split(';')[0]}")
        else:
            found.append(name)
    return found


def say(line: str) -> None:
    print(f"  {line}")


def study_of(settings: Settings) -> Study:
    """Returns how the cells of a command are trained."""
    schedule = Schedule(settings.eval_every, settings.checkpoint_every)
    return Study(settings.rounds, schedule, settings.replicate, settings.rerun, say, settings.profile)


def tuned_knobs(settings: Settings, name: str) -> dict[str, Sequence[Any]]:
    """Returns the knobs that --tune_knobs tunes, with their values: the paper's, except any on the command line."""
    knobs = tuning.papers_knobs(method.get(name), settings.tell_groups) if settings.tune_knobs else {}
    return {knob: values for knob, values in knobs.items() if not settings.present(f"{name}.{knob}")}


def searches(settings: Settings, name: str) -> bool:
    """Whether a method is tuned: a single rate is taken as it is."""
    return bool(tuned_knobs(settings, name)) or len(settings.tune) > 1


def tuned(settings: Settings, name: str, out: Path) -> Settings:
    """Returns the settings with the rate and knobs of best final validation accuracy (or loss) over `tuning_trials`.

    A quarter of the training examples is used for validation unless --validation_fraction is given. Raises `RunError`
    if a run diverges at every point, and `ArgumentError` if OUT has scores of something else.
    """
    rates = settings.numbers("tune", float)
    flag = lambda value: value if value == "learning_rate" else f"{name}.{value}"
    at = lambda settings, point: settings.pinned(**{flag(each): value for each, value in point.values.items()})
    if not searches(settings, name):
        return at(settings, Point(*rates))
    tried = settings.replace(validation_fraction=settings.validation_fraction or 0.25)
    make = lambda point, trial: make_run(at(tried, point), name, trial)
    knobs, how = tuned_knobs(settings, name), {"rerun": settings.rerun, "say": say, "widen": settings.tune_widen}
    trials = tuning_trials(settings)
    return at(settings, tuning.search_in_turn(rates, knobs, trials, make, settings.rounds, folder=out, **how).best)


def chosen(settings: Settings, name: str, out: Path) -> dict[str, Any]:
    """Returns entries of a table's row: the rate and knobs that tuning chose, as text, and which lie at an edge."""
    if searches(settings, name):
        best, at_edge = tuning.chosen(out, [*tuned_knobs(settings, name)][1:])
    else:
        best, at_edge = Point(*settings.numbers("tune", float)), []
    return {"tuned": terms.values(best.values, at_edge), "at_edge": at_edge}


def cells(settings: Settings, name: str, runs: Sequence[Trial], out: Path) -> list[dict]:
    """Returns a method's summaries of all trials, each run in its own folder of OUT; tunes first if requested."""
    found = cells_now(settings, name, runs, out, own=runs, wait=True)
    return [cell.summary for cell in found if cell]


def cells_now(
    settings: Settings, name: str, runs: Sequence[Trial], out: Path, *, own: Sequence[Trial], wait: bool
) -> list[Cell | None]:
    """Returns a method's cells; trains those of the trials `own`, and reads the others.

    A cell is None if another process trains it, unless `wait`, or if it is none of `own` and not finished.
    """
    with contextlib.ExitStack() as held:
        if searches(settings, name):
            files_there = (path.exists() for path in tuning.score_files(out, [*tuned_knobs(settings, name)][1:]))
            if not own and not all(files_there):
                return [None] * len(runs)
            if not taken(held, out, say, wait=wait):
                return [None] * len(runs)
        settings = tuned(settings, name, out)
    study = study_of(settings)
    made = {trial: make_run(settings, name, trial) for trial in runs}
    outs = [out / trial.folder for trial in own]
    trackers = [build.build_tracker(settings, folder) for folder in outs]
    found = dict(zip(own, study.train([made[trial] for trial in own], outs, trackers, wait=wait), strict=True))
    others = {trial: study.read(made[trial], out / trial.folder)[0] for trial in runs if trial not in found}
    return [(found | others)[trial] for trial in runs]


def write_table(
    title: str, heads: Sequence[str], body: Sequence[Sequence[str]], rows: Sequence[dict], out: Path, figure: str = ""
) -> None:
    """Writes the table and a page of all runs; see `comparison.write_table`. Prints table and paths."""
    page = comparison.write_table(title, heads, body, rows, out)
    print_table(title, heads, body, note="\n".join(terms.notes(rows)))
    print(f"table: {out / 'table.md'}, .csv, .json, .tex" + (f"; figure: {out / figure}" if figure else ""))
    if page:
        print(f"report: {page}")


def print_table(title: str, heads: Sequence[str], body: Sequence[Sequence[str]], text: int = 1, note: str = "") -> None:
    """Prints a table whose first `text` columns are words; the others are aligned as numbers."""
    table = Table(title=title, caption=note, caption_justify="left")
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < text else "right")
    for line in body:
        table.add_row(*line)
    width = None if sys.stdout.isatty() else 200
    Console(width=width, markup=False, emoji=False).print(table)
