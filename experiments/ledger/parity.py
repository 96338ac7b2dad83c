"""Takes a table's figures from folders of `experiments.parity`, one folder for each peer.

The entry has the table's text: rows, called "PEER METHOD" such as "pfllib FedAvg", with the cells that are not figures.
A column of figures has the number of rounds as "of", and as "figure" one of `FIGURES`.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.ledger import added, programs
from experiments.ledger.entries import ROOT, Entry
from pfljax.folder import files

FIGURES = ("difference", "moved", "accuracy", "accuracy_of_peer")
SEED = 0  # of our initial parameters
PACKAGES = {"python": "Python", "torch": "PyTorch"}  # as captions call them


def measured(entry: Entry, folders: Sequence[Path], *, machine: str, root: Path = ROOT) -> Entry:
    """The entry with the figures of some folders in place of its former ones.

    Args:
        entry: The entry.
        folders: Output folders of `experiments.parity`.
        machine: Where the figures were measured.
        root: The repository.

    Raises:
        ValueError: if a row was not compared, or if the folders have different commits or versions, or no commit.
    """
    paths = [folder / "parity.json" for folder in folders]
    books = [files.read_json(path) for path in paths]
    commits = {book["about"]["commit"] for book in books}
    versions = [book["about"]["versions"] for book in books]
    if len(commits) != 1 or None in commits or any(each != versions[0] for each in versions):
        raise ValueError(f"expected folders of one commit and its versions; these have {commits}")
    commit = commits.pop()

    compared = comparisons(books)
    missing = [row.name for row in entry.rows if row.name not in compared]
    if missing:
        raise ValueError(f"no folder compares {', '.join(missing)}")
    runs = []
    for row in entry.rows:
        runs += runs_of(row.name, compared[row.name])

    recorded = added.recorded_programs(entry.methods, [commit], root)
    return dataclasses.replace(
        entry,
        commit=commit[:10],
        published_in=None,
        date=datetime.date.fromtimestamp(max(path.stat().st_mtime for path in paths)).isoformat(),
        machine=machine or added.this_machine(),
        versions={PACKAGES.get(name, name): version for name, version in versions[0].items()},
        runs=runs,
        programs=recorded,
        programs_jax=None if recorded is None else programs.jax_version(),
        repeated=None,
    )


def comparisons(books: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """All comparisons of some folders, by the names of their rows."""
    compared = {}
    for book in books:
        peer = book["about"]["peer"]
        for method, comparison in book["cells"].items():
            compared[f"{peer} {method}"] = comparison
    return compared


def runs_of(row: str, comparison: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A run for each number of rounds; none of a method that could not be compared."""
    runs = []
    for after in comparison.get("rows", []):
        figures = {name: float(f"{after[name]:.6g}") for name in FIGURES}
        place = {"row": row, "column": str(after["rounds"]), "split": None, "seed": SEED}
        runs.append(place | figures)
    return runs
