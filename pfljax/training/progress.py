"""Progress of a run: a bar in a terminal or notebook, otherwise occasional log lines."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

LINE_SECONDS = 10  # time between two log lines
SLOW_SECONDS = 5  # a step that takes longer is announced
Advance = Callable[[int], None]  # takes the number of rounds done


@contextlib.contextmanager
def progress(
    total: int, done: int, say: Callable[[str], None] | None, bar: bool
) -> Iterator[Advance]:
    """Shows the number of rounds done, rounds per second and the remaining time.

    With `bar`, and in a terminal or a notebook with ipywidgets, as a bar; otherwise as log lines for `say`, if given.
    """
    # In a notebook without ipywidgets, rich warns.
    notebook = "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets")
    if bar and (sys.stdout.isatty() or notebook):
        with _bar(total, done) as advance:
            yield advance
    elif say is not None:
        with announced("training", say):  # the first dispatch may take long
            yield _lines(total, done, say)
    else:
        yield lambda done: None


@contextlib.contextmanager
def announced(step: str, say: Callable[[str], None] | None) -> Iterator[None]:
    """Tells `say`, if it is given, of a step, such as "compiling", that takes long."""
    if say is None:
        yield
        return
    timer = threading.Timer(SLOW_SECONDS, say, [f"  {step} ..."])
    timer.daemon = True  # does not delay a process that ends meanwhile
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _bar(total: int, start: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = [
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    ]
    console = Console(width=min(shutil.get_terminal_size().columns, 120))
    with Progress(*columns, console=console) as shown:
        task = shown.add_task("", total=total, completed=start, speed="")
        begin = time.monotonic()

        def advance(done: int) -> None:
            elapsed = max(time.monotonic() - begin, 1e-9)
            rate = (done - start) / elapsed
            shown.update(task, completed=done, speed=f"{rate:.1f} rounds/s")

        yield advance


def _lines(total: int, start: int, say: Callable[[str], None]) -> Advance:
    begin = time.monotonic()
    last_line = begin

    def advance(done: int) -> None:
        nonlocal last_line
        now = time.monotonic()
        if now - last_line <= LINE_SECONDS:
            return
        rate = (done - start) / (now - begin)
        left = (total - done) / max(rate, 1e-9)
        say(f"  round {done} of {total}, {rate:.2f} rounds/s, {left:.0f} s left")
        last_line = now

    return advance
