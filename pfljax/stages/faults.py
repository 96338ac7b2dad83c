"""Clients that fail in a round, for any method.

A client that fails plays as a client without examples does: it takes no step, sends nothing, and keeps its row. Drawn
anew for every client and round, a share of the cohort

- fails before it trains ("dropout");
- trains and keeps the result, but its upload is lost ("lost");
- sends an upload of NaNs ("broken").

A client whose upload or report is not finite, or whose next row has NaNs, is dropped: it plays as one that fails before
it trains. To know it, both results of a client must be at hand before anything is added up, which costs time and
rounds differently. So results are checked from round 0 if uploads are broken on purpose, and otherwise only when a run
starts over, since a loss was not finite. With on_divergence="stop", it stops instead. Clients that fail have still
received their models. What they send in vain takes its time on a clock, and does not count as traffic.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.fields import knob, settings
from pfljax.contract.types import Algorithm, Array, ClientContext, ClientData, ClientOutput, PyTree
from pfljax.local.problem import Problem
from pfljax.stages import messages

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
    """

    dropout: float = knob(0.0, at_least=0, below=1)
    lost: float = knob(0.0, at_least=0, below=1)
    broken: float = knob(0.0, at_least=0, below=1)
    on_divergence: Literal["drop", "stop"] = "drop"

    @property
    def active(self) -> bool:
        """Whether anything fails."""
        return bool(self.dropout or self.lost or self.broken)

    def droppable(self, algorithm: Algorithm) -> bool:
        """Whether results that are not finite can be dropped."""
        return self.on_divergence == "drop" and algorithm.topology != "push"

    @property
    def described(self) -> str:
        """What fails, in words."""
        shares = {"fail before training": self.dropout, "uploads lost": self.lost, "uploads not finite": self.broken}
        return ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share)

    def on(self, problem: Problem, algorithm: Algorithm, checked: bool = False) -> Algorithm:
        """The algorithm with these faults.

        Args:
            problem: The problem of the algorithm.
            algorithm: Any algorithm.
            checked: Whether clients are dropped whose results are not finite, though none is broken on purpose.

        Raises:
            ArgumentError: if each client's model needs what all others send.
        """
        drops = (checked or self.broken > 0) and self.on_divergence == "drop"
        if not (self.active or drops):
            return algorithm
        if algorithm.topology == "push":
            raise ArgumentError("faults", "accepted for this method: none; clients mix what all their neighbors send")
        if self.lost and algorithm.topology == "own":
            raise ArgumentError("lost", "accepted for this method: 0; no client sends anything", self.lost)

        def client_update(context, models, row, data):
            failing, losing, spoiling = self._drawn(context)
            idle = lambda: absent(algorithm, context, models, row, data)
            train = lambda: algorithm.client_update(context, models, row, data)
            out = jax.lax.cond(failing, idle, train) if self.dropout else train()
            taken = out.report  # what is lost or dropped later has taken its time
            if self.lost:
                out = jax.lax.cond(losing, idle, lambda: out)._replace(client=out.client)
            failed = failing | losing
            if self.broken:
                out = out._replace(upload=spoiled(out.upload, spoiling & ~failed))
            dropped = jnp.zeros((), bool)
            if drops:
                dropped = ~usable(out)
                out = jax.lax.cond(dropped, idle, lambda: out)
            told = {"failed": failed & ~dropped} | ({"dropped": dropped, "broken": spoiling} if drops else {})
            missing = out.report.get("absent", False) | failed | dropped
            told |= {"seconds": seconds} if (seconds := taken.get("seconds")) is not None else {}
            report = messages.beside(out.report | {"absent": missing}, **told)
            return out._replace(report=report)

        def server_update(key, state, aggregate):
            report = aggregate.report
            inner = {name: part for name, part in report["method"].items() if name != "absent"}
            state, metrics = algorithm.server_update(key, state, aggregate._replace(report=inner))
            counts = {f"{name}_clients": report[name].sum() for name in ("failed", "dropped") if name in report}
            return state, metrics | counts

        return dataclasses.replace(algorithm, client_update=client_update, server_update=server_update)

    def _drawn(self, context: ClientContext) -> tuple[Array, Array, Array]:
        """Whether the client fails before it trains, whether its upload is lost, and whether it is broken."""
        drawn = jax.random.uniform(jax.random.fold_in(context.key, FAULT), (3,))
        drop, lose, spoil = (drawn[n] < share for n, share in enumerate((self.dropout, self.lost, self.broken)))
        return drop, lose & ~drop, spoil


def absent(algorithm: Algorithm, context: ClientContext, models: PyTree, row: PyTree, data: ClientData) -> ClientOutput:
    """What a client without examples sends, in place of this one; its row stays as it is."""
    empty = lambda split: split._replace(size=jnp.zeros((), jnp.int32))
    data = data._replace(train=empty(data.train), validation=empty(data.validation))
    return algorithm.client_update(context, models, row, data)._replace(client=row)


def spoiled(upload: PyTree, broken: Array) -> PyTree:
    """An upload with NaNs for its payload."""
    values, rest = tree.partition(upload, messages.payload(upload))
    return tree.combine(jax.tree.map(lambda leaf: jnp.where(broken, jnp.nan, leaf), values), rest)


def usable(out: ClientOutput) -> Array:
    """() whether upload and report are finite and the next row has no NaN; rows may hold infinities."""
    floats = lambda part: [x for x in jax.tree.leaves(part) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact)]
    checks = [jnp.isfinite(leaf).all() for leaf in floats((out.upload, out.report))]
    return jnp.stack([*checks, *(~jnp.isnan(leaf).any() for leaf in floats(out.client))]).all()
