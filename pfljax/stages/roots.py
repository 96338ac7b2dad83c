"""The server's own examples, and the update that it makes of them each round: the root of FLTrust's trust.

Cao, Fang, Liu, Gong, "FLTrust: Byzantine-robust federated learning via trust bootstrapping" (NDSS 2021), Section IV.
The server plays every round as a client does in its first, on a small root data set; `robust` has the rule.

Departures from the paper: the server does not collect its examples. They are drawn once, uniformly, from all clients'
training data, with their true labels; attackers' among them. Where clients train for epochs, the server takes as many
steps as a client with so many examples, not as many as the clients.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import (
    Algorithm,
    Array,
    ClientContext,
    ClientData,
    Key,
    PyTree,
    Split,
    Start,
    State,
)
from pfljax.local.batches import sampled
from pfljax.stages.combining import Combining, Uploads, uploads_of
from pfljax.stages.stage import StageState

ROOT = 0x2007  # folded into the server's keys to draw its examples, and to train on them
BY_ROOT = "the examples that the server has"


class Root(NamedTuple):
    """What the server needs to play as a client.

    Attributes:
        data: Its examples.
        row: A client's first row.
    """

    data: Split
    row: PyTree


@dataclasses.dataclass(frozen=True)
class Trusting(Combining):
    """FLTrust: a rule that compares each part with the one that the server makes of its examples.

    Attributes:
        root_examples: Number of examples; all that there are, if these are fewer.
    """

    root_examples: int

    def declare(self, method: Algorithm) -> Algorithm:
        return dataclasses.replace(method, ledger=method.ledger.with_unaccounted(BY_ROOT))

    @property
    def changes(self) -> tuple[str, ...]:
        return ()  # the server keeps no sum of its own changes

    def server_note(self, key: Key, start: Start, clients: ClientData) -> Root:
        if tree.num_rows(start.models) > 1 or self.method.any_age:
            text = "accepted for this method, whose server has several models: the other ones"
            raise ArgumentError("aggregator", text, "fltrust")
        problem = self.problem
        capacity = min(self.root_examples, problem.num_clients * problem.n_max)
        draw_key = jax.random.fold_in(key, ROOT)
        data = sampled(draw_key, clients.train, capacity, clients.train.size.sum())
        row = self.method.first_row(key, jnp.zeros((), jnp.int32), start).row
        return Root(data, row)

    def client_note(self, note: Root, client: Array) -> Uploads:
        return {}

    def _roots(self, key: Key, state: State, note: StageState) -> Uploads:
        data, row = note.server
        zero = jnp.zeros((), jnp.int32)
        context = ClientContext(
            key=jax.random.fold_in(key, ROOT),
            round=state.round,
            step=zero,
            index=jnp.zeros((1,), jnp.int32),
            server=state.server.state,
            client=zero,
        )
        alone = ClientData(data, data._replace(size=zero), jnp.zeros((), bool))
        output = self.method.client_update(context, state.models, row, alone)
        return uploads_of(output).uploads
