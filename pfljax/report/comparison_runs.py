"""The runs of a comparison, by method, as its page needs them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from pfljax.evaluation import gains, rounding, statistics
from pfljax.evaluation.statistics import Trial
from pfljax.folder import files, former, planned
from pfljax.report.page import NAME
from pfljax.report.run_data import BYTES, RunData, Score, evenly, measures, over_rounds
from pfljax.report.run_folders import TRIAL, runs_below, title_of

MAX_ROUNDS = 300  # per curve
DAMAGE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
)  # that readers of bad files raise


class FolderRun(NamedTuple):
    """A run, and where it is.

    Attributes:
        folder: Its folder.
        title: The part of its path that differs between methods.
        name: Its name within the title.
        run: Its content.
    """

    folder: Path
    title: str
    name: str
    run: RunData


class Method(NamedTuple):
    """The finished runs of one method.

    Attributes:
        title: The folder above those of seeds and splits.
        runs: The runs.
        names: Their names within the title.
        links: Addresses of their pages.
        trials: Their seeds and splits.
        measures: Measures of their last rounds, by name; NaN if unknown. Shape (runs,).
        curves: Rounds that all of them evaluated, and score, megabytes and seconds up to them. Shape (runs, T).
        position: Its position in the comparison's table, which decides its color; 0 without a table.
        tuned: The values that tuning chose, in words.
    """

    title: str
    runs: Sequence[RunData]
    names: Sequence[str]
    links: Sequence[str]
    trials: Sequence[Trial]
    measures: Mapping[str, np.ndarray]
    curves: Mapping[str, np.ndarray]
    position: int
    tuned: str

    @property
    def group(self) -> str:
        """The folder above the method's. Methods of one group are compared."""
        return self.title.rpartition("/")[0]

    @property
    def name(self) -> str:
        """The method's own folder."""
        return self.title.rpartition("/")[2]

    @property
    def client_scores(self) -> dict[Trial, np.ndarray]:
        """Clients' last scores (K,) by trial."""
        return {trial: run.test[-1] for trial, run in zip(self.trials, self.runs, strict=True)}

    @property
    def scores(self) -> dict[Trial, float]:
        """Scores by trial."""
        return dict(zip(self.trials, self.measures["score"].tolist(), strict=True))


class Pair(NamedTuple):
    """A method, the reference of its group, and the clients that both have.

    Attributes:
        method: The method.
        reference: The reference.
        scores: Scores of single clients with the reference and with the method. Shape (n, 2).
    """

    method: Method
    reference: Method
    scores: np.ndarray


# Reading


def read_runs(folders: Iterable[Path]) -> list[FolderRun]:
    """Reads the runs in or below some folders. Their titles are the parts of their paths that differ."""
    paths: dict[Path, None] = {}
    for folder in folders:
        for path in study_runs(Path(folder)):
            paths[path.resolve()] = None
    if not paths:
        return []

    # A single run's title is its own folder.
    tops = [path.parent for path in paths] if len(paths) == 1 else list(paths)
    root = Path(os.path.commonpath(tops))
    runs = []
    for path in paths:
        title, name = title_of(path, root)
        run = RunData.read(path)
        title = title or str(run.summary["method"])
        name = name or f"seed-{run.summary.get('seed', 0)}"
        runs.append(FolderRun(path, title, name, run))
    return runs


def study_runs(folder: Path) -> list[Path]:
    """Returns the runs below a folder; of a study's, those of its present table, without methods that failed."""
    runs = runs_below(folder)
    listed = {path.resolve() for path in planned.read(folder)}
    if listed:
        runs = [run for run in runs if run.resolve() in listed]
    failed = {(folder / name).resolve() for name in failures(folder)}
    return [run for run in runs if run.resolve().parent not in failed]


def failures(folder: Path) -> dict[str, str]:
    """Returns why methods of a study's table failed, by title; {} without a table."""
    try:
        rows = former.read_table(folder / "table.json")
        return {str(row["method"]): str(row["failed"]) for row in rows if row.get("failed")}
    except DAMAGE:
        return {}


