"""Runs several methods on several trials. Each pair is a cell with its own run; finished cells are not run again.

Commands that compare methods use this module: `cells` runs a method on all trials, `write_table` writes the results.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from pfljax import api, report
from pfljax.api import Point
from pfljax.api import cells as cells_of
from pfljax.cli import build
from pfljax.cli.build import Trial
from pfljax.cli.settings import FlagError, Settings
from pfljax.core import method
from pfljax.core.errors import ArgumentError
from pfljax.training import files
from pfljax.training.loop import Schedule


def trials(settings: Settings) -> list[Trial]:
    """Returns all pairs of --splits and --seeds. Without --splits, the seed also determines the split."""
    seeds = settings.numbers("seeds", int)
    if not settings.splits:
        return [Trial(seed) for seed in seeds]
    return [Trial(seed, split) for split in settings.numbers("splits", int) for seed in seeds]


def named(runs: Sequence[Trial]) -> str:
    """Describes the trials, for titles."""
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(trial.seed for trial in runs))
    splits = ", ".join(str(split) for split in dict.fromkeys(trial.split for trial in runs) if split is not None)
    word = lambda name, numbers: f"{name}s {numbers}" if "," in numbers else f"{name} {numbers}"
    return word("seed", seeds) + (f" on {word('split', splits)}" if splits else "")


def check(
    settings: Settings, asked: Sequence[tuple[Settings, str, Path]], runs: Sequence[Trial], *, classes: bool = False
) -> None:
    """Checks that all cells of a table can be run, before running any.

    Args:
        settings: The command line's settings.
        asked: Settings, method and folder of each group of cells that differ only in their trial.
        runs: The trials.
        classes: Whether the table contains accuracies.

    Raises:
        FlagError: for a flag that no cell uses.
        ArgumentError: for a mistake in a cell, or a folder that contains something else.
    """
    settings.check_read([each for each, _, _ in asked])
    for trial in runs:
        for each, name, out in asked:
            run = build.build_run(each, name, build.cached_clients(each, trial.of_data), trial)
            if classes and run.clients.task == "regression":
                raise settings.error("dataset", "has no classes; accepted: classification data sets")
            if not each.tune and not each.tune_knobs:  # otherwise the runs' settings are not known yet
                cells_of.check(out / trial.folder, run.experiment, each.rounds)


def able(settings: Settings, names: Sequence[str], trial: Trial) -> list[str]:
    """Returns the methods that support the data. With --algorithms=all, the others are skipped and printed."""
    found = []
    for name in names:
        try:
            build.build_run(settings, name, build.cached_clients(settings, trial.of_data), trial)
        except ArgumentError as error:
            if settings.algorithms != ["all"] or error.argument != "algorithm":
                raise
            print(f"left out: {name}: {error.text.split(';')[0]}")
        else:
            found.append(name)
    return found


def kept(settings: Settings, run: api.Run, out: Path) -> dict | None:
    """Returns the summary of a finished cell, or None. Raises an error if it has other settings or more rounds."""
    found, wrong = cells_of.finished(out, run.experiment, settings.rounds)
    if found:
        print(f"  {out}: already finished")
        return found.summary
    again = f", running again: {wrong}" if wrong else ""
    print(f"  {out}: {run.clients.num_clients} clients, {settings.rounds} rounds{again}")
    return None


def cell(settings: Settings, name: str, trial: Trial, out: Path) -> dict:
    """Returns one run's summary; trains the run unless it is finished."""
    run = build.build_run(settings, name, build.cached_clients(settings, trial.of_data), trial)
    summary = kept(settings, run, out)
    if summary is not None:
        return summary
    result = run.train(
        settings.rounds,
        out=out,
        resume="if_possible",
        eval_every=settings.eval_every,
        checkpoint_every=settings.checkpoint_every,
        say=say,
        profile=settings.profile,
        tracker=build.build_tracker(settings, out),
    )
    return result.summary


