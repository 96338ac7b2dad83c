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
from pfljax.report import markup
from pfljax.report.across import MAX_ROUNDS, folders_with, title_of
from pfljax.report.comparisons import method_curves
from pfljax.report.markup import document, paragraph, plot, table
from pfljax.report.picture import Axis, plain
from pfljax.report.run_data import evenly, label_of

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
    found = {}
    for folder in folders:
        lists = [folder, *folders_with(planned.NAME, folder)]
        found |= {path: rounds for each in lists for path, rounds in planned.read(each).items()}
        begun = [*folders_with("config.json", folder), *folders_with("summary.json", folder)]
        begun += [folder] if (folder / "config.json").is_file() else []
        found |= {path: found.get(path) for path in begun}
    runs = [read(path, root, rounds) for path, rounds in sorted(found.items())]
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
    rounds = _parsed(folder / "config.json", lambda path: files.read_json(path).get("rounds"), None)
    total = about.rounds if rounds is None else _count(rounds)
    last, stopped = _parsed(folder / "summary.json", _ending, (-1, ""))
    chosen = _parsed(
        folder / "config.json", lambda path: str(files.read_json(path).get("score") or ""), ""
    )
    read_curve = functools.partial(_curve, chosen=chosen)
    score, curve, pace = _parsed(folder / "metrics.jsonl", read_curve, ("", {}, math.nan))
    saved = _parsed(
        folder / manifest.NAME, lambda _: getattr(manifest.read(folder), "rounds", 0), 0
    )
    total = last if total is None and last >= 0 else total
    done = max([*curve, last, saved, 0])
    holder = locks.holder(folder)
    # its process may hold it until its others are finished
    if stopped or (total is not None and last >= total):
        state = "finished"
        note = stopped and f"stopped {stopped}"
    elif holder and not holder.has_ended:
        state = "running"
        note = f"process {holder}"
    elif holder or (folder / "config.json").exists():
        state = "stopped"
        note = f"process {holder} has ended" if holder else "no process trains it"
    else:
        state = "waiting"
        note = ""
    total = total if total is None else max(total, done)
    return Watched(about.title, about.name, state, note, done, total, pace, score, curve)


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
    paces = defaultdict(list)
    for run in runs:
        paces[run.title] += [] if math.isnan(run.pace) else [run.pace]
    every = [pace for own in paces.values() for pace in own]
    workers = {run.note for run in runs if run.state == "running"}
    if not workers or not every:
        return math.nan

    def pace_of(run):
        return run.pace if run.pace == run.pace else float(np.mean(paces[run.title] or every))

    left = [
        run._replace(pace=pace_of(run)).seconds_left
        for run in runs
        if run.state not in ("finished", "damaged")
    ]
    return sum(left) / len(workers)


def duration(seconds: float) -> str:
    """Formats seconds in two units at most, such as "2 h 5 min"."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = {"d": days, "h": hours, "min": minutes, "s": rest}
    shown = [(unit, count) for unit, count in parts.items() if count or unit == "s"]
    return " ".join(f"{count} {unit}" for unit, count in shown[:2] if count or len(shown) == 1)


def curves(
    runs: Sequence[Watched], score: str
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Returns rounds (T,), and means and sample deviations (T,) of a score over the runs that have reached them."""
    scores: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for number, value in run.curve.items() if run.score == score else ():
            scores[run.title][number].append(value)
    found = {}
    for title, by_round in sorted(scores.items()):
        rounds = np.array(sorted(by_round))
        rounds = rounds[evenly(len(rounds), MAX_ROUNDS)]
        spread = [float(statistics.deviation(by_round[number])) for number in rounds]
        found[title] = (
            rounds,
            np.array([np.mean(by_round[number]) for number in rounds]),
            np.array(spread),
        )
    return found


def page(folders: Sequence[Path], refresh: int) -> str:
    """Returns the page of runs in or below folders, which states that it is loaded again every `refresh` seconds."""
    runs = watched(folders)
    counts = Counter(run.state for run in runs)
    left = seconds_left(runs)
    body = []
    for run in runs:
        last = markup.score(run.score, run.curve[max(run.curve)]) if run.curve else None
        of_all = f"{run.done} of {'?' if run.rounds is None else run.rounds}"
        pace = None if math.isnan(run.pace) else f"{run.pace:.3g}"
        wait = None if run.state == "finished" else duration(run.seconds_left)
        name = "/".join(filter(None, (run.title, run.name)))
        body.append([name, run.state, of_all, last and f"{run.score} {last}", pace, wait, run.note])
    said = (
        ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]) or "no runs yet"
    )
    said += "" if math.isnan(left) else f"; about {duration(left)} left"
    now = datetime.datetime.now().strftime("%H:%M:%S")
    panels = {}
    plots = []
    for score in dict.fromkeys([*SCORES, *(run.score for run in runs if run.score)]):
        if found := curves(runs, score):
            axis = Axis(label_of(score), percent=is_percent(score))
            panels[score] = {"": plain(method_curves(found, Axis("round"), axis))}
            plots.append(plot(score, f"{label_of(score).capitalize()} over rounds", BAND))
    parts = {
        "Curves": "".join(plots),
        "Runs": table(HEADS, body, "sortable") + paragraph(TIMES) if body else "",
    }
    title = f"Watching {', '.join(map(str, folders))}"
    lead = f"{said}. Seen at {now}; loaded again every {refresh} s."
    return document(title, lead, parts, {"panels": files.plain(panels), "texts": {}, "csv": {}})
