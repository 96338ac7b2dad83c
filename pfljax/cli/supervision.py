"""Runs one of several connected processes under a watcher, so that any crash is reported in one line.

When a process dies, the libraries that connect the others end them too and print pages of traces. So each command of
a multi-process run works in a child process, and the watcher reduces the child's last output to one line.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from typing import IO, NoReturn

from pfljax.contract.processes import START_SECONDS

WATCHED = "PFLJAX_WATCHED"
PATIENCE_SECONDS = 20  # how long a process may take to end when asked to
LOG_LINE = re.compile(
    rb"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ (\w+\.(?:cc|cpp|h):\d+)\] (.*)|\[Gloo\].*"
)
LOST_TEXT = (
    "another process has ended or cannot be reached; --resume continues from the last checkpoint"
)
START_TEXT = f"--coordinator: the processes did not connect within {START_SECONDS} s"
# in errors; the libraries' last words say more
LOST_ERROR = "Gloo|coordination ?service|distributed service"
LOST = re.compile(f"{LOST_ERROR}|unhealthy|heartbeat|barrier", re.IGNORECASE)


def end_with_the_watcher() -> None:
    """Ends this process when its watcher ends for any reason."""

    def wait():
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def watch(output: IO[str]) -> NoReturn:
    """Runs this command in a worker process, passes on its output, and ends with it; prints one line after a crash.

    Args:
        output: The worker's standard output.
    """
    worker = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        env=os.environ | {WATCHED: "1"},
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.PIPE,
    )

    def end(number, _):
        worker.send_signal(number)
        # a library may be waiting for the other processes
        threading.Timer(PATIENCE_SECONDS, worker.kill).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    # What the worker prints. From the first error of a library on, lines are withheld.
    fatal = b""
    has_error = False
    is_lost_line = False
    withheld = None
    for line in worker.stderr or ():
        match = LOG_LINE.match(line)
        is_error = line.startswith(b"error: ")
        has_error |= is_error
        is_lost_line |= has_error and LOST_TEXT.encode() in line
        if match:
            if withheld is None and line[:1] in b"EF":
                withheld = []
            if line.startswith(b"F"):
                fatal = match[2]
        elif withheld is None or is_error:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
        else:
            withheld.append(line)  # more of the libraries' messages, or something else

    # How it ended.
    code = worker.wait()
    words = last_words(fatal, code) if code < 0 else ""
    is_explained = is_lost_line or words in (LOST_TEXT, START_TEXT)
    if withheld and code and not is_explained:
        sys.stderr.buffer.writelines(withheld)
    if words and not has_error:
        print(f"error: {words}", file=sys.stderr, flush=True)
    os._exit(1 if code < 0 else code)


def is_lost(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, tells by its text that another process was lost.

    The type does not tell: the same failure of a collective comes as different ones, depending on who waits for it.
    """
    while error is not None:
        if re.search(LOST_ERROR, str(error), re.IGNORECASE):
            return True
        error = error.__cause__ or error.__context__
    return False


def last_words(fatal: bytes, code: int) -> str:
    """Returns the error line for a process that ended with this library message and exit code."""
    text = fatal.decode(errors="replace")
    if "DEADLINE_EXCEEDED" in text:
        return START_TEXT
    if LOST.search(text):
        return LOST_TEXT
    if text:
        return text[:300]
    return f"the process was ended by {signal.Signals(-code).name}; --resume continues from the last checkpoint"