def replicates(settings: Settings, name: str, runs: Sequence[Trial], outs: Sequence[Path]) -> list[dict]:
    """Like `cell` for several trials; unfinished trials are trained together in one kernel."""
    made = [build.build_run(settings, name, build.cached_clients(settings, trial.of_data), trial) for trial in runs]
    summaries = [kept(settings, run, out) for run, out in zip(made, outs, strict=True)]
    missing = [number for number, summary in enumerate(summaries) if summary is None]
    if missing:
        results = api.train_replicates(
            [made[number] for number in missing],
            settings.rounds,
            outs=[outs[number] for number in missing],
            resume="if_possible",
            schedule=Schedule(settings.eval_every, settings.checkpoint_every),
            say=say,
            profile=settings.profile,
            trackers=[build.build_tracker(settings, outs[number]) for number in missing],
        )
        for number, result in zip(missing, results, strict=True):
            summaries[number] = result.summary
    return [summary for summary in summaries if summary is not None]


def say(line: str) -> None:
    """Prints a run's lines only if they show its profile or say that it starts over."""
    if "profile: " in line or cells_of.LOST in line:
        print(line)


def tuned_knobs(settings: Settings, name: str) -> list[str]:
    """Returns the knobs that --tune_knobs tunes: those with a grid, except any on the command line."""
    if not settings.tune_knobs:
        return []
    knobs = [field.name for field in dataclasses.fields(method.get(name)) if field.metadata.get("grid")]
    return [knob for knob in knobs if not settings.present(f"{name}.{knob}")]


def at_point(settings: Settings, name: str, point: Point) -> Settings:
    """Returns the settings with a grid point's learning rate and knobs."""
    rate = {} if point.learning_rate is None else {"learning_rate": point.learning_rate}
    return settings.pinned(**rate, **{f"{name}.{knob}": value for knob, value in point.knobs.items()})


def tune(settings: Settings, name: str, runs: Sequence[Trial], out: Path) -> Point:
    """Finds the learning rate and knobs with the best final validation accuracy (or loss), averaged over trials.

    Tunes the rate and the first knob together, then each further knob with the best values found so far. A quarter of
    the training examples is used for validation unless --validation_fraction is given. Points where a run diverges are
    discarded.

    Raises:
        RunError: if a run diverges at every point.
        FlagError: if OUT has scores from other settings.
    """
    grids = {field.name: field.metadata.get("grid", ()) for field in dataclasses.fields(method.get(name))}
    knobs = tuned_knobs(settings, name)
    points = api.grid(settings.numbers("tune", float), {knob: grids[knob] for knob in knobs[:1]})
    best = points[0] if len(points) == 1 else best_of(points, settings, name, runs, out / "tuning.json")
    for knob in knobs[1:]:
        points = [best._replace(knobs={**best.knobs, knob: value}) for value in grids[knob]]
        best = best_of(points, settings, name, runs, out / f"tuning-{knob}.json")
    return best


def best_of(points: list[Point], settings: Settings, name: str, runs: Sequence[Trial], path: Path) -> Point:
    """Returns the best of some points. Scores are saved to a file and reused if the settings are the same."""
    tried = settings.replace(validation_fraction=settings.validation_fraction or 0.25)
    varied = {"--seed", "--split", *(f"--{name}.{knob}" for knob in points[0].knobs)}
    varied |= {"--learning_rate"} if settings.tune else set()
    rest = {flag: v for flag, v in build.config(tried, name, runs[0])["settings"].items() if flag not in varied}
    same = {"settings": rest, "rounds": tried.rounds}
    same = files.plain(same | {"trials": list(runs), "grid": [point._asdict() for point in points]})
    tuning = kept_scores(settings, path, same, points)
    if tuning is None:
        print(f"  {name}: tuning, {len(points)} points on {named(runs)}")
        make = lambda point, trial: build.build_run(
            at_point(tried, name, point), name, build.cached_clients(tried, trial.of_data), trial
        )
        tuning = api.search(points, runs, make, tried.rounds)
        known = lambda values: [None if np.isnan(value) else value for value in values]
        found = {"scores": known(tuning.scores), "losses": known(tuning.losses), "best": tuning.best._asdict()}
        files.write_json(path, same | found)
    print(
        f"  {name}: {tuning.best} of " + "; ".join(f"{p} ({s:.4f})" for p, s in zip(points, tuning.scores, strict=True))
    )
    for number in tuning.at_edge:
        print(f"  {name}: {number} is at the edge of the grid; a wider grid may do better")
    return tuning.best


