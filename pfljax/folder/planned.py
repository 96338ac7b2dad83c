"""The list of a study's runs, which is written to its folder before the first of them begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pfljax.folder import files

NAME = "planned.json"


def write(out: Path, folders: Sequence[Path], rounds: int) -> None:
    """Writes the list of the folders, below `out`, of runs of `rounds` rounds."""
    runs = [folder.relative_to(out).as_posix() for folder in folders]
    files.write_json(out / NAME, {"rounds": rounds, "runs": runs})


def read(out: Path) -> dict[Path, int]:
    """Returns the number of rounds by folder; {} if the study has no list, or a damaged one."""
    try:
        content = files.read_json(out / NAME)
        rounds = int(content["rounds"])
        runs = [Path(run) for run in content["runs"]]
    except Exception:  # a damaged file can make its reader raise anything
        return {}
    return {out / run: rounds for run in runs if not run.is_absolute() and ".." not in run.parts}
