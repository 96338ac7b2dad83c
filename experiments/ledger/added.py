"""Makes an entry of the ledger from the folder of a finished experiment, with the figures of every run."""

from __future__ import annotations

import csv
import datetime
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.ledger import programs
from experiments.ledger.commits import changed
from experiments.ledger.entries import PARTITION, ROOT, Column, Entry, Row, made, text
from pfljax.algorithms import METHODS
from pfljax.cli.names import current
from pfljax.folder import files, former

TRIAL = re.compile(r"(?:split-(\d+)-)?seed-(\d+)")
FIGURES = ("accuracy", "accuracy_mean", "accuracy_bottom_decile", "accuracy_min", "loss")
HEADS = {
    "accuracy": "test accuracy, %",
    "accuracy_mean": "test accuracy, %",
    "accuracy_bottom_decile": "bottom decile, %",
    "accuracy_unseen": "unseen clients, %",
    "learning_rate": "rate",
    "megabytes": "MB per client and round",
}


class Runs(NamedTuple):
    """Finished runs.

    Attributes:
        runs: Their figures, as an entry has them, oldest first.
        configs: Their settings.
        commits: Their commits, without repetition.
        paths: Their summaries' files.
    """

    runs: list[dict[str, Any]]
    configs: list[dict[str, Any]]
    commits: list[str]
    paths: list[Path]


def read_runs(folders: Sequence[Path], *, row_first: bool = False) -> Runs:
    """Reads the finished runs in some folders; see `entry_of`.

    Raises:
        ValueError: if there are none.
    """
    summaries = sorted(
        (path for folder in folders for path in folder.rglob("summary.json")), key=os.path.getmtime
    )
    paths = [path for path in summaries if TRIAL.fullmatch(path.parent.name)]
    if not paths:
        raise ValueError(
            f"no finished runs (split-N-seed-M or seed-N) in {', '.join(map(str, folders))}"
        )
    configs = [former.read_config(path.parent / "config.json") for path in paths]
    runs = []
    for path, config in zip(paths, configs, strict=True):
        row, column = names_of(path, folders, row_first)
        runs.append(run_of(path, config, row, column))
    commits = list(dict.fromkeys(filter(None, (config["git_commit"] for config in configs))))
    return Runs(runs, configs, commits, paths)


def entry_of(
    folders: Sequence[Path],
    shown: Callable[[Sequence[dict]], tuple[list[Column], list[Row]]],
    *,
    title: str = "",
    machine: str = "",
    commit: str | None = None,
    called: str = "",
    row_first: bool = False,
    root: Path = ROOT,
) -> Entry:
    """The entry of the runs in some folders. A run's folder is COLUMN/ROW/split-N-seed-M or ROW/seed-M.

    Args:
        folders: Output folders of experiments; their runs belong to one table.
        shown: Runs -> the table's columns and rows: `as_measured` or `as_written` with its other arguments.
        title: What the table shows.
        machine: Where the runs were made; by default, this machine.
        commit: The commit; by default, that of the oldest run.
        called: The command; by default, what the runs say. Runs made in Python do not say it.
        row_first: Whether run folders are ROW/COLUMN/... instead.
        root: The repository.

    Raises:
        ValueError: if there are no runs, or if their commit is not known.
    """
    runs, configs, commits, paths = read_runs(folders, row_first=row_first)
    if not (commit := commit or next(iter(commits), None)):
        raise ValueError("the runs do not say their commit; accepted: --commit")
    if not called and not all("command" in config for config in configs):
        raise ValueError(
            "the runs were made in Python and do not say their command; accepted: --command"
        )
    columns, rows = shown(runs)
    methods = list(dict.fromkeys(settings_of(config)["method"] for config in configs))
    names = [*methods, *partitions_of(configs)]
    recorded = recorded_programs(names, commits or [commit], root)
    raw = Entry(
        title=title or folders[0].name,
        command=called or "; ".join(dict.fromkeys(plain(config["command"]) for config in configs)),
        commit=commit[:10],
        published_in=None,
        date=datetime.date.fromtimestamp(paths[-1].stat().st_mtime).isoformat(),
        machine=machine or this_machine(),
        versions={"Python": configs[0]["versions"]["python"], "jax": configs[0]["versions"]["jax"]},
        methods=methods,
        columns=columns,
        rows=rows,
        runs=runs,
        programs=recorded,
        programs_jax=None if recorded is None else programs.jax_version(),
    )
    return made(json.loads(text(raw)))


def settings_of(config: dict) -> dict[str, Any]:
    """A run's settings by their present names, whether a command or Python made it."""
    return current(config.get("flags") or config["settings"])


def partitions_of(configs: Iterable[dict]) -> list[str]:
    """The partitions of runs, as programs are named by them; none of runs made in Python."""
    names = [settings_of(config).get("partition") for config in configs]
    return [f"{PARTITION}{name}" for name in dict.fromkeys(names) if name]


