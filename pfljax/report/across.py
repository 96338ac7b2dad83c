"""The page of a comparison: the runs of some folders side by side, each with a page of its own."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from pfljax.engine import processes
from pfljax.report.markup import Raw, choice, document, paragraph, plot, rounded, score, table, text
from pfljax.report.page import NAME, read, write_page
from pfljax.training import files

TRIAL = re.compile(r"(split-\d+-)?seed-\d+$")  # folders of one method's runs
DEPTH = 3  # of OUT/GROUP/METHOD/seed-N
MAX_ROUNDS = 300  # of a curve

# What methods are compared by, and what their curves are drawn against.
LOSSES = {"score": "test MSE", "megabytes": "MB per client and round", "seconds": "seconds per round"}
MEASURES = {"score": "test accuracy", "decile": "bottom decile"} | {
    name: LOSSES[name] for name in ("megabytes", "seconds")
}
AGAINST = {"rounds": "rounds", "traffic": "MB per client", "time": "seconds of training"}

BAND = (
    "Means over runs, with a band of one standard deviation where there are several. A click in the legend hides a "
    "method."
)
DOWNLOADS = (
    '<button type="button" id="csv-runs">Runs (CSV)</button><button type="button" id="csv-curves">Curves (CSV)</button>'
)


@dataclasses.dataclass(frozen=True)
class Found:
    """A finished run.

    Attributes:
        folder: Its folder.
        title: What it is a run of: the folder above those of seeds and splits.
        name: The run among others of the title.
        summary: As in summary.json.
        rows: As in metrics.jsonl.
    """

    folder: Path
    title: str
    name: str
    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @property
    def kind(self) -> str:
        """What its predictions are scored by."""
        return "accuracy" if self.summary.get("task", "classification") == "classification" else "loss"

    @property
    def measures(self) -> dict[str, float | None]:
        """What it is compared by, of its last round."""
        last = self.summary["last"]
        return {
            "score": last.get(self.kind),
            "decile": last.get("accuracy_bottom_decile"),
            "megabytes": (last["bytes_down"] + last["bytes_up"]) / max(last["round"], 1) / 1e6,
            "seconds": self.summary.get("seconds_per_round"),
        }


def is_run(folder: Path) -> bool:
    """Whether a finished run has left its files in a folder."""
    return (folder / "summary.json").is_file() and (folder / "results.npz").is_file()


def runs_below(folder: Path) -> list[Path]:
    """The folders of finished runs at most `DEPTH` levels below a folder, or the folder itself if it is a run.

    Not deeper: a page is written for each, and a folder that holds a whole disk is a mistake. None of tuning.
    """
    if is_run(folder):
        return [folder]
    found = [path.parent for depth in range(1, DEPTH + 1) for path in folder.glob("*/" * depth + "summary.json")]
    return sorted(path for path in found if is_run(path) and "tuning" not in path.relative_to(folder).parts)


def write_comparison(page: Path, folders: Sequence[Path], title: str = "") -> Path | None:
    """Writes the page of a comparison, and the pages of its runs where they are missing or older than the runs.

    Args:
        page: The file to write.
        folders: Those of runs, and such with runs below them.
        title: The page's heading; by default that of the data.

    Returns:
        The page; None if there are no runs.

    Raises:
        RunError: naming a run whose files are damaged.
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
    names = MEASURES if kind == "accuracy" else LOSSES
    data = {"score": kind, "names": names, "methods": [_method(name, runs, start) for name, runs in methods.items()]}
    parts = {
        "Methods": _table(methods, names, kind, start) + _warnings(found),
        "Runs": _controls(choice("measure", "Compare by", names))
        + plot("dots", "Each run of each method", "A point for each run, a line at their mean; a click opens the run."),
        "Curves": _controls(choice("against", "Against", AGAINST)) + plot("over", "Each method over rounds", BAND),
        "Download": _controls(DOWNLOADS),
    }
    lead = f"methods {len(methods)}, runs {len(found)}"
    heading = title or f"Comparison on {found[0].summary['dataset']}"
    files.write_text(page, document(heading, lead, parts, files.plain(data), ["across.js"]))
    return page


def _controls(content: str) -> Raw:
    return Raw(f'<div class="controls">{content}</div>')


def _by_method(found: Sequence[Found], best_first: int) -> dict[str, list[Found]]:
    """The runs by title, the best mean score first."""
    groups = {title: [run for run in found if run.title == title] for title in {run.title: None for run in found}}
    mean = lambda runs: np.mean([np.nan if run.measures["score"] is None else run.measures["score"] for run in runs])
    return dict(sorted(groups.items(), key=lambda entry: best_first * np.nan_to_num(mean(entry[1]))))


def _read(folders: Iterable[Path]) -> Iterable[Found]:
    """The runs, titled by what tells their folders apart."""
    paths = list(dict.fromkeys(path.resolve() for folder in folders for path in runs_below(Path(folder))))
    root = Path(os.path.commonpath([path.parent if len(paths) == 1 else path for path in paths] or ["/"]))
    for path in paths:
        parts = path.relative_to(root).parts
        trial = bool(parts and TRIAL.match(parts[-1]))
        plots = read(path)[0]
        name = parts[-1] if trial else f"seed-{plots.summary.get('seed', 0)}"
        title = "/".join(parts[:-1] if trial else parts) or str(plots.summary["algorithm"])
        yield Found(path, title, name, plots.summary, plots.rows)


def _method(title: str, runs: Sequence[Found], start: Path) -> dict[str, Any]:
    """What the plots show of a method."""
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
        "points": {name: [run.measures[name] for run in runs] for name in MEASURES},
        "rounds": rounds,
        "curves": series(lambda row: none if row.get(runs[0].kind) is None else row[runs[0].kind]),
        "megabytes": np.mean(series(lambda row: (row.get("bytes_down", 0) + row.get("bytes_up", 0)) / 1e6), axis=0),
        "time": np.mean(series(lambda row: row.get("seconds") or 0), axis=0),
    }


def _link(run: Found, start: Path) -> str:
    return quote(os.path.relpath(run.folder / NAME, start).replace(os.sep, "/"))


def _table(groups: dict[str, list[Found]], names: dict[str, str], kind: str, start: Path) -> Raw:
    """A line for each method: means over its runs, with deviations where there are several."""
    body = []
    for title, runs in groups.items():
        cells = [title, *(_mean(name, [run.measures[name] for run in runs], kind) for name in names)]
        links = ", ".join(f'<a href="{text(_link(run, start))}">{text(run.name)}</a>' for run in runs)
        body.append([*cells, Raw(links)])
    return table(["method", *names.values(), "runs"], body, "sortable", "Means over runs; a click on a heading sorts.")


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
    """In which ways the runs cannot be compared as they are."""
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
