"""Locks for run folders: only one process at a time writes to a folder."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pfljax.contract import processes
from pfljax.contract.errors import ArgumentError

try:
    import fcntl
except ImportError:  # Windows: folders are not locked
    fcntl = None

LOCK = ".lock"  # contains number and machine of the process that last locked the folder
CONTENT = re.compile(rb"(?:(\d{1,20})(?: ([\w.-]{1,64}))?)?")  # earlier versions wrote no machine
MAX_BYTES = 96
HERE = re.sub(r"[^\w.-]", "-", socket.gethostname(), flags=re.ASCII)[:64] or "unnamed"

# Folders, and the threads of this process that hold their locks
_locked: set[tuple[Path, int]] = set()


class Locked(ArgumentError):
    """Another process has locked a folder."""


class Holder(NamedTuple):
    """The process that last locked a folder: its number, and the name of its machine."""

    number: int
    machine: str = HERE

    def __str__(self) -> str:
        return f"{self.number}" if self.machine == HERE else f"{self.number} on {self.machine}"

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended. Those of other machines cannot be asked, and count as alive."""
        if self.machine != HERE or fcntl is None:
            return False
        try:
            os.kill(self.number, 0)  # sends no signal
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:  # another user's
            pass
        return False


def holder(folder: Path) -> Holder | None:
    """Returns who locked a folder, or None. Only reads, since even a short lock could turn away a worker."""
    path = folder / LOCK
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None
        return _parsed(path.read_bytes()[:MAX_BYTES])
    except OSError:
        return None


def _parsed(content: bytes) -> Holder | None:
    match = CONTENT.fullmatch(content)
    if match is None or not match[1]:
        return None
    machine = match[2].decode() if match[2] else HERE
    return Holder(int(match[1]), machine)


def _entry(folder: Path) -> tuple[Path, int]:
    return folder.absolute(), threading.get_ident()


@contextlib.contextmanager
def locked(folders: Sequence[Path], say: Callable[[str], None]) -> Iterator[None]:
    """Creates and locks runs' folders for this process. With several connected processes, the first one locks them.

    Folders that the caller has already locked stay locked. The system releases the locks of a killed process, so no
    lock outlives its process; `say` gets a line if one left its lock behind. Raises `Locked` if another process has
    locked one of the folders, and `ArgumentError` if something else is in place of a lock.
    """
    folders = [folder for folder in folders if _entry(folder) not in _locked]
    new = [path for folder in folders for path in (folder, *folder.parents) if not path.exists()]
    locks_folders = processes.is_first() and fcntl
    with contextlib.ExitStack() as locks:
        if locks_folders:
            for folder in folders:
                locks.enter_context(_lock(folder, say))
        try:
            yield
        finally:
            locks.close()
            if processes.is_first():
                _remove_empty(new)


def _remove_empty(folders: Sequence[Path]) -> None:
    """Deletes those of the folders into which nothing was written."""
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


@contextlib.contextmanager
def _lock(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    file = _take(folder, say)
    _locked.add(_entry(folder))
    try:
        yield
    finally:
        _locked.discard(_entry(folder))
        (folder / LOCK).unlink(missing_ok=True)
        os.close(file)


def _take(folder: Path, say: Callable[[str], None]) -> int:
    """Locks a folder. Returns the open lock file."""
    while True:
        file = _open(folder)
        if not _try_lock(folder, file):
            return file
        try:
            is_current = os.stat(folder / LOCK).st_ino == os.fstat(file).st_ino
        except FileNotFoundError:  # released, and so deleted, before it was locked here
            is_current = False
        if is_current:
            _write_holder(folder, file, say)
            return file
        os.close(file)


def _try_lock(folder: Path, file: int) -> bool:
    """Locks an open file; False if the file system does not support locks. Raises `Locked` if it is locked."""
    assert fcntl
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        other = _parsed(os.read(file, MAX_BYTES)) or "unknown"
        os.close(file)
        text = f"another process (number {other}) is writing to it"
        raise Locked("out", text, folder) from error
    return True


def _write_holder(folder: Path, file: int, say: Callable[[str], None]) -> None:
    """Writes this process's number into a lock file. Tells `say` of a process that left it behind."""
    before = _parsed(os.read(file, MAX_BYTES))
    if before:
        ended = f"was locked by process {before}, which has ended"
        say(f"  {folder} {ended}; taking over the lock")
    os.ftruncate(file, 0)
    with contextlib.suppress(OSError):  # full disk: the lock works without the number
        os.pwrite(file, f"{os.getpid()} {HERE}".encode(), 0)


def _open(folder: Path) -> int:
    """Opens or creates the lock file. Never opens a link, so that no file elsewhere is written to."""
    path = folder / LOCK
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if path.is_symlink() or path.is_dir():
            raise _not_a_lock(folder) from error
        raise
    status = os.fstat(file)
    is_single_file = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1
    if is_single_file and CONTENT.fullmatch(os.pread(file, MAX_BYTES, 0)):
        return file
    os.close(file)
    raise _not_a_lock(folder)


def _not_a_lock(folder: Path) -> ArgumentError:
    text = f"its {LOCK} is not a lock of pfljax; move or delete {folder / LOCK}"
    return ArgumentError("out", text, folder)
