"""Files of a run. Each is written to a temporary file and renamed, so that no file is ever half written.

With several processes, only the first one writes.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pfljax.contract import processes
from pfljax.contract.errors import ArgumentError

# Bytes of a folder's name; file systems accept 255, and temporary names are longer.
LONGEST_NAME = 200


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Calls write(file) on a temporary file beside `path` and renames it to `path`.

    Raises:
        OSError: if that fails, such as on a full disk; it names `path`.
    """
    if not processes.is_first():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name cannot be guessed and the file must not exist, so existing files and links are never written to or
    # followed.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # otherwise a crash of the machine could leave an empty file
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is None:
            raise
        # A write to a full disk names no file, and other errors name the temporary one.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def delete(path: Path, *, follow: bool = True) -> None:
    """Deletes a file, or a folder with its content, if it exists.

    A link to a folder stays, and that folder is emptied; or without `follow`, the link is deleted.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif follow and path.is_dir():
        for entry in path.iterdir():
            delete(entry, follow=False)
    else:
        path.unlink(missing_ok=True)


def check_writable(folder: Path, argument: str = "out") -> None:
    """Raises `ArgumentError`, with the argument's name, if files cannot be written to a folder.

    It need not exist yet.
    """
    parent = folder.absolute()
    try:
        while not _exists(parent):
            parent = parent.parent
        with tempfile.TemporaryFile(dir=parent):
            pass
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        reason = getattr(error, "strerror", None) or error
        text = f"cannot be written to ({reason}); accepted: an existing or new folder"
        raise ArgumentError(argument, text, folder) from error


def check_new(path: Path, argument: str, accepted: str) -> None:
    """Raises `ArgumentError` if something is at a path, or nothing can be written there."""
    try:
        exists = _exists(path)
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        reason = getattr(error, "strerror", None) or error
        text = f"cannot be written to ({reason}); accepted: {accepted}"
        raise ArgumentError(argument, text, path) from error
    if exists:
        raise ArgumentError(argument, f"exists; accepted: {accepted}", path)
    check_writable(path.parent, argument)


def check_name(argument: str, name: Any, taken: Collection[str] = ()) -> None:
    """Raises `ArgumentError` if a name cannot be that of a folder in another, which has the files `taken`."""
    if not isinstance(name, str) or not _is_title(name):
        raise ArgumentError(argument, "accepted: titles that can be names of folders", name)
    if len(name.encode()) > LONGEST_NAME:
        text = f"is too long; accepted: titles of at most {LONGEST_NAME} bytes"
        raise ArgumentError(argument, text, name)
    if name.lower() in taken:
        text = f"is a file of the comparison; accepted: other names than {', '.join(taken)}"
        raise ArgumentError(argument, text, name)


def _is_title(name: str) -> bool:
    """Whether a text can be printed and be the name of a folder."""
    return bool(name.strip(". ")) and name.isprintable() and not {*name} & {*"/\\"}


def _exists(path: Path) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))


def plain(value: Any) -> Any:
    """Returns the value as it is after `write_json` and `read_json`."""
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None  # JSON has no NaN
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(list(dataclasses.astuple(value)))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def write_json(path: Path, value: Any) -> None:
    """Writes JSON; NaN and infinity become null."""
    write_text(path, json.dumps(plain(value), indent=2) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def write_jsonl(path: Path, rows: list[dict]) -> None:
    """Writes one JSON object per line."""
    lines = [json.dumps(plain(row)) + "\n" for row in rows]
    write_text(path, "".join(lines))


def read_jsonl(path: Path) -> list[dict]:
    """Reads a file written by `write_jsonl`; returns no rows if it does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Writes a table, a row per line; None becomes an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_text(path, text.getvalue())


def write_npz(path: Path, arrays: dict[str, Any]) -> None:
    """Writes a compressed npz file."""
    write_atomically(path, lambda file: np.savez_compressed(file, **arrays))


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Reads all arrays of an npz file."""
    # np.load would leave a truncated file open
    with open(path, "rb") as file, np.load(file) as arrays:
        return {name: arrays[name] for name in arrays.files}
