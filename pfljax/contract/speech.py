"""What the library says while it works: records of the logger "pfljax", which nobody sees unless logging is set up.

Lines about the plan and the progress are INFO; the further lines of a plan are DEBUG. The command line shows them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from pfljax.contract.errors import ArgumentError, warn_caller

F = TypeVar("F", bound=Callable)
Say = Callable[[str], Any]

logger = logging.getLogger("pfljax")
FORMER = "say is deprecated: set up logging, such as logging.getLogger('pfljax').setLevel('INFO'), with a handler"


class Lines(logging.Handler):
    """Hands the text of every record to a function, whose exceptions reach the caller."""

    def __init__(self, say: Say):
        super().__init__()
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Hands over one record."""
        self.say(record.getMessage())


@contextlib.contextmanager
def lines_to(say: Say, level: int = logging.INFO) -> Iterator[None]:
    """Hands the library's lines to a function, and to nothing else.

    Args:
        say: Called with each line.
        level: The least level of these lines.
    """
    handler = Lines(say)
    level_before = logger.level
    propagates = logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
        logger.setLevel(level_before)


@contextlib.contextmanager
def only(name: str, keep: Callable[[str], bool]) -> Iterator[None]:
    """Drops the lines of a room's logger except those that a function keeps.

    Args:
        name: Name of the logger, such as "pfljax.training".
        keep: Line -> whether to keep it.
    """
    room = logging.getLogger(name)

    def is_kept(record: logging.LogRecord) -> bool:
        return keep(record.getMessage())

    room.addFilter(is_kept)
    try:
        yield
    finally:
        room.removeFilter(is_kept)


def with_former_say(function: F) -> F:
    """Accepts the former argument `say` of a function for one more release: it gets the lines of that call."""

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        say = options.pop("say", None)
        if say is None:
            return function(*args, **options)
        if not callable(say):
            raise ArgumentError("say", "accepted: a function", say)
        warn_caller(FORMER, FutureWarning)
        with lines_to(say):
            return function(*args, **options)

    return cast(F, called)
