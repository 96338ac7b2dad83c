"""Cells of a comparison: runs in folders of their own, of which those that are finished and whole are kept."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path

from pfljax.core.errors import ArgumentError
from pfljax.engine import processes
from pfljax.training import files
from pfljax.training.history import check_directory

# What a finished run leaves that a table reads. Without its settings nobody knows what a folder holds, so that such a
# cell begins anew; any other file is made again from the last checkpoint.
SETTINGS, SUMMARY = "config.json", "summary.json"
READ = ("metrics.jsonl", "results.npz", "collaboration.npz")
OTHERS = ("checkpoints", "clients", "figures", "report.html", "curve.npz")


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
        return cls(files.read_json(folder / SUMMARY), files.read_jsonl(folder / READ[0]))


def damaged(folder: Path) -> str:
    """The name of a file that a run has left in its folder torn, or that is missing there; "" if there is none."""
    left = [name for name in (SETTINGS, SUMMARY, *READ, *OTHERS) if (folder / name).exists()]
    if not left:
        return ""
    last = None
    for name in (SETTINGS, SUMMARY, *READ) if SUMMARY in left else (SETTINGS,):
        try:
            ends = last_round(folder / name)
        except Exception:  # whatever a torn file makes its reader raise
            return name
        if None not in (ends, last) and ends != last:  # of another time than the summary
            return name
        last = ends if last is None else last
    return ""


def last_round(path: Path) -> int | None:
    """The last round of which a run's file knows; None for its settings, which know of none."""
    if path.name == SETTINGS:
        files.read_json(path).keys()
        return None
    if path.name == SUMMARY:
        return int(files.read_json(path)["last"]["round"])
    if path.suffix == ".jsonl":
        return int(files.read_jsonl(path)[-1]["round"])
    arrays = files.read_npz(path)
    rounds = arrays["rounds" if "rounds" in arrays else "round"]
    if any(len(rounds) != len(arrays[name]) for name in arrays if name.startswith(("accuracy_", "loss_", "weights"))):
        raise ValueError("rounds are missing")
    return int(rounds[-1])


def check(folder: Path, config: dict, rounds: int) -> None:
    """Sees to it that a cell can be run, or gone on with, in its folder.

    Raises:
        ArgumentError: if the folder holds something else, a run with other settings, or one of more rounds.
    """
    wrong = damaged(folder)
    if wrong != SETTINGS:
        processes.first(functools.partial(check_directory, folder, config, resume=True))
    if not wrong and (folder / SUMMARY).exists():
        there = last_round(folder / SUMMARY)
        if there is not None and there > rounds:
            raise ArgumentError("rounds", f"{folder} has {there} already; accepted: {there} or more", rounds)


def finished(folder: Path, config: dict, rounds: int) -> tuple[Cell | None, str]:
    """The cell, if it need not be run; and which of its files is damaged, so that it is run again.

    Raises:
        ArgumentError: as `check`.
    """
    check(folder, config, rounds)
    wrong = damaged(folder)
    if wrong == SETTINGS and processes.is_first():
        for name in (SETTINGS, SUMMARY, *READ, *OTHERS):
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).unlink(missing_ok=True)
        for path in folder.glob(".*.tmp"):
            path.unlink()
    processes.wait()
    if wrong or not (folder / SUMMARY).exists():
        return None, wrong
    cell = Cell.read(folder)
    return (cell if cell.summary["last"]["round"] == rounds else None), ""