def recorded_programs(
    names: Iterable[str], commits: Iterable[str], root: Path
) -> dict[str, str] | None:
    """Digests of what methods and partitions compute, by name; None if that is not what the commits computed.

    The digests are those of the code as it is now, so that it must be the code of the commits.
    """
    for commit in commits:
        if changed(root, commit) != []:
            return None
    return programs.digests(names)


def names_of(path: Path, folders: Iterable[Path], row_first: bool) -> tuple[str, str]:
    """Row and column of a run, from its folder."""
    folder = next(folder for folder in folders if folder in path.parents)
    parts = path.parent.parent.relative_to(folder).parts or (folder.name,)
    row, rest = (parts[0], parts[1:]) if row_first else (parts[-1], parts[:-1])
    return row, "/".join(rest)


def run_of(path: Path, config: dict, row: str, column: str) -> dict[str, Any]:
    """A run's figures."""
    summary = files.read_json(path)
    last = summary["last"]
    found = TRIAL.fullmatch(path.parent.name)
    assert found
    traffic = (last.get("bytes_down") or 0) + (last.get("bytes_up") or 0)
    figures = {name: last.get(name) for name in FIGURES} | {
        "accuracy_unseen": (summary.get("unseen") or {}).get("accuracy"),
        "learning_rate": settings_of(config).get("learning_rate"),
        "megabytes": traffic / last["round"] / 1e6 if last["round"] else 0,
    }
    numbers = {name: float(f"{value:.6g}") for name, value in figures.items() if value is not None}
    split = None if found[1] is None else int(found[1])
    return {"row": row, "column": column, "split": split, "seed": int(found[2]), **numbers}


def as_measured(
    runs: Sequence[dict],
    *,
    figures: Sequence[str] = ("accuracy",),
    lead: str | None = None,
    paper: str | None = None,
) -> tuple[list[Column], list[Row]]:
    """A column for each column of the runs and figure, and the rows of the runs.

    Args:
        runs: The runs.
        figures: Figures of the runs.
        lead: The row whose lead over the others is shown.
        paper: Where experiments has the paper's values (see `Column`); {column} stands for a column's name.
    """
    names = dict.fromkeys(run["column"] for run in runs)
    columns = [
        column_of(name, figure, figures, lead, paper) for name in names for figure in figures
    ]
    return columns, [Row(name, titled(name)) for name in dict.fromkeys(run["row"] for run in runs)]


def as_written(runs: Sequence[dict], *, path: Path) -> tuple[list[Column], list[Row]]:
    """The columns and rows of an experiment's table.csv, whose ± are sample deviations over the runs' trials.

    The ± of a column of the paper's values is left out, because it is not ours.
    """
    (_, *heads), *body = csv.reader(path.read_text(encoding="utf-8").splitlines())
    n = len({(run["split"], run["seed"]) for run in runs})
    columns: list[Column] = []
    for head in heads:
        same = sum(column.head.partition(" #")[0] == head for column in columns)
        columns.append(Column(f"{head} #{same + 1}" if same else head, n=n if n > 1 else 0))
    theirs = [head.startswith("paper") for head in heads]
    once = len({line[0] for line in body}) == len(body)
    rows = []
    for title, *cells in body:
        own = [
            re.sub(r" ± [\d.]+", "", cell) if other else cell
            for cell, other in zip(cells, theirs, strict=True)
        ]
        rows.append(Row(title if once else ", ".join([title, *cells[:2]]), title, own))
    return columns, rows


def column_of(
    name: str, figure: str, figures: Sequence[str], lead: str | None, paper: str | None
) -> Column:
    """A column of the table; only the first figure has a lead and the paper's values."""
    first = figure == figures[0]
    what = HEADS.get(figure, figure.replace("_", " "))
    head = re.sub(r"^D(?=\d+$)", "D=", name) if len(figures) == 1 or not name else f"{name}, {what}"
    theirs = paper.replace("{column}", name) if paper and first else None
    return Column(head or what, of=name, figure=figure, lead=lead if first else None, paper=theirs)


def titled(row: str) -> str:
    """A row's title: a method's own, or the row's name."""
    return re.split(r" \(|,", METHODS[row].info.title)[0] if row in METHODS else row


def plain(command: str) -> str:
    """A command without its output folder and without the folders of its files."""
    command = command.replace("python -m pfljax.cli ", "pfljax ")
    return re.sub(r"(--\w+=)\S*/", r"\1", re.sub(r" --out[= ]\S+", "", command))


def this_machine() -> str:
    """The number of cores and the processor."""
    about = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", about.read_text()) if about.exists() else None
    return f"{os.cpu_count()} CPU cores ({named[1] if named else platform.machine()})"
