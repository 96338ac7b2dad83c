"""The page of running studies: what runs, waits, is finished or has stopped, as the runs' folders say it now."""

from __future__ import annotations

import datetime
import functools
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pfljax.evaluation import statistics
from pfljax.evaluation.metrics import is_percent
from pfljax.folder import files, locks, manifest, planned
from pfljax.report.comparison_runs import MAX_ROUNDS
from pfljax.report.comparisons import method_curves
from pfljax.report.elements import Element, Paragraph, Plot, Table
from pfljax.report.picture import Axis, plain
from pfljax.report.rendering import document
from pfljax.report.run_data import evenly, label_of
from pfljax.report.run_folders import folders_with, title_of
from pfljax.report.sections import score_text

STATES = ("running", "stopped", "damaged", "waiting", "finished")  # in the order of the page
SCORES = ("accuracy", "loss")  # the first that a run has is shown, unless config.json names another
HEADS = ("run", "state", "rounds", "score", "seconds per round", "time left", "note")
TIMES = (
    "Time left is the rounds left at the pace so far, without compiling and evaluating. In all, runs that have not "
    "begun take the mean pace of their method, or of all methods, and the processes that work now share the rest."
)
BAND = "Mean over the runs that have reached a round; the band is one sample deviation over runs if there are several."

T = TypeVar("T")


class Damaged(ValueError):
    """A file of a run cannot be read."""


class Watched(NamedTuple):
    """What a run's folder says."""

    title: str  # the folder above those of seeds and splits
    name: str  # the run's name within the title; "" if it is the only one
    state: str  # one of `STATES`
    note: str = ""  # what there is to say about its state, such as the process that trains it
    done: int = 0  # number of rounds done
    rounds: int | None = None  # number of rounds of all; None if it is not known yet
    pace: float = math.nan  # seconds per round; NaN if they are not known yet
    score: str = ""  # what its clients are scored by, accuracy or loss; "" if they are not yet
    # Score by evaluated round
    curve: dict[int, float] = {}

    @property
    def seconds_left(self) -> float:
        """Seconds of training until it is finished; NaN if they are not known yet."""
        return math.nan if self.rounds is None else (self.rounds - self.done) * self.pace


def watched(folders: Sequence[Path]) -> list[Watched]:
    """Returns the runs in some folders or up to three levels below them, by state: those that have begun or will."""
    folders = [folder.resolve() for folder in folders]
    root = Path(os.path.commonpath(folders))

    # The planned number of rounds by folder; None: unknown.
    rounds_of: dict[Path, int | None] = {}
    for folder in folders:
        for study in (folder, *folders_with(planned.NAME, folder)):
            rounds_of |= planned.read(study)
        begun = folders_with("config.json", folder) + folders_with("summary.json", folder)
        if (folder / "config.json").is_file():
            begun.append(folder)
        for path in begun:
            rounds_of.setdefault(path, None)
    runs = [read(path, root, rounds) for path, rounds in sorted(rounds_of.items())]
    return sorted(runs, key=lambda run: STATES.index(run.state))


def read(folder: Path, root: Path, rounds: int | None = None) -> Watched:
    """Returns what a run's folder says, whatever it contains; it may not exist yet.

    Its title is relative to `root`; `rounds` is the number that is planned for it.
    """
    title, name = title_of(folder, root)
    about = Watched(title or folder.name, name, "damaged")
    try:
        return _read(folder, about._replace(rounds=None if rounds is None else _count(rounds)))
    except Exception as error:  # a damaged file can make its reader raise anything
        return about._replace(
            note=str(error) if isinstance(error, Damaged) else f"cannot be read: {error!r}"[:200]
        )


def _read(folder: Path, about: Watched) -> Watched:
    """Reads a run's files. Raises `Damaged` if one cannot be read."""
    # Settings.
    rounds = _parsed(folder / "config.json", lambda path: files.read_json(path).get("rounds"), None)
    total = about.rounds if rounds is None else _count(rounds)
    chosen = _parsed(
        folder / "config.json", lambda path: str(files.read_json(path).get("score") or ""), ""
    )

    # Progress.
    last, stopped = _parsed(folder / "summary.json", _ending, (-1, ""))
    read_curve = functools.partial(_curve, chosen=chosen)
    score, curve, pace = _parsed(folder / "metrics.jsonl", read_curve, ("", {}, math.nan))
    saved = _parsed(
        folder / manifest.NAME, lambda _: getattr(manifest.read(folder), "rounds", 0), 0
    )
    if total is None and last >= 0:
        total = last
    done = max([*curve, last, saved, 0])

    # A process may hold the lock of a finished run until its other runs are finished.
    holder = locks.holder(folder)
    state = "waiting"
    note = ""
    if stopped or (total is not None and last >= total):
        state = "finished"
        note = f"stopped {stopped}" if stopped else ""
    elif holder and not holder.has_ended:
        state = "running"
        note = f"process {holder}"
    elif holder or (folder / "config.json").exists():
        state = "stopped"
        note = f"process {holder} has ended" if holder else "no process trains it"
    return about._replace(
        state=state,
        note=note,
        done=done,
        rounds=None if total is None else max(total, done),
        pace=pace,
        score=score,
        curve=curve,
    )


