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

# folders, and the threads of this process that hold their locks
_held: set[tuple[Path, int]] = set()


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
    try:
        regular = stat.S_ISREG(os.lstat(folder / LOCK).st_mode)
        return _parsed((folder / LOCK).read_bytes()[:MAX_BYTES]) if regular else None
    except OSError:
        return None


def _parsed(content: bytes) -> Holder | None:
    found = CONTENT.fullmatch(content)
    return (
        Holder(int(found[1]), (found[2] or HERE.encode()).decode()) if found and found[1] else None
    )


def _entry(folder: Path) -> tuple[Path, int]:
    return folder.absolute(), threading.get_ident()


@contextlib.contextmanager
def locked(folders: Sequence[Path], say: Callable[[str], None]) -> Iterator[None]:
    """Creates and locks runs' folders for this process. With several connected processes, the first one locks them.

    Folders that the caller has already locked stay locked. The system releases the locks of a killed process, so no
    lock outlives its process; `say` gets a line if one left its lock behind. Raises `Locked` if another process has
    locked one of the folders, and `ArgumentError` if something else is in place of a lock.
    """
    folders = [folder for folder in folders if _entry(folder) not in _held]
    made = [path for folder in folders for path in (folder, *folder.parents) if not path.exists()]
    with contextlib.ExitStack() as held:
        for folder in folders if processes.is_first() and fcntl else ():
            held.enter_context(_lock(folder, say))
        try:
            yield
        finally:
            held.close()
            for path in made if processes.is_first() else ():
                if path.is_dir() and not any(path.iterdir()):  # nothing was written
                    path.rmdir()


@contextlib.contextmanager
def _lock(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    file = _take(folder, say)
    _held.add(_entry(folder))
    try:
        yield
    finally:
        _held.discard(_entry(folder))
        (folder / LOCK).unlink(missing_ok=True)
        os.close(file)


def _take(folder: Path, say: Callable[[str], None]) -> int:
    assert fcntl
    while True:
        file = _open(folder)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                other = _parsed(os.read(file, MAX_BYTES)) or "unknown"
                os.close(file)
                raise Locked(
                    "out", f"another process (number {other}) is writing to it", folder
                ) from error
            return file  # the file system does not support locks
        try:
            if os.stat(folder / LOCK).st_ino == os.fstat(file).st_ino:
                if before := _parsed(os.read(file, MAX_BYTES)):
                    say(
                        f"  {folder} was locked by process {before}, which has ended; taking over the lock"
                    )
                os.ftruncate(file, 0)
                with contextlib.suppress(OSError):  # full disk: the lock works without the number
                    os.pwrite(file, f"{os.getpid()} {HERE}".encode(), 0)
                return file
        except FileNotFoundError:  # released, and so deleted, between the two lines above
            pass
        os.close(file)


def _open(folder: Path) -> int:
    """Opens or creates the lock file. Never opens a link, so that no file elsewhere is written to."""
    path = folder / LOCK
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if path.is_symlink() or path.is_dir():
            raise _not_a_lock(folder) from error
        raise
    kind = os.fstat(file)
    if (
        stat.S_ISREG(kind.st_mode)
        and kind.st_nlink <= 1
        and CONTENT.fullmatch(os.pread(file, MAX_BYTES, 0))
    ):
        return file
    os.close(file)
    raise _not_a_lock(folder)


def _not_a_lock(folder: Path) -> ArgumentError:
    return ArgumentError(
        "out", f"its {LOCK} is not a lock of pfljax; move or delete {folder / LOCK}", folder
    )
