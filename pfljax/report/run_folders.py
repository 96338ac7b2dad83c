"""Finds the folders of runs."""

from __future__ import annotations

import re
from pathlib import Path

TRIAL = re.compile(r"(?:split-(\d+)-)?seed-(\d+)$")  # names of the folders of one method's runs
DEPTH = 3  # OUT/GROUP/METHOD/seed-N


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
    candidates = folders_with("summary.json", folder)
    return sorted(filter(is_run, candidates))


def folders_with(name: str, folder: Path) -> list[Path]:
    """Returns the folders one to `DEPTH` levels below a folder that have a file of this name, without tuning runs."""
    folders = []
    for depth in range(1, DEPTH + 1):
        for path in folder.glob("*/" * depth + name):
            if "tuning" not in path.parent.relative_to(folder).parts:
                folders.append(path.parent)
    return folders


def title_of(path: Path, root: Path) -> tuple[str, str]:
    """Returns a run's title and its name within it, from its path below a folder; "" for what the path does not say."""
    names = path.relative_to(root).parts
    if names and TRIAL.match(names[-1]):
        return "/".join(names[:-1]), names[-1]
    return "/".join(names), ""
