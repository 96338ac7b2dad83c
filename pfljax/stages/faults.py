"""Clients that fail in a round, for any method.

A client that fails plays as a client without examples does: it takes no step, sends nothing, and keeps its row. Drawn
anew for every client and round, a share of the cohort

- fails before it trains ("dropout");
- trains and keeps the result, but its upload is lost ("lost");
- sends an upload of NaNs ("broken").

A client whose message is not finite, or whose next row has NaNs, is dropped: it plays as one that fails before it
trains. To know it, both results of a client must be at hand before anything is added up, which costs time and
rounds differently. So results are checked from round 0 if uploads are broken on purpose, and otherwise only when a run
starts over, since a loss was not finite. With on_divergence="stop", it stops instead. Clients that fail have still
received their models. What they send in vain takes its time on a clock, and does not count as traffic.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientContext,
    ClientOutput,
    Key,
    Metrics,
    PyTree,
    State,
    Topology,
)
from pfljax.local.problem import Problem
from pfljax.settings.fields import hyperparameter, settings
from pfljax.stages.messages import (
    LocalWork,
    dropped,
    either,
    is_float,
    lost,
    values_of,
    with_note,
    with_values,
)
from pfljax.stages.stage import Stage, StageState

if TYPE_CHECKING:
    from pfljax.stages.pipeline import Pipeline

FAULT = 0xFA17  # folded into a client's key for a round to draw its faults


@settings
class Faults:
    """Which clients fail, and what becomes of results that are not finite.

    Attributes:
        dropout: Share of a round's clients that fail before they train.
        lost: Share of a round's clients whose upload is lost after they trained.
        broken: Share of a round's clients whose upload is not finite.
        on_divergence: What follows if a loss is not finite: the run starts over, and clients whose results are not
            finite are dropped from their rounds ("drop"), or it stops ("stop"). It stops, too, if all of a round's
            clients would be dropped, if its method's clients mix what all neighbors send, or if its noise is private.

    Examples:
        >>> import pfljax as pfl
        >>> faults = pfl.Faults(dropout=0.1, lost=0.05)
        >>> faults.described
        '10% fail before training, 5% uploads lost'
    """

    dropout: float = hyperparameter(0.0, at_least=0, below=1)
    lost: float = hyperparameter(0.0, at_least=0, below=1)
    broken: float = hyperparameter(0.0, at_least=0, below=1)
    on_divergence: Literal["drop", "stop"] = "drop"

    @property
    def active(self) -> bool:
        """Whether anything fails."""
        return bool(self.dropout or self.lost or self.broken)

    def droppable(self, algorithm: Algorithm) -> bool:
        """Whether results that are not finite can be dropped."""
        return self.on_divergence == "drop" and algorithm.topology is not Topology.PUSH

    @property
    def described(self) -> str:
        """What fails, in words."""
        shares = {
            "fail before training": self.dropout,
            "uploads lost": self.lost,
            "uploads not finite": self.broken,
        }
        return ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share)

    def stage(
        self, problem: Problem, pipeline: Pipeline, *, checked: bool = False
    ) -> Failing | None:
        """The stage of these faults, if anything fails or is checked.

        Args:
            problem: The problem of the method.
            pipeline: The method with the stages before this one.
            checked: Whether clients are dropped whose results are not finite, though none is broken
                on purpose.

        Raises:
            ArgumentError: if each client's model needs what all others send.
        """
        drops = (checked or self.broken > 0) and self.on_divergence == "drop"
        if not (self.active or drops):
            return None
        topology = pipeline.method.topology
        if topology is Topology.PUSH:
            text = "accepted for this method: none; clients mix what all their neighbors send"
            raise ArgumentError("faults", text)
        if self.lost and not topology.moves:
            text = "accepted for this method: 0; no client sends anything"
            raise ArgumentError("lost", text, self.lost)
        return Failing(self, drops)


class Drawn(NamedTuple):
    """A client's faults in a round, () bool each.

    Attributes:
        fails: Whether it fails before it trains.
        loses: Whether its upload is lost.
        spoils: Whether its upload is not finite.
    """

    fails: Array
    loses: Array
    spoils: Array


@dataclasses.dataclass(frozen=True)
class Failing(Stage):
    """Some clients fail before they train, some uploads are lost, and some are not finite."""

    name = "faults"
    faults: Faults
    drops: bool

    def before_client(self, work: LocalWork, note: StageState) -> LocalWork:
        if not self.faults.dropout:
            return work
        return work._replace(absent=either(work.absent, self._drawn(work.context).fails))

    def after_client(
        self, work: LocalWork, output: ClientOutput, note: StageState
    ) -> tuple[ClientOutput, PyTree]:
        drawn = self._drawn(work.context)
        failed = drawn.fails | drawn.loses
        if self.faults.broken:
            output = spoiled(output, drawn.spoils & ~failed)
        if self.drops:
            # Of a lost message, only what the client keeps matters.
            unusable = has_nan(output.row) | (~is_finite(output) & ~drawn.loses)
            failed = failed & ~unusable
            if work.away is not None:
                unusable = unusable & ~work.away
            output = dropped(output, unusable)
            participation = output.participation._replace(broken=drawn.spoils)
            output = output._replace(participation=participation)
        if self.faults.lost:
            output = lost(output, drawn.loses)
        if work.away is not None:
            failed = failed & ~work.away  # nothing happens to those who are not there
        return with_note(output, self.name, failed), note.client

    def before_server(
        self, key: Key, state: State, aggregate: Aggregate, note: StageState
    ) -> tuple[Aggregate, StageState, Metrics]:
        metrics = {"failed_clients": aggregate.notes[self.name].sum()}
        if aggregate.participation.dropped is not None:
            metrics["dropped_clients"] = aggregate.participation.dropped.sum()
        return aggregate, note, metrics

    def _drawn(self, context: ClientContext) -> Drawn:
        """The client's faults in this round."""
        key = jax.random.fold_in(context.key, FAULT)
        numbers = jax.random.uniform(key, (3,))
        fails = numbers[0] < self.faults.dropout
        loses = numbers[1] < self.faults.lost
        spoils = numbers[2] < self.faults.broken
        return Drawn(fails, loses & ~fails, spoils)


def spoiled(output: ClientOutput, broken: Array) -> ClientOutput:
    """An output with NaNs for what stages change of it, where `broken` () holds."""
    values = values_of(output.upload)

    def spoil(leaf: Array) -> Array:
        return jnp.where(broken, jnp.nan, leaf)

    return output._replace(upload=with_values(output.upload, jax.tree.map(spoil, values)))


def is_finite(output: ClientOutput) -> Array:
    """() whether all floats of a message are finite."""
    leaves = jax.tree.leaves((output.upload, output.report))
    checks = [jnp.isfinite(leaf).all() for leaf in leaves if is_float(leaf)]
    return jnp.stack([jnp.ones((), bool), *checks]).all()


def has_nan(row: PyTree) -> Array:
    """() whether a row has NaNs; it may hold infinities."""
    checks = [jnp.isnan(leaf).any() for leaf in jax.tree.leaves(row) if is_float(leaf)]
    return jnp.stack([jnp.zeros((), bool), *checks]).any()
