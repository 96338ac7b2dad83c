"""The commits of entries: whether git has them, and what has changed since."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from experiments.ledger.entries import ROOT, Entry

# What a program is traced from.
ENGINE = tuple(
    f"pfljax/{room}"
    for room in (
        "contract",
        "settings",
        "models",
        "exchange",
        "local",
        "data",
        "evaluation",
        "algorithms",
        "stages",
        "run",
        "stores",
    )
)


def git(root: Path, *words: str) -> str | None:
    """The output of git in a repository; None if it fails, or if the root is no repository."""
    if not (root / ".git").exists():  # git would take a repository above, and git diff two files
        return None
    command = ["git", *words]
    try:
        result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return None
    return result.stdout if result.returncode == 0 else None


def exists(root: Path, commit: str) -> bool:
    """Whether git has a commit."""
    return git(root, "cat-file", "-e", f"{commit}^{{commit}}") is not None


def changed(root: Path, commit: str, paths: Iterable[str] = ENGINE) -> list[str] | None:
    """The files at or below some paths that differ from a commit's; None if git or the commit is missing."""
    output = git(root, "diff", "--name-only", commit, "--", *paths)
    return None if output is None else output.split()


def broken(entries: Mapping[str, Entry], root: Path = ROOT) -> list[str]:
    """A line for each table that cannot be made again from what its entry says, oldest first.

    Raises:
        ValueError: if the root is no repository, or one without its history.
    """
    if git(root, "rev-parse", "--is-shallow-repository") != "false\n":
        raise ValueError(f"{root}: expected a git repository with its whole history")
    found = []
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1].date):
        if entry.commit is None and entry.runs is None:
            found.append(f"{entry.date}  {name}: has neither a commit nor runs")
        elif entry.commit is not None and not exists(root, entry.commit):
            found.append(f"{entry.date}  {name}: commit {entry.commit} is missing")
    return found
