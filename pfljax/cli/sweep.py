"""Runs of several methods and trials side by side: cells, each a run of its own that is not run again.

Commands that compare build on this: `cells` runs a method on all trials, `write_table` ends.
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
    """Every one of --splits with every one of --seeds; without --splits a seed decides its split, too."""
    seeds = settings.numbers("seeds", int)
    if not settings.splits:
        return [Trial(seed) for seed in seeds]
    return [Trial(seed, split) for split in settings.numbers("splits", int) for seed in seeds]


def named(runs: Sequence[Trial]) -> str:
    """The trials in words, for titles."""
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(trial.seed for trial in runs))
    splits = ", ".join(str(split) for split in dict.fromkeys(trial.split for trial in runs) if split is not None)
    word = lambda name, numbers: f"{name}s {numbers}" if "," in numbers else f"{name} {numbers}"
    return word("seed", seeds) + (f" on {word('split', splits)}" if splits else "")


def check(
    settings: Settings, asked: Sequence[tuple[Settings, str, Path]], runs: Sequence[Trial], *, classes: bool = False
) -> None:
    """Sees to it that all cells of a table can be run, before any is.

    Args:
        settings: The command line's.
        asked: Settings, method and folder of the cells that differ in their trial only.
        runs: The trials.
        classes: Whether the table is of accuracies.

    Raises:
        FlagError: for a flag that none of them reads.
        ArgumentError: for a mistake in one of them, or a folder that holds something else.
    """
    settings.check_read([each for each, _, _ in asked])
    for trial in runs:
        for each, name, out in asked:
            run = build.build_run(each, name, build.cached_clients(each, trial.of_data), trial)
            if classes and run.clients.task == "regression":
                raise settings.error("dataset", "is a regression; accepted: data sets with classes")
            if not each.tune and not each.tune_knobs:  # else the settings of the runs are not known yet
                cells_of.check(out / trial.folder, run.experiment.config, each.rounds)


def able(settings: Settings, names: Sequence[str], trial: Trial) -> list[str]:
    """The methods that can be trained on the data; with --algorithms=all those that cannot are left out, and named."""
    found = []
    for name in names:
        try:
            build.build_run(settings, name, build.cached_clients(settings, trial.of_data), trial)
        except ArgumentError as error:
            if settings.algorithms != ["all"] or error.argument != "algorithm":
                raise
            print(f"left out: {name}, which {error.text.split(';')[0]}")
        else:
            found.append(name)
    return found


def kept(settings: Settings, run: api.Run, out: Path) -> dict | None:
    """The summary of a cell that is finished, else None; complains of one with other settings or more rounds."""
    found, wrong = cells_of.finished(out, run.experiment.config, settings.rounds)
    if found:
        print(f"  {out}: finished before, kept")
        return found.summary
    again = f", again: {wrong}" if wrong else ""
    print(f"  {out}: {run.clients.num_clients} clients, {settings.rounds} rounds{again}")
    return None


def cell(settings: Settings, name: str, trial: Trial, out: Path) -> dict:
    """One run's summary, trained unless it is there already."""
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
    """As `cell` for several trials, those that are not finished in one kernel."""
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
    """Of what a run says, only what its profile shows, and that it starts over."""
    if "profile: " in line or cells_of.LOST in line:
        print(line)


def tuned_knobs(settings: Settings, name: str) -> list[str]:
    """The knobs that --tune_knobs tunes: those of the method that its paper tunes, but for any on the command line."""
    if not settings.tune_knobs:
        return []
    knobs = [field.name for field in dataclasses.fields(method.get(name)) if field.metadata.get("grid")]
    return [knob for knob in knobs if not settings.present(f"{name}.{knob}")]


def at_point(settings: Settings, name: str, point: Point) -> Settings:
    """The settings with a method's learning rate and knobs of a grid point."""
    rate = {} if point.learning_rate is None else {"learning_rate": point.learning_rate}
    return settings.pinned(**rate, **{f"{name}.{knob}": value for knob, value in point.knobs.items()})


def tune(settings: Settings, name: str, runs: Sequence[Trial], out: Path) -> Point:
    """The rate and the knobs with the best validation accuracy (or least loss) in the last round, a mean over trials.

    Rate and first knob are tuned together, each further knob at the best of what came before. A quarter of the training
    examples is for validation, unless --validation_fraction says otherwise; a point at which a run diverges is out.

    Raises:
        RunError: if all of them diverge.
        FlagError: if OUT has scores of other settings.
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
    """The best of some points; the file keeps their scores, and with the same settings they are not measured again."""
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
        print(f"  {name}: {number} is at the edge of the grid; a wider one may do better")
    return tuning.best


def kept_scores(settings: Settings, path: Path, same: dict, points: list[Point]) -> api.Tuning | None:
    """The scores in a file; None where there is none, or one that is damaged, which it says.

    Raises:
        FlagError: if they are of other settings.
    """
    if not path.exists():
        return None
    number = lambda value: np.nan if value is None else float(value)
    try:
        before = files.read_json(path)
        scores, losses = ([*map(number, before[key])] for key in ("scores", "losses"))
        Point(**before["best"])  # which `chosen` reads
    except (ValueError, TypeError, KeyError):
        print(f"  {path} is damaged; tuned again")
        return None
    if any(before.get(key) != value for key, value in same.items()):
        raise FlagError(f"--out={settings.out}: {path} has scores of other settings; name a new folder")
    return api.Tuning(points, scores, losses)


def tuned(settings: Settings, name: str, runs: Sequence[Trial], out: Path) -> tuple[Settings, Point]:
    """The settings under which a method is best, if --tune or --tune_knobs asks for them, and what was chosen."""
    if not settings.tune and not settings.tune_knobs:
        return settings, Point()
    point = tune(settings, name, runs, out)
    return at_point(settings, name, point), point


def cells(settings: Settings, name: str, runs: Sequence[Trial], out: Path) -> list[dict]:
    """A method's summaries of all trials, each in a folder of OUT, tuned if the settings ask for it."""
    settings, _ = tuned(settings, name, runs, out)
    outs = [out / trial.folder for trial in runs]
    if settings.replicate == "vmap":
        return replicates(settings, name, runs, outs)
    return [cell(settings, name, trial, folder) for trial, folder in zip(runs, outs, strict=True)]


def chosen(out: Path) -> Point:
    """What tuning has chosen for the cells of a folder; an empty point where nothing was tuned."""
    stages = [Point(**files.read_json(path)["best"]) for path in out.glob("tuning*.json")]
    return max(stages, key=lambda point: len(point.knobs), default=Point())  # the last one has all knobs


def rate_of(out: Path) -> float:
    """The learning rate of a finished cell."""
    return files.read_json(out / "config.json")["flags"]["learning_rate"]


def mean_over(summaries: Sequence[dict], read: Callable[[dict], float]) -> float:
    """The mean of a figure over runs."""
    return float(np.mean([read(summary) for summary in summaries]))


def write_table(
    title: str, heads: Sequence[str], body: Sequence[Sequence[str]], rows: Sequence[dict], out: Path, figure: str = ""
) -> None:
    """Writes table.md (with the title), table.csv, table.json (rows) and a page of all runs; shows and names them."""
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
