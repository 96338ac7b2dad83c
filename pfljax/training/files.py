"""Files of a run, each written whole under a temporary name and renamed, so that none is ever half written.

Of several processes the first alone writes.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pfljax.core.errors import ArgumentError
from pfljax.engine import processes


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Calls write(file) on a temporary file beside `path` and renames it to `path`."""
    if not processes.is_first():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name that cannot be guessed, of a file that must not be there: whatever lies beside is neither written to nor
    # followed.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # a crash of the machine must not leave the new name on an empty file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Sees to it that files can be written to a folder, which need not be there yet.

    Raises:
        ArgumentError: naming `out`.
    """
    place = folder.absolute()
    try:
        while not _is_there(place):
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
    except (OSError, ValueError) as error:  # ValueError: the path has a zero byte
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(
            "out", f"cannot be written to ({reason}); accepted: a folder, there or new", folder
        ) from error


def _is_there(path: Path) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def write_text(path: Path, text: str) -> None:
    """Writes a text file."""
    write_atomically(path, lambda file: file.write(text.encode()))


def plain(value: Any) -> Any:
    """The value as `write_json` and `read_json` leave it."""
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None  # JSON has no NaN
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def write_json(path: Path, value: Any) -> None:
    """Writes JSON; NaN and infinity become null."""
    write_text(path, json.dumps(plain(value), indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Reads a JSON file."""
    return json.loads(path.read_text())


def write_jsonl(path: Path, rows: list[dict]) -> None:
    """Writes one JSON object a line."""
    write_text(path, "".join(json.dumps(plain(row)) + "\n" for row in rows))


def read_jsonl(path: Path) -> list[dict]:
    """Reads what `write_jsonl` wrote; no file, no rows."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_npz(path: Path, arrays: dict[str, Any]) -> None:
    """Writes a compressed npz."""
    write_atomically(path, lambda file: np.savez_compressed(file, **arrays))


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Reads all arrays of an npz."""
    with open(path, "rb") as file, np.load(file) as arrays:  # which, of a torn file, would leave it open
        return {name: arrays[name] for name in arrays.files}
