"""The page of a comparison. It shows several runs and links to each run's own page."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from pfljax.exchange import processes
from pfljax.folder import files
from pfljax.report.comparisons import method_curves, method_points
from pfljax.report.markup import Raw, cells, choice, controls, document, downloads, paragraph, plot, table, text
from pfljax.report.page import NAME, write_page
from pfljax.report.picture import Axis, plain
from pfljax.report.pictures import axis_of, evenly
from pfljax.report.run_data import RunData, Score

TRIAL = re.compile(r"(split-\d+-)?seed-\d+$")  # names of the folders of one method's runs
DEPTH = 3  # OUT/GROUP/METHOD/seed-N
MAX_ROUNDS = 300  # per curve

SCORES = ("score", "decile")  # measures of clients' scores
COSTS = {"megabytes": "MB per client and round", "seconds": "seconds per round"}
AGAINST = {"rounds": "rounds", "megabytes": "MB received and sent per client", "seconds": "seconds of training"}
POINTS = "One point per run, a line at the mean. Click a point for its page."
BAND = (
    "Mean over runs; the band is one standard deviation if there are several runs. Click a method in the legend to "
    "hide it."
)
DOWNLOADS = {"runs": "Runs (CSV)", "curves": "Curves (CSV)"}


class Method(NamedTuple):
    """The finished runs of one method.

    Attributes:
        title: The folder above those of seeds and splits.
        runs: The runs.
        names: Their names within the title.
        links: Addresses of their pages.
        measures: Measures of their last rounds, by name; NaN if unknown. Shape (runs,).
        curves: Rounds that all of them evaluated, and score, megabytes and seconds up to them. Shape (runs, T).
    """

    title: str
    runs: Sequence[RunData]
    names: Sequence[str]
    links: Sequence[str]
    measures: Mapping[str, np.ndarray]
    curves: Mapping[str, np.ndarray]


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
    for folder, *_ in found:
        own = folder / NAME
        if not own.exists() or own.stat().st_mtime < (folder / "summary.json").stat().st_mtime:
            write_page(folder)
    methods, runs = _methods(found, page.parent.resolve()), [run for *_, run in found]
    score, dataset = runs[0].score, runs[0].summary["dataset"]
    own = {name: name.replace("_", " ") for run in runs for name in run.summary.get("metrics", ())}
    names = {"score": score.label} | ({"decile": "bottom decile"} if score.percent else {}) | own | COSTS
    texts = {link: f"{m.title}, {name}" for m in methods for link, name in zip(m.links, m.names, strict=True)}
    data = {"panels": _panels(methods, names, score), "texts": texts, "csv": _csv(methods, names, score)}
    points = plot("dots", "Each run of each method", POINTS, f"{max(14, 6 + 2 * len(methods))}rem")
    curves = plot("over", "Each method over rounds", BAND)
    parts = {
        "Methods": _table(methods, names, score) + _warnings(runs),
        "Runs": controls(choice("measure", "Compare by", names, "dots")) + points,
        "Curves": controls(choice("against", "Against", AGAINST, "over")) + curves,
        "Download": downloads(DOWNLOADS),
    }
    lead = f"{len(methods)} methods, {len(found)} runs"
    files.write_text(page, document(title or f"Comparison on {dataset}", lead, parts, files.plain(data)))
    return page


def _read(folders: Iterable[Path]) -> Iterable[tuple[Path, str, str, RunData]]:
    """Reads the runs: folder, title, name, content. Titles are the parts of their paths that differ."""
    paths = list(dict.fromkeys(path.resolve() for folder in folders for path in runs_below(Path(folder))))
    root = Path(os.path.commonpath([path.parent if len(paths) == 1 else path for path in paths] or ["/"]))
    for path in paths:
        parts = path.relative_to(root).parts
        trial, run = bool(parts and TRIAL.match(parts[-1])), RunData.read(path)
        name = parts[-1] if trial else f"seed-{run.summary.get('seed', 0)}"
        yield path, "/".join(parts[:-1] if trial else parts) or str(run.summary["algorithm"]), name, run


def _methods(found: Sequence[tuple[Path, str, str, RunData]], start: Path) -> list[Method]:
    """Groups the runs by title, the best mean score first. Links lead from the folder `start`."""
    link = lambda folder: quote(os.path.relpath(folder / NAME, start).replace(os.sep, "/"))
    methods = []
    for title in dict.fromkeys(title for _, title, *_ in found):
        paths, _, names, runs = zip(*(entry for entry in found if entry[1] == title), strict=True)
        methods.append(Method(title, runs, names, list(map(link, paths)), _measures(runs), _curves(runs)))
    return sorted(methods, key=lambda m: -m.runs[0].score.sign * np.nan_to_num(np.mean(m.measures["score"])))


def _measures(runs: Sequence[RunData]) -> dict[str, np.ndarray]:
    last = [run.summary["last"] for run in runs]
    megabytes = [(row["bytes_down"] + row["bytes_up"]) / max(row["round"], 1) / 1e6 for row in last]
    measures = {
        "score": [row.get(runs[0].score.name) for row in last],
        "decile": [row.get("accuracy_bottom_decile") for row in last],
        "megabytes": megabytes,
        "seconds": [run.summary.get("seconds_per_round") for run in runs],
    } | {name: [row.get(name) for row in last] for run in runs for name in run.summary.get("metrics", ())}
    return {name: np.array(values, float) for name, values in measures.items()}


def _curves(runs: Sequence[RunData]) -> dict[str, np.ndarray]:
    rounds = sorted(set.intersection(*({row["round"] for row in run.rows} for run in runs)))
    rounds = [rounds[place] for place in evenly(len(rounds), MAX_ROUNDS)]
    kept = [{row["round"]: row for row in run.rows} for run in runs]
    series = lambda read: np.array([[read(rows[number]) for number in rounds] for rows in kept], float)
    return {
        "rounds": series(lambda row: row["round"]),
        "score": series(lambda row: row.get(runs[0].score.name)),
        "megabytes": series(lambda row: (row.get("bytes_down", 0) + row.get("bytes_up", 0)) / 1e6),
        "seconds": series(lambda row: row.get("seconds") or 0),
    }


def _panels(methods: Sequence[Method], names: Mapping[str, str], score: Score) -> dict[str, dict[str, Any]]:
    """Returns the panels of points by measure, and of curves by horizontal axis."""
    links, dots, over = {method.title: method.links for method in methods}, {}, {}
    for name, label in names.items():
        axis = Axis(label, percent=score.percent and name in SCORES)
        dots[name] = plain(method_points({method.title: method.measures[name] for method in methods}, axis, links))
    for name, label in AGAINST.items():
        mean = {m.title: (m.curves[name].mean(axis=0), m.curves["score"]) for m in methods}
        curves = {title: (x, values.mean(axis=0), values.std(axis=0)) for title, (x, values) in mean.items()}
        over[name] = plain(method_curves(curves, Axis(label), axis_of(score)))
    return {"dots": dots, "over": over}


def _csv(methods: Sequence[Method], names: Mapping[str, str], score: Score) -> dict[str, list]:
    """Returns the tables for downloading."""
    runs, curves = [], []
    for method in methods:
        for number, name in enumerate(method.names):
            run = {"method": method.title, "run": name}
            runs.append(run | {label: method.measures[key][number] for key, label in names.items()})
            points = zip(method.curves["rounds"][number].astype(int), method.curves["score"][number], strict=True)
            curves += [run | {"round": at, score.name: value} for at, value in points]
    return {"runs": cells(runs), "curves": cells(curves)}


def _table(methods: Sequence[Method], names: Mapping[str, str], score: Score) -> Raw:
    """Returns a table with one row per method: means over its runs, and deviations if there are several."""
    body = []
    for method in methods:
        links = zip(method.links, method.names, strict=True)
        addresses = ", ".join(f'<a href="{text(link)}">{text(name)}</a>' for link, name in links)
        body.append([method.title, *(_mean(name, method.measures[name], score) for name in names), Raw(addresses)])
    return table(["method", *names.values(), "runs"], body, "sortable", "Means over runs. Click a heading to sort.")


def _mean(name: str, values: np.ndarray, score: Score) -> str:
    known = values[np.isfinite(values)]
    if not len(known):
        return "-"
    mean, spread = known.mean(), known.std()
    if name not in SCORES:
        return f"{mean:.3g}"
    scale, digits, unit = (100, 1, " %") if score.percent else (1, 4, "")
    return f"{scale * mean:.{digits}f}" + f" ± {scale * spread:.{digits}f}" * (len(known) > 1) + unit


def _warnings(runs: Sequence[RunData]) -> str:
    """Returns a paragraph on differences that make the runs not directly comparable."""
    said = []
    for word, of in (
        ("data", lambda run: run.summary["dataset"]),
        ("the number of clients", lambda run: run.summary["num_clients"]),
        ("the last round", lambda run: run.summary["last"]["round"]),
    ):
        values = list(dict.fromkeys(map(of, runs)))
        if len(values) > 1:
            said.append(f"The runs differ in {word}: {', '.join(map(str, values))}.")
    return paragraph(" ".join(said))