def _parsed(path: Path, parse: Callable[[Path], T], missing: T) -> T:
    """Returns what a file says; `missing` if it does not exist."""
    try:
        return parse(path) if path.is_file() else missing
    except Exception as error:  # as in `read`
        raise Damaged(f"{path.name} cannot be read") from error


def _count(value: Any) -> int:
    if not 0 <= value < 2**31:
        raise ValueError(value)
    return int(value)


def _ending(path: Path) -> tuple[int, str]:
    """Returns a summary's last round, and when and why its run stopped before its last round."""
    summary = files.read_json(path)
    return _count(summary["last"]["round"]), str(summary.get("stopped") or "")


def _curve(path: Path, chosen: str) -> tuple[str, dict[int, float], float]:
    """Returns the score's name, the scores by round, and seconds per round, from metrics.jsonl.

    `chosen` is the score that config.json names; "": it names none.
    """
    rows = files.read_jsonl(path)
    score = next((name for name in (chosen, *SCORES) if rows and name in rows[-1]), "")

    def number(value):
        return math.nan if value is None else float(value)

    curve = {_count(row["round"]): number(row.get(score)) for row in rows}
    last = max(curve, default=0)
    return score, curve, number(rows[-1]["seconds"]) / last if last else math.nan


def seconds_left(runs: Sequence[Watched]) -> float:
    """Returns the seconds until all runs are finished; NaN if nothing runs, or if they are not known yet."""
    # Known paces, by method and of all.
    paces = defaultdict(list)
    all_paces = []
    for run in runs:
        if not math.isnan(run.pace):
            paces[run.title].append(run.pace)
            all_paces.append(run.pace)
    workers = {run.note for run in runs if run.state == "running"}
    if not workers or not all_paces:
        return math.nan

    total = 0.0
    for run in runs:
        if run.state in ("finished", "damaged"):
            continue
        pace = run.pace
        if math.isnan(pace):
            pace = float(np.mean(paces[run.title] or all_paces))
        total += run._replace(pace=pace).seconds_left
    return total / len(workers)


def duration(seconds: float) -> str:
    """Formats seconds in two units at most, such as "2 h 5 min"."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    counts = {"d": days, "h": hours, "min": minutes, "s": rest}
    units = [unit for unit, count in counts.items() if count or unit == "s"][:2]
    shown = [unit for unit in units if counts[unit] or len(units) == 1]
    return " ".join(f"{counts[unit]} {unit}" for unit in shown)


def curves(
    runs: Sequence[Watched], score: str
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Returns rounds (T,), and means and sample deviations (T,) of a score over the runs that have reached them."""
    scores: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.score == score:
            for number, value in run.curve.items():
                scores[run.title][number].append(value)

    by_method = {}
    for title, by_round in sorted(scores.items()):
        rounds = np.array(sorted(by_round))
        rounds = rounds[evenly(len(rounds), MAX_ROUNDS)]
        means = [np.mean(by_round[number]) for number in rounds]
        deviations = [float(statistics.deviation(by_round[number])) for number in rounds]
        by_method[title] = (rounds, np.array(means), np.array(deviations))
    return by_method


def page(folders: Sequence[Path], refresh: int) -> str:
    """Returns the page of runs in or below folders, which states that it is loaded again every `refresh` seconds."""
    runs = watched(folders)

    # Curves of each score that a run has.
    panels = {}
    plots: list[Element] = []
    for score in dict.fromkeys([*SCORES, *(run.score for run in runs if run.score)]):
        curves_of_score = curves(runs, score)
        if curves_of_score:
            axis = Axis(label_of(score), percent=is_percent(score))
            panels[score] = {"": plain(method_curves(curves_of_score, Axis("round"), axis))}
            plots.append(Plot(score, f"{label_of(score).capitalize()} over rounds", BAND))

    table: list[Element] = []
    if runs:
        rows = [run_cells(run) for run in runs]
        table = [Table(HEADS, rows, sortable=True), Paragraph(TIMES)]
    now = datetime.datetime.now().strftime("%H:%M:%S")
    title = f"Watching {', '.join(map(str, folders))}"
    lead = f"{progress(runs)}. Updated {now}; refreshes every {refresh} s."
    data = {"panels": files.plain(panels), "texts": {}, "csv": {}}
    return document(title, lead, {"Curves": plots, "Runs": table}, data)


def progress(runs: Sequence[Watched]) -> str:
    """Returns how many runs are in each state, and the time left."""
    counts = Counter(run.state for run in runs)
    states = [f"{counts[state]} {state}" for state in STATES if counts[state]]
    text = ", ".join(states) or "no runs yet"
    left = seconds_left(runs)
    return text if math.isnan(left) else f"{text}; about {duration(left)} left"


def run_cells(run: Watched) -> list[str | None]:
    """Returns the cells of a run under `HEADS`."""
    score = None
    if run.curve:
        value = score_text(run.score, run.curve[max(run.curve)]) or "-"
        score = f"{run.score} {value}"
    return [
        "/".join(filter(None, (run.title, run.name))),
        run.state,
        f"{run.done} of {'?' if run.rounds is None else run.rounds}",
        score,
        None if math.isnan(run.pace) else f"{run.pace:.3g}",
        None if run.state == "finished" else duration(run.seconds_left),
        run.note,
    ]
