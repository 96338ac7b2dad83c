"""What a server asks its nodes, what they answer, and what a node remembers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pfljax.flower.wire import Arrays

Value = bool | int | float | str
Values = dict[str, Value]
NodeConfig = Mapping[str, Any]

DESCRIBE = "describe"  # who are you, and how many examples do you have?
PREPARE = "prepare"  # this is how all scale their inputs, and what the server began with
EXAMPLES = "examples"  # send your examples, which the method needs on the server
DOWNLOAD = "download"  # which models do you want?
WORK = "work"  # train with these models
SELECT = "select"  # whose models do you predict with?
EVALUATE = "evaluate"  # score your predictions with these models
ADAPT = "adapt"  # a newcomer scores what it makes of all models


@dataclasses.dataclass(frozen=True)
class Task:
    """What a server asks of a node.

    Attributes:
        name: One of the constants above.
        values: Numbers and texts.
        arrays: Arrays.
    """

    name: str
    values: Values
    arrays: Arrays


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a node answers.

    Attributes:
        values: Numbers and texts; "error" if it cannot answer, "unprepared" if it needs `PREPARE` first.
        arrays: Arrays.
    """

    values: Values
    arrays: Arrays


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a node remembers between tasks; it never leaves the node.

    Attributes:
        values: Numbers and texts.
        arrays: Arrays: its row, its row before the last task, and how inputs are scaled.
    """

    values: Values
    arrays: Arrays


NOTHING = Memory({}, {})
# (task, what the node remembers, its configuration) -> (the answer, what it remembers next)
NodeFunction = Callable[[Task, Memory, NodeConfig], tuple[Answer, Memory]]


class Nodes(Protocol):
    """The nodes that a server reaches."""

    def ids(self) -> Sequence[int]:
        """The nodes that are connected now."""
        ...

    def ask(self, tasks: Mapping[int, Task], timeout: float) -> dict[int, Answer]:
        """Asks nodes, by their id; nodes that do not answer in time are missing."""
        ...

    def pause(self) -> None:
        """Waits a little before the nodes are listed again."""
        ...
