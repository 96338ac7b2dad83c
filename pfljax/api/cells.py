"""Cells of a comparison: runs in folders of their own, of which those that are finished and whole are kept."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pfljax.engine import processes
from pfljax.training import files, folders, manifest

SUMMARY, ROWS = "summary.json", "metrics.jsonl"
LOST = folders.LOST  # in a line of a run that a table passes on


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
        """The cell that a finished run has left in its folder."""
        return cls(files.read_json(folder / SUMMARY), files.read_jsonl(folder / ROWS))


def over_rounds(rows: Sequence[Sequence[Mapping]], score: str) -> tuple[list[int], np.ndarray]:
    """A score over rounds, of several cells: the rounds (T,) in which all were evaluated, and the scores (cells, T).

    Args:
        rows: Each cell's rows of metrics.jsonl.
        score: Its name there.
    """
    of_round = [{row["round"]: row[score] for row in each} for each in rows]
    rounds = sorted(set.intersection(*map(set, of_round)))
    return rounds, np.array([[scores[number] for number in rounds] for scores in of_round])


def check(folder: Path, config: dict, rounds: int) -> None:
    """Sees to it that a cell can be run, or gone on with, in its folder.

    Raises:
        ArgumentError: if the folder holds something else, a run with other settings, or one of more rounds.
    """
    processes.first(functools.partial(folders.check, folder, config, "if_possible"))
    folders.Folders([], [folder], "if_possible").check_rounds(rounds)


def damage(folder: Path) -> str:
    """What is wrong with the files of a cell that was finished once; "" for a whole cell, and for any other."""
    kept = manifest.read(folder)
    if kept:
        return (kept.damaged(folder) or "") if SUMMARY in kept.files else ""
    if not (folder / SUMMARY).exists():
        return ""
    for name in manifest.RECORDS:  # there is no manifest, or it is damaged itself
        try:
            {".json": files.read_json, ".npz": files.read_npz}.get(Path(name).suffix, files.read_jsonl)(folder / name)
        except Exception:  # whatever a torn file makes its reader raise
            return f"{name} cannot be read"
    cell = Cell.read(folder)
    return "" if cell.rows and cell.rows[-1]["round"] == cell.summary["last"]["round"] else f"{ROWS} lacks rows"


def finished(folder: Path, config: dict, rounds: int) -> tuple[Cell | None, str]:
    """The cell, unless it is to be run; and what is wrong with its files, if that is why.

    Raises:
        ArgumentError: as `check`.
    """
    check(folder, config, rounds)
    wrong = damage(folder)
    if wrong or not (folder / SUMMARY).exists():
        return None, wrong
    cell = Cell.read(folder)
    return (cell if cell.summary["last"]["round"] == rounds else None), ""
