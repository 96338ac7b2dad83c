"""How far a run is: a bar on a terminal or in a notebook, else a log line now and then."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

LINE_SECONDS = 10  # between two log lines
SLOW_SECONDS = 5  # from which on it is told what a step does
Advance = Callable[[int], None]  # takes the number of rounds done


@contextlib.contextmanager
def progress(total: int, done: int, say: Callable[[str], None] | None, bar: bool) -> Iterator[Advance]:
    """Shows the rounds done, rounds per second and the time left.

    Args:
        total: Number of rounds in all.
        done: Number of rounds done before.
        say: Takes log lines where no bar is shown; None shows none.
        bar: Whether to show a bar where a terminal or a notebook is there for it.
    """
    if bar and (sys.stdout.isatty() or "ipykernel" in sys.modules):
        with _bar(total, done) as advance:
            yield advance
    elif say is not None:
        with told("training", say):  # the first dispatch may last
            yield _lines(total, done, say)
    else:
        yield lambda done: None


@contextlib.contextmanager
def told(step: str, say: Callable[[str], None] | None) -> Iterator[None]:
    """Says what a step does, if it takes long.

    Args:
        step: What it does, such as "compiling".
        say: Takes the line; None says nothing.
    """
    if say is None:
        yield
        return
    timer = threading.Timer(SLOW_SECONDS, say, [f"  {step} ..."])
    timer.daemon = True  # which does not hold up a process that ends meanwhile
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _bar(total: int, start: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=Console(width=min(shutil.get_terminal_size().columns, 120))) as shown:
        task = shown.add_task("", total=total, completed=start, speed="")
        begin = time.monotonic()

        def advance(done: int) -> None:
            rate = (done - start) / max(time.monotonic() - begin, 1e-9)
            shown.update(task, completed=done, speed=f"{rate:.1f} rounds/s")

        yield advance


def _lines(total: int, start: int, say: Callable[[str], None]) -> Advance:
    begin = spoken = time.monotonic()

    def advance(done: int) -> None:
        nonlocal spoken
        now = time.monotonic()
        if now - spoken > LINE_SECONDS:
            rate = (done - start) / (now - begin)
            say(f"  round {done} of {total}, {rate:.2f} rounds/s, {(total - done) / max(rate, 1e-9):.0f} s left")
            spoken = now

    return advance
