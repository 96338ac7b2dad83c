"""The page of a comparison. It shows several runs and links to each run's own page."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from pfljax.exchange import processes
from pfljax.folder import files
from pfljax.report.comparisons import method_curves, method_points
from pfljax.report.markup import Raw, choice, controls, document, downloads, paragraph, plot, score, table, text
from pfljax.report.page import NAME, write_page
from pfljax.report.picture import Axis, plain
from pfljax.report.pictures import axis_of
from pfljax.report.plots import Plots

TRIAL = re.compile(r"(split-\d+-)?seed-\d+$")  # names of the folders of one method's runs
DEPTH = 3  # OUT/GROUP/METHOD/seed-N
MAX_ROUNDS = 300  # per curve

COSTS = {"megabytes": "MB per client and round", "seconds": "seconds per round"}
AGAINST = {"rounds": "rounds", "megabytes": "MB received and sent per client", "seconds": "seconds of training"}
POINTS = "One point per run, a line at the mean. Click a point for its page."
BAND = (
    "Mean over runs; the band is one standard deviation if there are several runs. Click a method in the legend to "
    "hide it."
)
DOWNLOADS = {"runs": "Runs (CSV)", "curves": "Curves (CSV)"}


@dataclasses.dataclass(frozen=True)
class Found:
    """A finished run.

    Attributes:
        folder: The run's folder.
        title: Title shared by the runs of one method: the folder above those of seeds and splits.
        name: The run's name within its title.
        run: The content of its files.
    """

    folder: Path
    title: str
    name: str
    run: Plots

    @property
    def measures(self) -> dict[str, float | None]:
        """The measures of its last round."""
        last = self.run.summary["last"]
        return {
            "score": last.get(self.run.score.name),
            "decile": last.get("accuracy_bottom_decile"),
            "megabytes": (last["bytes_down"] + last["bytes_up"]) / max(last["round"], 1) / 1e6,
            "seconds": self.run.summary.get("seconds_per_round"),
        }

    def link(self, start: Path) -> str:
        """The address of its page, seen from a folder."""
        return quote(os.path.relpath(self.folder / NAME, start).replace(os.sep, "/"))


def is_run(folder: Path) -> bool:
    """Whether a folder contains a finished run."""
    return (folder / "summary.json").is_file() and (folder / "results.npz").is_file()


def runs_below(folder: Path) -> list[Path]:
    """Returns the folders of finished runs at most `DEPTH` levels below a folder, or the folder itself if it is a run.

    The depth is limited because a page is written for each run, and a whole disk must not be searched by mistake.
    Tuning runs are left out.
    """
    if is_run(folder):
        return [folder]
    found = [path.parent for depth in range(1, DEPTH + 1) for path in folder.glob("*/" * depth + "summary.json")]
    return sorted(path for path in found if is_run(path) and "tuning" not in path.relative_to(folder).parts)


def write_comparison(page: Path, folders: Sequence[Path], title: str = "") -> Path | None:
    """Writes the page of a comparison, and the pages of its runs if they are missing or older than the runs.

    Args:
        page: The file to write.
        folders: Folders of runs, or folders that contain runs.
        title: The page's heading; by default, it names the data set.

    Returns:
        Path of the page; None if there are no runs.

    Raises:
        RunError: if a run's files are damaged; the message names the run.
    """
    found = list(_read(folders))
    if not found or not processes.is_first():
        return page if found else None
    for each in found:
        own = each.folder / NAME
        if not own.exists() or own.stat().st_mtime < (each.folder / "summary.json").stat().st_mtime:
            write_page(each.folder)
    first, start, methods = found[0].run, page.parent.resolve(), _by_method(found)
    names = {"score": first.score.label} | ({"decile": "bottom decile"} if first.score.percent else {}) | COSTS
    data = {"panels": _panels(methods, names, start), "csv": _csv(methods, names)}
    height = f"{max(14, 6 + 2 * len(methods))}rem"
    parts = {
        "Methods": _table(methods, names, start) + _warnings(found),
        "Runs": controls(choice("measure", "Compare by", names, "dots"))
        + plot("dots", "Each run of each method", POINTS, height),
        "Curves": controls(choice("against", "Against", AGAINST, "over"))
        + plot("over", "Each method over rounds", BAND),
        "Download": downloads(DOWNLOADS),
    }
    lead = f"{len(methods)} methods, {len(found)} runs"
    heading = title or f"Comparison on {first.summary['dataset']}"
    files.write_text(page, document(heading, lead, parts, files.plain(data)))
    return page


def _read(folders: Iterable[Path]) -> Iterable[Found]:
    """Reads the runs. Titles are the parts of their paths that differ."""
    paths = list(dict.fromkeys(path.resolve() for folder in folders for path in runs_below(Path(folder))))
    root = Path(os.path.commonpath([path.parent if len(paths) == 1 else path for path in paths] or ["/"]))
    for path in paths:
        parts = path.relative_to(root).parts
        trial, run = bool(parts and TRIAL.match(parts[-1])), Plots.read(path)
        name = parts[-1] if trial else f"seed-{run.summary.get('seed', 0)}"
        title = "/".join(parts[:-1] if trial else parts) or str(run.summary["algorithm"])
        yield Found(path, title, name, run)


def _by_method(found: Sequence[Found]) -> dict[str, list[Found]]:
    """Groups the runs by title, the best mean score first."""
    groups = {title: [each for each in found if each.title == title] for title in {each.title: None for each in found}}
    means = {title: np.mean([np.array(each.measures["score"], float) for each in own]) for title, own in groups.items()}
    return {
        title: groups[title]
        for title in sorted(groups, key=lambda t: -found[0].run.score.sign * np.nan_to_num(means[t]))
    }


def _panels(methods: Mapping[str, Sequence[Found]], names: Mapping[str, str], start: Path) -> dict[str, dict[str, Any]]:
    """Returns the panels of points by measure, and of curves by horizontal axis."""
    score = next(iter(methods.values()))[0].run.score
    links = {title: [each.link(start) for each in own] for title, own in methods.items()}
    dots, over = {}, {}
    for name, label in names.items():
        values = {title: [each.measures[name] for each in own] for title, own in methods.items()}
        axis = Axis(label, percent=score.percent and name in ("score", "decile"))
        dots[name] = plain(method_points(values, axis, links))
    curves = {title: _curves(own) for title, own in methods.items()}
    for name, label in AGAINST.items():
        drawn = {
            title: (own[name].mean(axis=0), own["score"].mean(axis=0), own["score"].std(axis=0))
            for title, own in curves.items()
        }
        over[name] = plain(method_curves(drawn, Axis(label), axis_of(score)))
    return {"dots": dots, "over": over}


def _curves(runs: Sequence[Found]) -> dict[str, np.ndarray]:
    """Returns the rounds that all runs of a method evaluated, their scores and costs so far. Shape (runs, T)."""
    rounds = sorted(set.intersection(*({row["round"] for row in each.run.rows} for each in runs)))
    if len(rounds) > MAX_ROUNDS:
        rounds = [rounds[place] for place in np.linspace(0, len(rounds) - 1, MAX_ROUNDS).round().astype(int)]
    kept = [{row["round"]: row for row in each.run.rows} for each in runs]
    series = lambda read: np.array([[read(rows[number]) for number in rounds] for rows in kept], float)
    return {
        "rounds": series(lambda row: row["round"]),
        "score": series(lambda row: row.get(runs[0].run.score.name)),
        "megabytes": series(lambda row: (row.get("bytes_down", 0) + row.get("bytes_up", 0)) / 1e6),
        "seconds": series(lambda row: row.get("seconds") or 0),
    }


def _csv(methods: Mapping[str, Sequence[Found]], names: Mapping[str, str]) -> dict[str, list]:
    """Returns the tables for downloading."""
    runs = [["method", "run", *names.values()]]
    curves = [["method", "run", "round", next(iter(methods.values()))[0].run.score.name]]
    for title, own in methods.items():
        runs += [[title, each.name, *(each.measures[name] for name in names)] for each in own]
        kept = _curves(own)
        for each, rounds, scores in zip(own, kept["rounds"].astype(int).tolist(), kept["score"].tolist(), strict=True):
            curves += [[title, each.name, *point] for point in zip(rounds, scores, strict=True)]
    return {"runs": runs, "curves": curves}


def _table(methods: Mapping[str, Sequence[Found]], names: Mapping[str, str], start: Path) -> Raw:
    """Returns a table with one row per method: means over its runs, and deviations if there are several."""
    body = []
    for title, own in methods.items():
        cells = [
            title,
            *(_mean(name, [each.measures[name] for each in own], own[0].run.score.percent) for name in names),
        ]
        links = ", ".join(f'<a href="{text(each.link(start))}">{text(each.name)}</a>' for each in own)
        body.append([*cells, Raw(links)])
    return table(["method", *names.values(), "runs"], body, "sortable", "Means over runs. Click a heading to sort.")


def _mean(name: str, values: Sequence[float | None], percent: bool) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean, spread = float(np.mean(known)), float(np.std(known))
    if name in ("score", "decile") and percent:
        return f"{100 * mean:.1f}" + (f" ± {100 * spread:.1f}" if len(known) > 1 else "") + " %"
    if name == "score":
        return score("loss", mean) + (f" ± {spread:.4f}" if len(known) > 1 else "")
    return f"{mean:.3g}"


def _warnings(found: Sequence[Found]) -> str:
    """Returns a paragraph on differences that make the runs not directly comparable."""
    said = []
    for word, of in (
        ("data", lambda run: run.summary["dataset"]),
        ("the number of clients", lambda run: run.summary["num_clients"]),
        ("the last round", lambda run: run.summary["last"]["round"]),
    ):
        values = list(dict.fromkeys(of(each.run) for each in found))
        if len(values) > 1:
            said.append(f"The runs differ in {word}: {', '.join(map(str, values))}.")
    return paragraph(" ".join(said))
