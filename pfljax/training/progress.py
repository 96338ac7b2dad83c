"""Progress of a run: a bar in a terminal or notebook, otherwise occasional log lines."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

LINE_SECONDS = 10  # time between two log lines
SLOW_SECONDS = 5  # a step that takes longer is announced

logger = logging.getLogger("pfljax.training")


class Seconds:
    """Wall-clock seconds by part, such as "evaluation".

    Attributes:
        total: Seconds of each part so far.
        last: Seconds that each part took the last time.
    """

    def __init__(self):
        self.total: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def add(self, part: str, seconds: float) -> None:
        """Adds the seconds of a part."""
        self.total[part] = self.total.get(part, 0.0) + seconds
        self.last[part] = seconds

    @contextlib.contextmanager
    def measured(self, part: str) -> Iterator[None]:
        """Adds the seconds of a block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - begin)


def described(seconds: dict[str, float]) -> str:
    """One line about the seconds of a run by part, such as "94.8 s: rounds 9.6, evaluation 70.1, other 15.1"."""
    texts = [f"{part} {value:.1f}" for part, value in seconds.items() if part != "total"]
    return f"{seconds['total']:.1f} s: {', '.join(texts)}"


def text_of_left(seconds: float) -> str:
    """The remaining time, such as "33 s left"."""
    if seconds < 1:
        return "less than 1 s left"
    if seconds < 120:
        return f"{seconds:.0f} s left"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min left"
    return f"{seconds / 3600:.1f} h left"


class Display:
    """Shows what a run does: its steps, and the number of rounds done.

    With `bar`, and in a terminal or a notebook with ipywidgets, as a bar; otherwise as log lines.
    """

    def __init__(self, bar: bool):
        # In a notebook without ipywidgets, rich warns.
        notebook = "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets")
        self.bar = bar and (sys.stdout.isatty() or bool(notebook))
        self._shown: Any = None  # rich's bar, while rounds are played
        self._total = 0
        self._start = 0
        self._begin = 0.0
        self._last_line = 0.0

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Shows a step other than rounds, such as "compiling"."""
        if self._shown is not None:
            self._update(text, "")
            yield
        elif self.bar:
            with _console().status(text):
                yield
        else:
            with announced(text):
                yield

    @contextlib.contextmanager
    def rounds(self, total: int, done: int) -> Iterator[None]:
        """Shows rounds, of which some are done, until the block ends."""
        self._total = total
        self._start = done
        self._begin = time.monotonic()
        self._last_line = self._begin
        if not self.bar:
            with announced("training"):  # the first dispatch may take long
                yield
            return
        with _rich_bar() as shown:
            self._shown = shown
            self._task = shown.add_task("", total=total, completed=done, phase="training", left="")
            try:
                yield
            finally:
                self._shown = None

    def advance(self, done: int, left: float) -> None:
        """Shows the number of rounds done, and the remaining seconds with all evaluations and checkpoints."""
        now = time.monotonic()
        rate = (done - self._start) / max(now - self._begin, 1e-9)
        text = text_of_left(left)
        if self._shown is not None:
            self._shown.update(self._task, completed=done)
            self._update(f"round {done}/{self._total}", f"{rate:.1f} rounds/s, {text}")
        elif now - self._last_line > LINE_SECONDS:
            logger.info("  round %d of %d, %.2f rounds/s, %s", done, self._total, rate, text)
            self._last_line = now

    def _update(self, phase: str, left: str) -> None:
        self._shown.update(self._task, phase=phase, left=left)


@contextlib.contextmanager
def announced(step: str) -> Iterator[None]:
    """Logs a step, such as "compiling", once it takes long."""
    if not logger.isEnabledFor(logging.INFO):
        yield
        return
    timer = threading.Timer(SLOW_SECONDS, logger.info, [f"  {step} ..."])
    timer.daemon = True  # does not delay a process that ends meanwhile
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _console() -> Any:
    from rich.console import Console

    return Console(width=min(shutil.get_terminal_size().columns, 120))


def _rich_bar() -> Any:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = [
        TextColumn("{task.fields[phase]}"),
        BarColumn(),
        TextColumn("{task.fields[left]}"),
    ]
    return Progress(*columns, console=_console())
