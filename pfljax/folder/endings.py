"""External causes that end a run early: signals and a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pfljax.contract import processes
from pfljax.contract.errors import RunError
from pfljax.run import memory

SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPEAT_SECONDS = 2.0  # seconds until a SIGINT that had no effect is repeated
SPARE = 1 << 20  # bytes that a save needs in addition to its arrays
WAY_ON = "Earlier checkpoints are intact: free some space and resume"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL_TEXTS = (
    "no space left on device",
    "disk quota exceeded",
    "file too large",
    "resource_exhausted",
)


class Interrupted(KeyboardInterrupt):
    """Raised when SIGINT or SIGTERM, of this `number`, ends a run between two rounds, after saving it."""

    def __init__(self, number: int, text: str):
        self.number = number
        super().__init__(text)


@contextlib.contextmanager
def noted() -> Iterator[Callable[[], int]]:
    """Records the first SIGINT or SIGTERM instead of acting on it, so that the current rounds are finished and saved.

    A second signal acts at once. Signals reach only the main thread; in other threads, this changes nothing. Yields a
    function that returns the number of the signal that any process has received, or 0.
    """
    received = 0
    handlers = {}

    def note(number: int, _: Any) -> None:
        nonlocal received
        received = number
        # The next one ends a script even inside XLA; a notebook keeps running.
        is_interactive = hasattr(sys, "ps1")
        for signal_number, handler in handlers.items():
            signal.signal(signal_number, handler if is_interactive else signal.SIG_DFL)
        # os.write, because the signal may interrupt a print.
        name = signal.Signals(number).name
        line = f"{name}: finishing the current rounds; a second signal ends the run at once\n"
        os.write(2, line.encode())

    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            handlers[number] = signal.signal(number, note) or signal.SIG_DFL
    try:
        yield lambda: processes.most(received)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Repeats SIGINT until it ends the block.

    Python drops a KeyboardInterrupt that is raised in a finalizer or in a garbage collection callback, and JAX installs
    such a callback. Does nothing outside the main thread, or where SIGINT has another handler.
    """
    timer = None
    is_repeated = False
    main_thread = threading.get_ident()

    def repeat() -> None:
        nonlocal is_repeated
        is_repeated = True
        signal.pthread_kill(main_thread, signal.SIGINT)  # wakes it if it sleeps

    def interrupt(number: int, frame: Any) -> None:
        nonlocal timer, is_repeated
        ignored = is_repeated and isinstance(sys.exception(), KeyboardInterrupt)
        is_repeated = False
        if not ignored:  # otherwise the block is already ending
            timer = threading.Timer(REPEAT_SECONDS, repeat)
            timer.daemon = True
            timer.start()
            signal.default_int_handler(number, frame)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if timer:
            timer.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def check_room(folder: Path, need: int) -> None:
    """Raises `RunError` if a folder's disk has less free space than `need` bytes."""
    free = int(processes.least(shutil.disk_usage(folder).free))
    need = need + SPARE
    if need > free:
        needed = f"a checkpoint needs {memory.readable(need)}"
        text = f"{needed}, but only {memory.readable(free)} is free"
        raise RunError(f"out of disk space in {folder}: {text}. {WAY_ON}")


@contextlib.contextmanager
def full_disk_told(folders: Sequence[Path]) -> Iterator[None]:
    """Context manager that turns any error of a full disk into a one-line `RunError`."""
    try:
        yield
    except Exception as error:
        if not folders or not _is_full(error):
            raise
        raise RunError(f"out of disk space in {folders[0]}. {WAY_ON}") from error


def _is_full(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, says that the disk is full. Libraries hide the errno in their texts."""
    while error is not None:
        text = str(error).lower()
        if getattr(error, "errno", None) in FULL:
            return True
        if any(words in text for words in FULL_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False