def client_rows(folder: Path) -> list[Mapping[str, Any]]:
    """Returns the rows of a study's by_client.json; [] without one."""
    try:
        content = files.read_json(folder / "by_client.json")
        rows = content["rows"] if isinstance(content, Mapping) else content
        return [row for row in rows if isinstance(row["scores"], Mapping) and "client" in row]
    except DAMAGE:
        return []


def group_runs(runs: Sequence[FolderRun], start: Path) -> list[Method]:
    """Groups the runs by title, the best mean score first. Links lead from the folder `start`."""
    by_title: dict[str, list[FolderRun]] = {}
    for run in runs:
        by_title.setdefault(run.title, []).append(run)

    methods = []
    for title, members in by_title.items():
        contents = [member.run for member in members]
        position, tuned = listing(members[0].folder.parent)
        method = Method(
            title=title,
            runs=contents,
            names=[member.name for member in members],
            links=[address(member.folder, start) for member in members],
            trials=[trial_of(member.name) for member in members],
            measures=measures([content.summary for content in contents]),
            curves=curves_of(contents),
            position=position,
            tuned=tuned,
        )
        methods.append(method)

    # Methods with equal scores stay in the order of their titles.
    signed_means = []
    for method in methods:
        mean = np.nan_to_num(np.mean(method.measures["score"]))
        signed_means.append(method.runs[0].score.sign * float(mean))
    descending = np.argsort(-rounding.comparable(signed_means), kind="stable")
    return [methods[position] for position in descending]


def address(folder: Path, start: Path) -> str:
    """Returns the address of a run's page, seen from a folder."""
    path = os.path.relpath(folder / NAME, start)
    return quote(path.replace(os.sep, "/"))


def listing(folder: Path) -> tuple[int, str]:
    """Returns the position of a method's folder in its comparison's table.json, and the values that tuning chose.

    Without a table, they are 0 and "".
    """
    try:
        rows = former.read_table(folder.parent / "table.json")
        for position, row in enumerate(rows):
            if row["method"] == folder.name:
                return position, str(row.get("tuned") or "")
    except DAMAGE:
        pass
    return 0, ""


def trial_of(name: str) -> Trial:
    """Returns seed and split of a run, from its name."""
    match = TRIAL.match(name)
    assert match is not None
    split, seed = match.groups()
    return Trial(int(seed), None if split is None else int(split))


def curves_of(runs: Sequence[RunData]) -> dict[str, np.ndarray]:
    """Returns the rounds (runs, T) that all runs evaluated, and what they had reached and spent in them."""
    histories = [run.rows for run in runs]
    rounds, scores = over_rounds(histories, runs[0].score.name)
    _, seconds = over_rounds(histories, "seconds")
    _, simulated = over_rounds(histories, "simulated_seconds")
    num_bytes = np.zeros_like(scores)
    for name in BYTES:
        _, moved = over_rounds(histories, name)
        num_bytes += np.nan_to_num(moved)

    curves = {
        "rounds": np.tile(rounds, (len(runs), 1)),
        "score": scores,
        "seconds": np.nan_to_num(seconds),
        "megabytes": num_bytes / 1e6,
    }
    if np.isfinite(simulated).all():
        curves["simulated"] = simulated
    shown = evenly(len(rounds), MAX_ROUNDS)
    return {name: values[:, shown] for name, values in curves.items()}


# Comparing


def standings_of(
    methods: Sequence[Method], score: Score, reference: str
) -> dict[str, dict[str, Any]]:
    """Returns intervals, ranks and differences by title, within each group."""
    entries = {}
    for group in dict.fromkeys(method.group for method in methods):
        scores = {method.title: method.scores for method in methods if method.group == group}
        title = f"{group}/{reference}" if group else reference
        entries |= statistics.standings(scores, score.sign, title)
    return entries


def pairs_of(methods: Sequence[Method], reference: str) -> Iterator[Pair]:
    """Yields each method that has clients in common with the reference of its group."""
    references = {method.group: method for method in methods if method.name == reference}
    for method in methods:
        other = references.get(method.group, method)
        scores = gains.pairs(method.client_scores, other.client_scores)
        if other is not method and len(scores):
            yield Pair(method, other, scores)