def kept_scores(settings: Settings, path: Path, same: dict, points: list[Point]) -> api.Tuning | None:
    """Reads the scores in a file; None if it is missing or damaged. Prints a line if it is damaged.

    Raises:
        FlagError: if the scores are from other settings.
    """
    if not path.exists():
        return None
    number = lambda value: np.nan if value is None else float(value)
    try:
        before = files.read_json(path)
        scores, losses = ([*map(number, before[key])] for key in ("scores", "losses"))
        Point(**before["best"])  # `chosen` reads it
    except (ValueError, TypeError, KeyError):
        print(f"  {path} is damaged; tuning again")
        return None
    if any(before.get(key) != value for key, value in same.items()):
        raise FlagError(f"--out={settings.out}: {path} has scores from other settings; choose a new folder")
    return api.Tuning(points, scores, losses)


def tuned(settings: Settings, name: str, runs: Sequence[Trial], out: Path) -> tuple[Settings, Point]:
    """Returns the tuned settings of a method and the chosen point; unchanged without --tune and --tune_knobs."""
    if not settings.tune and not settings.tune_knobs:
        return settings, Point()
    point = tune(settings, name, runs, out)
    return at_point(settings, name, point), point


def cells(settings: Settings, name: str, runs: Sequence[Trial], out: Path) -> list[dict]:
    """Returns a method's summaries of all trials, each run in its own folder of OUT; tunes first if requested."""
    settings, _ = tuned(settings, name, runs, out)
    outs = [out / trial.folder for trial in runs]
    if settings.replicate == "vmap":
        return replicates(settings, name, runs, outs)
    return [cell(settings, name, trial, folder) for trial, folder in zip(runs, outs, strict=True)]


def chosen(out: Path) -> Point:
    """Returns the point that tuning chose for a folder's cells; an empty point if nothing was tuned."""
    stages = [Point(**files.read_json(path)["best"]) for path in out.glob("tuning*.json")]
    return max(stages, key=lambda point: len(point.knobs), default=Point())  # the last one has all knobs


def rate_of(out: Path) -> float:
    """Returns the learning rate of a finished cell."""
    return files.read_json(out / "config.json")["flags"]["learning_rate"]


def mean_over(summaries: Sequence[dict], read: Callable[[dict], float]) -> float:
    """Returns the mean of a number over runs."""
    return float(np.mean([read(summary) for summary in summaries]))


def write_table(
    title: str, heads: Sequence[str], body: Sequence[Sequence[str]], rows: Sequence[dict], out: Path, figure: str = ""
) -> None:
    """Writes table.md (with the title), table.csv, table.json (rows) and a page of all runs. Prints table and paths."""
    lines = [" | ".join(line) for line in [heads, ["---"] * len(heads), *body]]
    files.write_text(out / "table.md", "".join(f"| {line} |\n" for line in lines) + f"\n{title}\n")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *body])
    files.write_text(out / "table.csv", text.getvalue())
    files.write_json(out / "table.json", rows)
    page = report.write_comparison(out / "report.html", [out], title)
    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="left" if head == heads[0] else "right")
    for line in body:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    print(f"table: {out / 'table.md'}, .csv, .json" + (f"; figure: {out / figure}" if figure else ""))
    if page:
        print(f"report: {page}")
