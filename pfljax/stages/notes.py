"""What a stage keeps beside the server's state and beside each client's row, out of the method's sight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from pfljax.contract.types import Algorithm, Array, ClientContext, ClientData, First, PyTree, State


class Noted(NamedTuple):
    """A part of the state with a stage's note.

    Attributes:
        inner: The method's server state or row.
        note: The stage's.
    """

    inner: PyTree
    note: PyTree


def bare(context: ClientContext) -> ClientContext:
    """The context as the method knows it."""
    return context._replace(server=context.server.inner)


def inner(state: State) -> State:
    """The state as the method knows it."""
    return state._replace(server=state.server.inner, clients=state.clients.inner)


def with_notes(
    algorithm: Algorithm,
    server: Callable[[ClientData], PyTree] = lambda clients: (),
    row: Callable[[PyTree, Array], PyTree] = lambda note, client: (),
) -> Algorithm:
    """The algorithm with notes, which it leaves as they are; a stage then replaces what changes or reads them.

    Args:
        algorithm: Any algorithm.
        server: The stacked data of all clients -> the note beside the server's state.
        row: (that note, a client's number) -> the note beside its row.
    """

    def start(key, clients):
        begun = algorithm.start(key, clients)
        return begun._replace(server=Noted(begun.server, server(clients)))

    def first_row(key, client, start):
        first = algorithm.first_row(key, client, start._replace(server=start.server.inner))
        return First(Noted(first.row, row(start.server.note, client)), first.model, first.optimizer)

    def client_update(context, models, row, data):
        out = algorithm.client_update(bare(context), models, row.inner, data)
        return out._replace(client=Noted(out.client, row.note))

    def server_update(key, state, aggregate):
        found, metrics = algorithm.server_update(key, inner(state), aggregate)
        server, clients = Noted(found.server, state.server.note), Noted(found.clients, state.clients.note)
        return found._replace(server=server, clients=clients), metrics

    own = lambda row: row.inner if row else row  # newcomers have none
    of_row = lambda fn: fn and (lambda context, row, *rest: fn(bare(context), own(row), *rest))
    changes: dict[str, Any] = {name: of_row(getattr(algorithm, name)) for name in ("download", "whom")}
    if (predict := algorithm.predict) is not None:
        changes["predict"] = lambda context, models, row, data: predict(bare(context), models, own(row), data)
    for name in ("adapt", "tune"):
        if (fn := getattr(algorithm, name)) is not None:
            changes[name] = lambda context, *rest, fn=fn: fn(bare(context), *rest)
    if (sample := algorithm.sample) is not None:
        changes["sample"] = lambda key, state, clients: sample(key, inner(state), clients)
    if (root := algorithm.root) is not None:
        changes["root"] = lambda key, state: root(key, inner(state))
    used = of_row(algorithm.report.collaboration)
    return dataclasses.replace(
        algorithm,
        start=start,
        first_row=first_row,
        client_update=client_update,
        server_update=server_update,
        report=dataclasses.replace(algorithm.report, collaboration=used),
        **changes,
    )
