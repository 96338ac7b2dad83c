"""Which tables were measured before their methods or the engine changed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from experiments.ledger.entries import ROOT, Entry
from pfljax.algorithms import METHODS

ENGINE = tuple(
    f"pfljax/{room}"
    for room in (
        "contract",
        "models",
        "exchange",
        "local",
        "data",
        "evaluation",
        "stages",
        "stores",
        "training",
    )
)
IMPORTED = re.compile(
    r"^from ((?:pfljax\.algorithms|experiments)[.\w]*) import (\w+)", re.MULTILINE
)
MODULE = re.compile(r"-m (experiments[.\w]+)")


def files_of(entry: Entry, root: Path = ROOT) -> list[str]:
    """The files of a table's methods and command, with what they import outside the engine."""
    names = [METHODS[name].__module__ for name in entry.methods] + MODULE.findall(entry.command)
    found: dict[str, None] = {}
    while names:
        path = path_of(names.pop(), root)
        if path is None or path in found:
            continue
        found[path] = None
        for module, name in IMPORTED.findall((root / path).read_text(encoding="utf-8")):
            names += [module, f"{module}.{name}"]
    return sorted(found)


def path_of(module: str, root: Path) -> str | None:
    """The file of a module, from the root."""
    path = module.replace(".", "/")
    return next(
        (file for file in (f"{path}.py", f"{path}/__main__.py") if (root / file).is_file()), None
    )


def changed(root: Path, commit: str, paths: Iterable[str]) -> list[str] | None:
    """The files at or below some paths that differ from a commit's; None if git or the commit is missing."""
    if not (root / ".git").exists():  # outside a repository, git diff compares two files
        return None
    asked = ["git", "diff", "--name-only", commit, "--", *paths]
    try:
        told = subprocess.run(asked, cwd=root, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return None
    return told.stdout.split() if told.returncode == 0 else None


def lines(entries: Mapping[str, Entry], root: Path = ROOT) -> list[str]:
    """A line for each stale table, oldest first."""
    found = []
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1].date):
        commit = entry.commit or entry.published_in or ""
        own, engine = (
            changed(root, commit, paths) for paths in (files_of(entry, root) or ["-"], ENGINE)
        )
        if own is None or engine is None:
            found.append(
                f"{entry.date}  {name}: git or commit {commit} is missing, so what changed is not known"
            )
        elif own or engine:
            shown = ", ".join(own[:4]) + (f" and {len(own) - 4} more" if len(own) > 4 else "")
            found.append(
                f"{entry.date}  {name}: own files {shown or 'none'}; engine {len(engine)} files"
            )
    return found
