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
from pfljax.report.markup import Raw, choice, document, paragraph, plot, rounded, score, table, text
from pfljax.report.page import NAME, read, write_page

TRIAL = re.compile(r"(split-\d+-)?seed-\d+$")  # names of the folders of one method's runs
DEPTH = 3  # OUT/GROUP/METHOD/seed-N
MAX_ROUNDS = 300  # per curve

# Measures that methods are compared by, and horizontal axes of their curves.
LOSSES = {"score": "test loss", "megabytes": "MB per client and round", "seconds": "seconds per round"}
MEASURES = {"score": "test accuracy", "decile": "bottom decile"} | {
    name: LOSSES[name] for name in ("megabytes", "seconds")
}
AGAINST = {"rounds": "rounds", "traffic": "MB per client", "time": "seconds of training"}

BAND = (
    "Mean over runs; the band is one standard deviation if there are several runs. Click a method in the legend to "
    "hide it."
)
DOWNLOADS = (
    '<button type="button" id="csv-runs">Runs (CSV)</button><button type="button" id="csv-curves">Curves (CSV)</button>'
)


@dataclasses.dataclass(frozen=True)
class Found:
    """A finished run.

    Attributes:
        folder: The run's folder.
        title: Title shared by the runs of one method: the folder above those of seeds and splits.
        name: The run's name within its title.
        summary: Content of summary.json.
        rows: Rows of metrics.jsonl.
    """

    folder: Path
    title: str
    name: str
    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @property
    def kind(self) -> str:
        """The metric of its predictions, "accuracy" or "loss"."""
        return "accuracy" if self.summary.get("task", "classification") == "classification" else "loss"

    @property
    def measures(self) -> dict[str, float | None]:
        """The measures of its last round."""
        last = self.summary["last"]
        return {
            "score": last.get(self.kind),
            "decile": last.get("accuracy_bottom_decile"),
            "megabytes": (last["bytes_down"] + last["bytes_up"]) / max(last["round"], 1) / 1e6,
            "seconds": self.summary.get("seconds_per_round"),
            **{name: last.get(name) for name in self.summary.get("metrics", ())},
        }


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
    for run in found:
        own = run.folder / NAME
        if not own.exists() or own.stat().st_mtime < (run.folder / "summary.json").stat().st_mtime:
            write_page(run.folder)
    kind, start = found[0].kind, page.parent.resolve()
    methods = _by_method(found, best_first=-1 if kind == "accuracy" else 1)
    own = {name: name.replace("_", " ") for run in found for name in run.summary.get("metrics", ())}
    names = (MEASURES if kind == "accuracy" else LOSSES) | own
    table = [_method(name, runs, start, names) for name, runs in methods.items()]
    data = {"score": kind, "names": names, "methods": table}
    parts = {
        "Methods": _table(methods, names, kind, start) + _warnings(found),
        "Runs": _controls(choice("measure", "Compare by", names))
        + plot("dots", "Each run of each method", "One point per run, a line at the mean. Click a point for its page."),
        "Curves": _controls(choice("against", "Against", AGAINST)) + plot("over", "Each method over rounds", BAND),
        "Download": _controls(DOWNLOADS),
    }
    lead = f"{len(methods)} methods, {len(found)} runs"
    heading = title or f"Comparison on {found[0].summary['dataset']}"
    files.write_text(page, document(heading, lead, parts, files.plain(data), ["across.js"]))
    return page


def _controls(content: str) -> Raw:
    return Raw(f'<div class="controls">{content}</div>')


def _by_method(found: Sequence[Found], best_first: int) -> dict[str, list[Found]]:
    """Groups the runs by title, the best mean score first."""
    groups = {title: [run for run in found if run.title == title] for title in {run.title: None for run in found}}
    mean = lambda runs: np.mean([np.nan if run.measures["score"] is None else run.measures["score"] for run in runs])
    return dict(sorted(groups.items(), key=lambda entry: best_first * np.nan_to_num(mean(entry[1]))))


def _read(folders: Iterable[Path]) -> Iterable[Found]:
    """Reads the runs. Titles are the parts of their paths that differ."""
    paths = list(dict.fromkeys(path.resolve() for folder in folders for path in runs_below(Path(folder))))
    root = Path(os.path.commonpath([path.parent if len(paths) == 1 else path for path in paths] or ["/"]))
    for path in paths:
        parts = path.relative_to(root).parts
        trial = bool(parts and TRIAL.match(parts[-1]))
        plots = read(path)[0]
        name = parts[-1] if trial else f"seed-{plots.summary.get('seed', 0)}"
        title = "/".join(parts[:-1] if trial else parts) or str(plots.summary["algorithm"])
        yield Found(path, title, name, plots.summary, plots.rows)


def _method(title: str, runs: Sequence[Found], start: Path, names: Iterable[str]) -> dict[str, Any]:
    """Returns the data that the plots show for a method."""
    rounds = sorted(set.intersection(*({row["round"] for row in run.rows} for run in runs)))
    if len(rounds) > MAX_ROUNDS:
        rounds = [rounds[place] for place in np.linspace(0, len(rounds) - 1, MAX_ROUNDS).round().astype(int)]
    kept = [{row["round"]: row for row in run.rows} for run in runs]
    series = lambda read: [rounded(np.array([read(rows[number]) for number in rounds], float), 5) for rows in kept]
    none = float("nan")
    return {
        "title": title,
        "runs": [run.name for run in runs],
        "links": [_link(run, start) for run in runs],
        "points": {name: [run.measures.get(name) for run in runs] for name in names},
        "rounds": rounds,
        "curves": series(lambda row: none if row.get(runs[0].kind) is None else row[runs[0].kind]),
        "megabytes": np.mean(series(lambda row: (row.get("bytes_down", 0) + row.get("bytes_up", 0)) / 1e6), axis=0),
        "time": np.mean(series(lambda row: row.get("seconds") or 0), axis=0),
    }


def _link(run: Found, start: Path) -> str:
    return quote(os.path.relpath(run.folder / NAME, start).replace(os.sep, "/"))


def _table(groups: dict[str, list[Found]], names: dict[str, str], kind: str, start: Path) -> Raw:
    """Returns a table with one row per method: means over its runs, and deviations if there are several."""
    body = []
    for title, runs in groups.items():
        cells = [title, *(_mean(name, [run.measures.get(name) for run in runs], kind) for name in names)]
        links = ", ".join(f'<a href="{text(_link(run, start))}">{text(run.name)}</a>' for run in runs)
        body.append([*cells, Raw(links)])
    return table(["method", *names.values(), "runs"], body, "sortable", "Means over runs. Click a heading to sort.")


def _mean(name: str, values: Sequence[float | None], kind: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean, spread = float(np.mean(known)), float(np.std(known))
    if name in ("score", "decile") and kind == "accuracy":
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
        values = list(dict.fromkeys(map(of, found)))
        if len(values) > 1:
            said.append(f"The runs differ in {word}: {', '.join(map(str, values))}.")
    return paragraph(" ".join(said))
