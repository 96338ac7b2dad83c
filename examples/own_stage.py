"""A stage of your own: the server leaves out the largest tenth of the updates.

It cannot know a round's largest updates before it has them all, so it goes by the round before: it
keeps the length that a tenth of the updates exceeded, and whatever is longer does not count.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

import pfljax as pfl
from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Array,
    ClientData,
    ClientOutput,
    Key,
    Metrics,
    PyTree,
    Start,
    State,
)
from pfljax.local.problem import Problem
from pfljax.stages.messages import LocalWork, lost, with_note
from pfljax.stages.pipeline import Pipeline
from pfljax.stages.stage import Stage, StageState


@dataclasses.dataclass(frozen=True)
class WithoutLargest(Stage):
    """Updates do not count that are longer than all but a share of the last round's.

    Attributes:
        share: The share that is left out.
    """

    name = "without_largest"
    share: float = 0.1

    def server_note(self, key: Key, start: Start, clients: ClientData) -> Array:
        """The length that is too long: in the first round, none is."""
        return jnp.float32(jnp.inf)

    def after_client(
        self, work: LocalWork, output: ClientOutput, note: StageState
    ) -> tuple[ClientOutput, PyTree]:
        # A client tells the server the length of its update.
        update = output.upload.update
        length = jnp.sqrt(tree.inner(update, update))
        output = with_note(output, self.name, length)
        # Nothing arrives of one that is too long.
        return lost(output, length > note.server), note.client

    def before_server(
        self, key: Key, state: State, aggregate: Aggregate, note: StageState
    ) -> tuple[Aggregate, StageState, Metrics]:
        lengths = aggregate.notes[self.name]
        metrics = {"left_out": (lengths > note.server).sum()}
        too_long = jnp.quantile(lengths, 1 - self.share)
        return aggregate, note._replace(server=too_long), metrics


def without_largest(problem: Problem, pipeline: Pipeline) -> WithoutLargest:
    """The stage, for methods whose server averages updates."""
    if not pipeline.method.averages:
        raise pfl.ArgumentError("method", "accepted: methods whose server averages updates")
    return WithoutLargest()
