"""The manifest of a run's folder: lists the files that the run has written, with sizes and checksums.

manifest.json is written last, after everything that it lists. A checkpoint that it does not list is incomplete.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pfljax.contract import processes
from pfljax.contract.errors import ArgumentError
from pfljax.folder import files, former

NAME = "manifest.json"
FORMAT = 2  # format of a run's folder; increase it if earlier versions could misread a new folder
PARTS = ("settings", "data", "program")  # of config.json, which the manifest repeats
RECORDS = (
    "config.json",
    "data.npz",
    "metrics.jsonl",
    "results.npz",
    "collaboration.npz",
    "summary.json",
)


class Manifest(NamedTuple):
    """The content of a run's folder when the run was last saved."""

    rounds: int  # number of rounds done
    settings: dict  # "settings" of config.json, which must agree when the run is resumed
    data: dict  # "data" of config.json
    program: dict  # "program" of config.json
    files: dict[str, tuple[int, str]]  # path relative to the folder -> (size in bytes, SHA-256)

    @property
    def checkpoints(self) -> list[int]:
        """Rounds of the listed checkpoints, newest first."""
        steps = {_step(name) for name in self.files}
        return sorted((step for step in steps if step), reverse=True)

    def damaged(self, out: Path, checkpoint: int | None = None) -> str | None:
        """Describes the first file of a checkpoint (None: of those that belong to none) that is missing or changed."""
        for name, (size, digest) in self.files.items():
            if _step(name) != checkpoint:
                continue
            path = out / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size or _digest(path) != digest:
                return f"{name} is not what the run wrote"
        return None


def read(out: Path) -> Manifest | None:
    """Reads the manifest of a run's folder; None if it is missing or damaged.

    Raises `ArgumentError` if a later version of pfljax wrote it.
    """
    try:
        content = files.read_json(out / NAME)
        body = content["manifest"]
        is_whole = content["sha256"] == _digest_of(body)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if not is_whole:
        return None
    if body["format"] != FORMAT:
        version = f"format {body['format']} by another version of pfljax"
        text = f"was written in {version}; accepted: format {FORMAT}"
        raise ArgumentError("out", text, out)
    listed = {name: (size, digest) for name, (size, digest) in body["files"].items()}
    settings = former.renamed_settings(body["settings"])
    return Manifest(
        rounds=body["rounds"],
        settings=settings,
        data=body["data"],
        program=body["program"],
        files=listed,
    )


def write(
    out: Path,
    config: dict,
    rounds: int,
    checkpoints: Sequence[int],
    saved: int | None = None,
    digests: Mapping[str, str] | None = None,
) -> None:
    """Writes the manifest of a run's folder after `rounds` rounds. With several processes, only the first one writes.

    Lists these checkpoints. That of round `saved` is new; the entries of the others are kept. `digests` has the SHA-256
    of some of its files, by their paths in the folder.
    """
    if not processes.is_first():
        return
    before = read(out)
    entries_before = before.files if before else {}
    older = [step for step in checkpoints if step != saved]
    listed = {name: entry for name, entry in entries_before.items() if _step(name) in older}

    # What is new: the run's records, and the newest checkpoint with its history.
    folder = out / "checkpoints"
    paths = [out / name for name in RECORDS]
    paths.append(folder / f"history-{saved}.npz")
    if saved:
        for name in (f"{saved}", f"{saved}.rows"):
            paths += [path for path in (folder / name).rglob("*") if path.is_file()]
    for path in sorted(paths):
        if path.exists():
            name = path.relative_to(out).as_posix()
            digest = (digests or {}).get(name) or _digest(path)
            listed[name] = (path.stat().st_size, digest)

    body: dict[str, Any] = {"format": FORMAT, "rounds": rounds}
    body |= {part: config.get(part, {}) for part in PARTS}
    body["files"] = listed
    body = files.plain(body)
    files.write_json(out / NAME, {"manifest": body, "sha256": _digest_of(body)})


def _step(name: str) -> int | None:
    """Returns the round of the checkpoint that a listed file belongs to."""
    match = re.match(r"checkpoints/(?:history-)?(\d+)[./]", name)
    return int(match[1]) if match else None


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(body: Any) -> str:
    text = json.dumps(body, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
