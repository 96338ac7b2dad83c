"""Cells of a comparison: one run per folder. Finished cells with intact files are reused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pfljax.engine import processes
from pfljax.training import files, folders, manifest
from pfljax.training.experiment import Experiment

SUMMARY, ROWS = "summary.json", "metrics.jsonl"
LOST = folders.LOST  # comparisons pass on lines that contain this text


@dataclasses.dataclass(frozen=True)
class Cell:
    """The scores of one method with one seed.

    Attributes:
        summary: The content of summary.json.
        rows: One entry per evaluated round, as in metrics.jsonl.
    """

    summary: dict
    rows: list[dict]

    @classmethod
    def read(cls, folder: Path) -> Cell:
        """Reads the cell of a finished run from its folder."""
        return cls(files.read_json(folder / SUMMARY), files.read_jsonl(folder / ROWS))


def over_rounds(rows: Sequence[Sequence[Mapping]], score: str) -> tuple[list[int], np.ndarray]:
    """Returns the rounds (T,) in which all cells were evaluated, and their scores (cells, T).

    Args:
        rows: The metrics.jsonl rows of each cell.
        score: Name of the score in metrics.jsonl.
    """
    of_round = [{row["round"]: row[score] for row in each} for each in rows]
    rounds = sorted(set.intersection(*map(set, of_round)))
    return rounds, np.array([[scores[number] for number in rounds] for scores in of_round])


def check(folder: Path, experiment: Experiment, rounds: int) -> None:
    """Checks that a cell can be run or resumed in its folder.

    Raises:
        ArgumentError: if the folder contains something else, or a run with other settings or more rounds.
    """
    processes.first(functools.partial(folders.check, folder, experiment, "if_possible"))
    folders.Folders([], [folder], "if_possible").check_rounds(rounds)


def damage(folder: Path) -> str:
    """Describes what is wrong with the files of a finished cell; "" if they are intact or the cell is not finished."""
    kept = manifest.read(folder)
    if kept:
        return (kept.damaged(folder) or "") if SUMMARY in kept.files else ""
    if not (folder / SUMMARY).exists():
        return ""
    for name in manifest.RECORDS:  # the manifest is missing or damaged
        try:
            {".json": files.read_json, ".npz": files.read_npz}.get(Path(name).suffix, files.read_jsonl)(folder / name)
        except Exception:  # a truncated file can make its reader raise anything
            return f"{name} cannot be read"
    cell = Cell.read(folder)
    return "" if cell.rows and cell.rows[-1]["round"] == cell.summary["last"]["round"] else f"{ROWS} lacks rows"


def finished(folder: Path, experiment: Experiment, rounds: int) -> tuple[Cell | None, str]:
    """Returns the finished cell, or None if it must be run; and what is wrong with its files, if that is the reason.

    Raises:
        ArgumentError: see `check`.
    """
    check(folder, experiment, rounds)
    wrong = damage(folder)
    if wrong or not (folder / SUMMARY).exists():
        return None, wrong
    cell = Cell.read(folder)
    return (cell if cell.summary["last"]["round"] == rounds else None), ""
