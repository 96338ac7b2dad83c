"""When a run saves a checkpoint: after a number of rounds, or of seconds."""

from __future__ import annotations

import re
import time
from typing import Annotated, NamedTuple

from pfljax.contract.errors import ArgumentError
from pfljax.settings.fields import hyperparameter

AUTO = "auto"
AUTO_SECONDS = 60.0  # time between checkpoints by default
LARGEST_SHARE = 0.1  # of the time that checkpoints take by default
ROUNDS = r"[1-9][0-9]*"
SECONDS = r"([0-9]*\.?[0-9]+)s"
ACCEPTED = f"a number of rounds, 1 or more; of seconds, such as 60s; or {AUTO}"

CheckpointEvery = Annotated[
    int | str,
    hyperparameter(at_least=1, accepted=ACCEPTED, pattern=f"{AUTO}|{ROUNDS}|{SECONDS}"),
]


class Interval(NamedTuple):
    """The time between checkpoints.

    Attributes:
        rounds: Number of rounds; None: it is measured in seconds.
        seconds: Number of seconds.
        share: Largest share of the time that checkpoints may take.
    """

    rounds: int | None = None
    seconds: float = AUTO_SECONDS
    share: float = 1.0


def interval(every: int | str) -> Interval:
    """Reads an interval, such as 50, "60s" or "auto".

    Raises:
        ArgumentError: if it is none.
    """
    text = str(every)
    if text == AUTO:
        return Interval(share=LARGEST_SHARE)
    if re.fullmatch(ROUNDS, text):
        return Interval(rounds=int(text))
    seconds = re.fullmatch(SECONDS, text)
    if seconds is None:
        raise ArgumentError("checkpoint_every", f"accepted: {ACCEPTED}", every)
    return Interval(seconds=float(seconds[1]))


class Saver:
    """Decides when to save.

    Attributes:
        interval: The time between checkpoints.
        round: Round of the newest checkpoint.
    """

    def __init__(self, interval: Interval, round_number: int):
        """Begins now, after `round_number` rounds, as if they had just been saved."""
        self.interval = interval
        self.round = round_number
        self._last_save = time.monotonic()
        self._last_duration = 0.0

    def next_round(self) -> int | None:
        """The round after which to save; None: it depends on the time."""
        if self.interval.rounds is None:
            return None
        return self.round + self.interval.rounds

    def is_due(self, done: int) -> bool:
        """Whether to save after `done` rounds."""
        if self.interval.rounds is not None:
            return done - self.round >= self.interval.rounds
        elapsed = time.monotonic() - self._last_save
        is_cheap = self._last_duration <= self.interval.share * elapsed
        return done > self.round and elapsed >= self.interval.seconds and is_cheap

    def note_duration(self, duration: float) -> None:
        """Notes how long the newest checkpoint took, which is known once it is complete."""
        self._last_duration = max(self._last_duration, duration)

    def saved(self, done: int, duration: float) -> None:
        """Notes a checkpoint after `done` rounds that took `duration` seconds."""
        self.round = done
        self._last_save = time.monotonic()
        self._last_duration = duration
