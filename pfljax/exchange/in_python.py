"""The plan for debugging: clients in a plain Python loop, with concrete arrays in every function of a method."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import (
    Aggregate,
    Array,
    ClientOutput,
    Params,
    PyTree,
    Topology,
    Upload,
)
from pfljax.exchange.exchange import Clients
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.views import view


@dataclasses.dataclass(frozen=True)
class PythonPlan(ExecutionPlan):
    """Works client by client on one device. Run it under `jax.disable_jit`, so that loops inside are Python's, too."""

    def over_models(self, fn: Callable[..., PyTree], *stacks: PyTree) -> PyTree:
        """Applies `fn` to each of J stacked models."""
        numbers = range(tree.num_rows(stacks))
        rows = [tree.take(stacks, jnp.int32(number)) for number in numbers]
        results = [fn(*row) for row in rows]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)

    over_rows = over_models

    def _exchange(
        self, client_fn: Callable, models: Params, clients: Clients, common: tuple
    ) -> Any:
        index = clients.index
        num_clients, num_received = index.shape
        topology = clients.topology

        # Every client receives its models and works on them; `receivers` get what it sends.
        outputs = []
        receivers = []
        for client in range(num_clients):
            received = _received_by(client, clients)
            row = tree.take(clients.rows, jnp.int32(client))
            data = view(clients.data, jnp.int32(client))
            outputs.append(client_fn(tree.take(models, received), row, data, *common))
            receivers.append(index[client] if topology is Topology.PUSH else received)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)
        aggregate = collect(stacked, models, topology, jnp.stack(receivers), num_received)
        return stacked.row, aggregate


def collect(
    outputs: ClientOutput,
    models: Params,
    topology: Topology,
    receivers: Array,
    num_received: int,
) -> Aggregate:
    """Adds up what S clients send, at the models' owners.

    Args:
        outputs: What the clients return, as it is sent, stacked: leaves (S, ...).
        models: The stack of N models, leaves (N, ...).
        topology: The method's.
        receivers: (S, J) the models whose owners get a client's contributions: those that it received, or under "push"
            those that it sends to. Numbers outside of 0..N-1 get nothing.
        num_received: J, the number of models in a client's index.
    """
    # Which contributions are sent, to which models; out-of-range numbers are dropped.
    uploads = jax.tree.leaves(outputs.upload)
    num_sent = num_received
    if uploads and topology is not Topology.PUSH:
        num_sent = uploads[0].shape[1]
    sent = outputs.sent
    if sent is None:
        sent = jnp.ones((receivers.shape[0], num_sent), bool)
    # If no part of a server's model is shared, no leaf shows that there is one.
    num_models = tree.num_rows(models) if jax.tree.leaves(models) else 1
    owners = jnp.where(sent, receivers[:, :num_sent], num_models)
    count = jnp.zeros((num_models,), jnp.int32)
    count = count.at[owners].add(1, mode="drop")

    def total(leaf: Array) -> Array:
        if topology is Topology.PUSH:
            assert outputs.mixing_weights is not None
            leaf = tree.per_row(outputs.mixing_weights, leaf[:, None]) * leaf[:, None]
        sums = jnp.zeros((num_models, *leaf.shape[2:]), leaf.dtype)
        return sums.at[owners].add(leaf, mode="drop")

    def replaced(leaf: Array, model: Array) -> Array:
        return jnp.asarray(model).at[owners].set(leaf, mode="drop")

    # Contributions are summed at the models' owners, or a client's models replaced.
    if topology.moves:
        upload = jax.tree.map(total, outputs.upload)
    elif uploads:
        upload = Upload(jax.tree.map(replaced, outputs.upload.update, models))
    else:
        upload = Upload(models)

    sent = jnp.pad(sent, ((0, 0), (0, num_received - num_sent)))
    return Aggregate(
        upload=upload,
        num_sent=count,
        sent=sent,
        report=outputs.report,
        participation=outputs.participation,
        notes=outputs.notes,
    )


def _received_by(client: int, clients: Clients) -> Array:
    """(J,) numbers of the models that a client receives: its own, or those in its index."""
    topology = clients.topology
    if topology is Topology.PUSH:
        return client + jnp.arange(1)
    num_received = clients.index.shape[1]
    if topology is Topology.OWN:
        return client * num_received + jnp.arange(num_received)
    return clients.index[client]


def calling(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """In place of `jax.jit`: the function, called with all loops and conditions in Python."""

    @functools.wraps(fn)
    def called(*args: PyTree) -> PyTree:
        with jax.disable_jit():
            arrays = jax.tree.map(jnp.asarray, args)
            return fn(*arrays)

    return called
