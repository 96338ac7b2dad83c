"""Runs of several methods and trials side by side: cells, each a run of its own that is not run again.

Commands that compare build on this: `cells` runs a method on all trials, `write_table` ends.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from pfljax import api, report
from pfljax.api import Point
from pfljax.cli import build
from pfljax.cli.build import Trial
from pfljax.cli.flags import MOST
from pfljax.cli.settings import FlagError, Settings
from pfljax.core import method
from pfljax.engine import processes
from pfljax.training import files, folders
from pfljax.training.loop import Schedule


def trials(settings: Settings) -> list[Trial]:
    """Every one of --splits with every one of --seeds; without --splits a seed decides its split, too."""
    seeds = _numbers(settings, "seeds")
    if not settings.splits:
        return [Trial(seed) for seed in seeds]
    return [Trial(seed, split) for split in _numbers(settings, "splits") for seed in seeds]


def _numbers(settings: Settings, flag: str) -> list[int]:
    try:
        numbers = [int(number) for number in settings[flag]]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0 or max(numbers) > MOST or len(set(numbers)) < len(numbers):
        raise settings.error(flag, "accepted: different whole numbers of 0 or more, separated by commas")
    return numbers


def named(runs: Sequence[Trial]) -> str:
    """The trials in words, for titles."""
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(trial.seed for trial in runs))
    splits = ", ".join(str(split) for split in dict.fromkeys(trial.split for trial in runs) if split is not None)
    word = lambda name, numbers: f"{name}s {numbers}" if "," in numbers else f"{name} {numbers}"
    return word("seed", seeds) + (f" on {word('split', splits)}" if splits else "")


def kept(settings: Settings, run: api.Run, out: Path) -> dict | None:
    """The summary of a cell that is finished, else None; complains of one with other settings."""
    processes.first(functools.partial(folders.check, out, run.experiment.config, "if_possible"))
    path = out / "summary.json"
    if path.exists() and files.read_json(path)["last"]["round"] >= settings.rounds:
        print(f"  {out}: finished before, kept")
        return files.read_json(path)
    print(f"  {out}: {run.clients.num_clients} clients, {settings.rounds} rounds")
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
        )
        for number, result in zip(missing, results, strict=True):
            summaries[number] = result.summary
    return [summary for summary in summaries if summary is not None]


def say(line: str) -> None:
    """Of what a run says, only what its profile shows."""
    if "profile: " in line:
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
    if path.exists():
        before = files.read_json(path)
        if any(before.get(key) != value for key, value in same.items()):
            raise FlagError(f"--out={settings.out}: {path} has scores of other settings; name a new folder")
        read = lambda key: [np.nan if value is None else value for value in before[key]]
        tuning = api.Tuning(points, read("scores"), read("losses"))
    else:
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
