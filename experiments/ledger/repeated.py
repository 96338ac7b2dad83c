"""Repeated runs: whether a table's methods still compute what they did, when nobody recorded its programs.

Some runs of a table are made again with today's code. If they give the recorded figures, today's programs are the
table's. Machines round differently, so that single runs may end with another number of right answers.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.ledger import added, programs
from experiments.ledger.entries import PARTITION, ROOT, Entry

Trial = tuple[str, str, int | None, int]  # a run's row, column, split and seed

EQUAL = 2e-5  # relative; figures of runs have six digits
LEAST = 0.8  # share of the repeated runs with the recorded figures
MOST_POINTS = 0.02  # by which a figure of any other may differ: accuracies are between 0 and 1


def recorded(
    entry: Entry, folders: Sequence[Path], *, row_first: bool = False, root: Path = ROOT
) -> Entry:
    """The entry with what was repeated, and the programs of the code as it is now.

    Args:
        entry: The entry, with its runs.
        folders: Output folders of the repeated runs.
        row_first: Whether run folders are ROW/COLUMN instead of COLUMN/ROW.
        root: The repository.

    Raises:
        ValueError: if a row or a column of the table has no repeated run, if figures differ, or if the code is not that
            of the repeated runs' commit.
    """
    figures = list(dict.fromkeys(column.figure for column in entry.columns if column.figure))
    before = {trial_of(run): run for run in entry.runs or []}
    repeated = added.read_runs(folders, row_first=row_first)
    after = {trial_of(run): run for run in repeated.runs if trial_of(run) in before}
    if not figures or not after:
        raise ValueError(
            "no repeated run has the row, column, split and seed of a run of the entry"
        )

    shown_columns = {column.of for column in entry.columns if column.figure}
    missing_rows = {row.name for row in entry.rows} - {trial[0] for trial in after}
    missing_columns = shown_columns - {trial[1] for trial in after}
    if missing_rows or missing_columns:
        missing = ", ".join(sorted(missing_rows | missing_columns))
        raise ValueError(f"no run was repeated of {missing}")

    differences = {trial: difference(before[trial], run, figures) for trial, run in after.items()}
    num_equal = sum(not points for points in differences.values())
    furthest = max(differences, key=lambda trial: differences[trial])
    largest = differences[furthest]
    if num_equal < LEAST * len(after) or largest > MOST_POINTS:
        text = f"{num_equal} of {len(after)} repeated runs are equal"
        raise ValueError(f"{text}; {furthest} differs by {100 * largest:.2f} points")

    names = [*entry.methods, *added.partitions_of(repeated.configs)]
    digests = added.recorded_programs(names, repeated.commits, root)
    if digests is None:
        raise ValueError("the code is not that of the repeated runs' commit")
    methods = {name for name in digests if not name.startswith(PARTITION)}
    if methods != set(entry.methods):
        raise ValueError(f"no digest of {', '.join(sorted(set(entry.methods) - methods))}")

    text = f"{len(after)} of {len(before)} runs at commit {repeated.commits[0][:10]}"
    text += f" ({datetime.date.today().isoformat()}), "
    text += "all with the same figures" if num_equal == len(after) else f"{num_equal} equal"
    if largest:
        text += f", the others differ by at most {100 * largest:.2g} points"
    return dataclasses.replace(
        entry, programs=digests, programs_jax=programs.jax_version(), repeated=text
    )


def trial_of(run: dict[str, Any]) -> Trial:
    """What identifies a run within a table."""
    return run["row"], run["column"], run["split"], run["seed"]


def difference(before: dict[str, Any], after: dict[str, Any], figures: Sequence[str]) -> float:
    """The largest difference of two runs' figures; 0 if all are equal to rounding."""
    largest = 0.0
    for figure in figures:
        if figure not in before and figure not in after:
            continue
        first = before[figure]
        second = after[figure]
        if abs(first - second) > EQUAL * max(abs(first), abs(second)):
            largest = max(largest, abs(first - second))
    return largest
