"""A process of several, watched over by another, so that its end is one line whatever ended it.

When a process dies, the libraries that connect the others end them too, from within and with pages of traces. So a
command that is one of several runs in a process of its own, whose last words are put into one line here.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from typing import NoReturn

from pfljax.engine.processes import START_SECONDS

WATCHED = "PFLJAX_WATCHED"
PATIENCE_SECONDS = 20  # with a process that is told to end
LOG_LINE = re.compile(rb"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ (\w+\.(?:cc|cpp|h):\d+)\] (.*)|\[Gloo\].*")
LOST_TEXT = "another process has ended or cannot be reached; --resume goes on from the last checkpoint"
LOST = re.compile(rb"distributed service|coordination service|unhealthy|heartbeat|Gloo|barrier", re.IGNORECASE)


def is_watched() -> bool:
    """Whether this process is the one that works."""
    return WATCHED in os.environ


def end_with_the_watcher() -> None:
    """Ends this process when the one that watches it is gone, however it went."""

    def wait():
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def watch() -> NoReturn:
    """Runs this same command again, passes on what it says, and ends as it ends: on a crash with one line."""
    worker = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        env=os.environ | {WATCHED: "1"},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    def end(number, _):
        worker.send_signal(number)
        threading.Timer(PATIENCE_SECONDS, worker.kill).start()  # it may wait for the others deep in a library

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    fatal, said, lost, held = b"", False, False, None
    for line in worker.stderr or ():
        found = LOG_LINE.match(line)
        said |= line.startswith(b"error: ")
        lost |= said and LOST_TEXT.encode() in line
        if found:
            held = [] if held is None and line[:1] in b"EF" else held
            fatal = found[2] if line.startswith(b"F") else fatal
        elif held is None or line.startswith(b"error: "):
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
        else:
            held.append(line)  # more of what the libraries complain of, or something else
    code = worker.wait()
    words = last_words(fatal, code) if code < 0 else ""
    if held and code and not lost and words != LOST_TEXT:
        sys.stderr.buffer.writelines(held)
    if words and not said:
        print(f"error: {words}", file=sys.stderr, flush=True)
    os._exit(1 if code < 0 else code)


def last_words(fatal: bytes, code: int) -> str:
    """What a user should know of a process that ended with this message of the libraries and this exit code."""
    if b"DEADLINE_EXCEEDED" in fatal:
        return f"--coordinator: the processes did not come together within {START_SECONDS} s"
    if LOST.search(fatal):
        return LOST_TEXT
    if fatal:
        return fatal.decode(errors="replace")[:300]
    return f"the process was ended by {signal.Signals(-code).name}; --resume goes on from the last checkpoint"
