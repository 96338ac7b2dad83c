"""The protocol of stages: what happens to messages between a method's clients and its server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    ClientOutput,
    Key,
    Metrics,
    PyTree,
    Start,
    State,
)
from pfljax.local.problem import Problem
from pfljax.stages.messages import LocalWork

if TYPE_CHECKING:
    from pfljax.stages.pipeline import Pipeline

# (problem, the method with the stages before this one) -> the stage, or None if it has nothing to
# do. Raises `ArgumentError` if the method does not support it.
StageMaker = Callable[[Problem, "Pipeline"], "Stage | None"]


class StageState(NamedTuple):
    """A stage's notes: what it keeps from round to round, out of the method's sight.

    Attributes:
        server: On the server.
        client: On a client; on the server's side, of all clients of the round, leaves (S, ...).
    """

    server: PyTree = ()
    client: PyTree = ()


class Stage:
    """A stage of the pipeline. Every function does nothing unless a stage defines it.

    In an exchange, `before_client` of the last stage in the list comes first; then the method's
    client; `after_client` of the first stage first; the sum over clients; `before_server` of the
    last stage first; the method's server; `after_server` of the first stage first. So a stage is
    around all stages before it in the list.

    Attributes:
        name: Its name in the pipeline, under which its notes are kept.
    """

    name: ClassVar[str]

    @property
    def chooses(self) -> bool:
        """Whether it chooses the clients of a round, by its `sample`."""
        return False

    def declare(self, method: Algorithm) -> Algorithm:
        """The method with what this stage declares beside its functions.

        Such are the ledger, the traffic, the report, further metrics, and who takes part.
        """
        return method

    def around(self, algorithm: Algorithm) -> Algorithm:
        """The method with all stages, with what this one changes of clients' predictions.

        There, rows and the server's state are `pipeline.WithNotes`.
        """
        return algorithm

    # At the beginning.

    def start(self, start: Start) -> Start:
        """Changes what the server begins with."""
        return start

    def server_note(self, key: Key, start: Start, clients: ClientData) -> PyTree:
        """What the stage keeps on the server at first; `key` and `start` are the method's."""
        return ()

    def client_note(self, note: PyTree, client: Array) -> PyTree:
        """What it keeps on client number `client` () at first, given its note on the server."""
        return ()

    # In a round.

    def sample(self, key: Key, state: State, clients: ClientData, note: PyTree) -> Array:
        """(S,) int32, the ids of a round's clients, given the method's state and the note."""
        raise NotImplementedError

    def download(self, context: ClientContext, index: Array, note: PyTree) -> Array:
        """(J,) int32, the models that a client receives, given those that the method asks for."""
        return index

    def before_client(self, work: LocalWork, note: StageState) -> LocalWork:
        """Changes what a client trains with, or whether it does."""
        return work

    def after_client(
        self, work: LocalWork, output: ClientOutput, note: StageState
    ) -> tuple[ClientOutput, PyTree]:
        """Changes what a client sends; returns its next note, too.

        `output.participation` says what became of the client; see `messages.lost` and
        `messages.dropped`. What the stage tells the server goes to `output.notes`; see
        `messages.with_note`.
        """
        return output, note.client

    def before_server(
        self, key: Key, state: State, aggregate: Aggregate, note: StageState
    ) -> tuple[Aggregate, StageState, Metrics]:
        """Changes what the method's server gets; returns the next notes and metrics, too."""
        return aggregate, note, {}

    def after_server(self, key: Key, state: State, note: PyTree) -> tuple[State, PyTree]:
        """Changes the state that the method's server returned, and the note on the server."""
        return state, note
