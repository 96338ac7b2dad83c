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
from pfljax.contract.types import Algorithm, ClientContext, ClientData, PyTree, Split
from pfljax.local.batches import sampled
from pfljax.local.problem import Problem
from pfljax.stages.combining import parts_of
from pfljax.stages.notes import Noted, inner, with_notes

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


def with_root(problem: Problem, algorithm: Algorithm, num: int) -> Algorithm:
    """The algorithm whose server makes an update of `num` examples of its own; see `Algorithm.root`.

    Args:
        problem: The problem of the algorithm.
        algorithm: Any algorithm, before other stages.
        num: Number of examples; all that there are, if these are fewer.

    Raises:
        ArgumentError: if no server averages models or updates; when it is traced, if it averages several models.
    """
    if not algorithm.averages:
        text = "accepted for this method: mean; no server averages models or updates"
        raise ArgumentError("aggregator", text, "fltrust")
    noted, zero = with_notes(algorithm), jnp.zeros((), jnp.int32)
    capacity = min(num, problem.num_clients * problem.n_max)

    def start(key, clients):
        begun = noted.start(key, clients)
        if tree.num_rows(begun.models) > 1 or algorithm.any_age:
            text = "accepted for this method, whose server has several models: the other ones"
            raise ArgumentError("aggregator", text, "fltrust")
        data = sampled(jax.random.fold_in(key, ROOT), clients.train, capacity, clients.train.size.sum())
        row = algorithm.first_row(key, zero, begun._replace(server=begun.server.inner)).row
        return begun._replace(server=Noted(begun.server.inner, Root(data, row)))

    def root(key, state):
        (data, row), state = state.server.note, inner(state)
        key = jax.random.fold_in(key, ROOT)
        context = ClientContext(key, state.round, zero, jnp.zeros((1,), jnp.int32), state.server, zero)
        alone = ClientData(data, data._replace(size=zero), jnp.zeros((), bool))
        out = algorithm.client_update(context, state.models, row, alone)
        return parts_of(out)[0]

    return dataclasses.replace(noted, start=start, root=root, ledger=algorithm.ledger.beside(BY_ROOT))
