"""Bytes that a client receives and sends in an exchange, derived from shapes and tracing, never declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Algorithm,
    Array,
    ClientOutput,
    Params,
    Participation,
    PyTree,
    Topology,
    Traffic,
)


class Messages(NamedTuple):
    """What clients receive and send in an exchange, as masks.

    Attributes:
        received: (..., J) models that they receive.
        sent: (..., J) contributions that they send.
        active: (...) whether they take part.
    """

    received: Array
    sent: Array
    active: Array

    def num_bytes(self, moved: Traffic) -> tuple[Array, Array]:
        """Bytes that all of them receive and send, given those of each part."""
        num_received = self.received.sum(dtype=jnp.float32)
        num_sent = self.sent.sum(dtype=jnp.float32)
        num_active = self.active.sum(dtype=jnp.float32)
        # As integers of 32 bits, the bytes of a large model would overflow.
        model_bytes = jnp.asarray(moved.model, jnp.float32)
        server_bytes = jnp.asarray(moved.server, jnp.float32)
        upload_bytes = jnp.asarray(moved.upload, jnp.float32)
        report_bytes = jnp.asarray(moved.report, jnp.float32)
        down = num_received * model_bytes + num_active * server_bytes
        up = num_sent * upload_bytes + num_active * report_bytes
        return down, up


def messages(
    algorithm: Algorithm, client: Array, index: Array, sent: Array, first: Array
) -> Messages:
    """The messages of an exchange.

    Args:
        algorithm: The method.
        client: (...) numbers of the clients.
        index: (..., J) from `Algorithm.download`.
        sent: (..., J) which contributions are sent.
        first: (..., 1) or () whether it is a round's first exchange, in which all clients that are there take part.
    """
    topology = algorithm.topology
    travels = jnp.full_like(index, topology.moves, bool)
    if topology.between_clients:
        travels = index != client[..., None]  # also for a push: as many models arrive as are sent
    uploaded = travels | (algorithm.via_server and topology.moves)
    # After the first exchange, a client without a batch left no longer takes part.
    active = sent | first
    return Messages(
        received=travels & active,
        sent=uploaded & sent,
        active=jnp.any(active, axis=-1),
    )


def seconds_of(participation: Participation) -> Array | None:
    """() simulated seconds of an exchange: those of the slowest client that is there; if none is, of the wait.

    None without a clock.
    """
    seconds = participation.seconds
    away = participation.away
    if seconds is None:
        return None
    if away is not None:
        does_not_count = away & ~away.all()
        seconds = jnp.where(does_not_count, 0, seconds)
    return seconds.max()


def client_traffic(
    algorithm: Algorithm, models: Params, output: ClientOutput, server: float
) -> Traffic:
    """As `of_exchange`, of the models (J, ...) that one client received and of its output, as sent."""
    upload = output.upload
    if algorithm.topology is Topology.PUSH:
        upload = tree.stack_one(upload)
    reported = jax.tree.leaves((output.report, output.notes))
    arrays = [leaf for leaf in reported if leaf.ndim]  # scalars are free
    counted = Traffic(
        model=tree.row_bytes(models),
        upload=tree.row_bytes(upload),
        report=tree.num_bytes(arrays),
        server=server,
        shapes=tree.shapes_of_rows((models, upload)),
    )
    return algorithm.traffic(counted) if algorithm.traffic else counted


def exchange_traffic(models: Params, aggregate: Aggregate, server: float) -> Traffic:
    """Bytes of one exchange.

    Args:
        models: The stack of models that clients receive.
        aggregate: What came back.
        server: Bytes that one client reads from the server's state; see `bytes_read`.
    """
    reported = jax.tree.leaves((aggregate.report, aggregate.notes))
    arrays = [leaf for leaf in reported if leaf.ndim > 1]  # scalars of each client are free
    return Traffic(
        model=tree.row_bytes(models),
        upload=tree.row_bytes(aggregate.upload),
        report=tree.row_bytes(arrays),
        server=server,
        shapes=tree.shapes_of_rows((models, aggregate.upload)),
    )


def bytes_read(fn: Callable[..., PyTree], server: PyTree, *args: PyTree) -> int:
    """Bytes of the server's arrays, except scalars, that fn(server, *args) reads; takes arrays or their shapes.

    An array counts in full if anything is computed from it, or if it is passed to a jitted function.
    """
    leaves = jax.tree.leaves(server)
    if not any(leaf.ndim for leaf in leaves):
        return 0

    def shape(leaf: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    shapes = jax.tree.map(shape, (server, *args))
    jaxpr = jax.make_jaxpr(fn)(*shapes).jaxpr
    used = {id(var) for var in jaxpr.outvars}
    for equation in jaxpr.eqns:
        used.update(id(var) for var in equation.invars)
    variables = jaxpr.invars[: len(leaves)]
    read = [leaf for leaf, var in zip(leaves, variables, strict=True) if id(var) in used]
    return tree.num_bytes([leaf for leaf in read if leaf.ndim])
