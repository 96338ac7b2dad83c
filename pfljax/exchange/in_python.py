"""The plan for debugging: clients in a plain Python loop, with concrete arrays in every function of a method."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import Aggregate, Array, Params, PyTree, Topology, Upload
from pfljax.exchange.exchange import Clients
from pfljax.exchange.plan import ExecutionPlan
from pfljax.exchange.views import view


@dataclasses.dataclass(frozen=True)
class PythonPlan(ExecutionPlan):
    """Works client by client on one device. Run it under `jax.disable_jit`, so that loops inside are Python's, too."""

    def over_models(self, fn: Callable[..., PyTree], *stacks: PyTree) -> PyTree:
        """Applies `fn` to each of J stacked models."""
        rows = [
            fn(*tree.take(stacks, jnp.int32(number))) for number in range(tree.num_rows(stacks))
        ]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    over_rows = over_models

    def _exchange(
        self, client_fn: Callable, models: Params, clients: Clients, common: tuple
    ) -> Any:
        index = clients.index
        held = clients.index.shape[1]
        topology = clients.topology
        adjacent = {Topology.OWN: held, Topology.PUSH: 1}.get(topology, 0)
        outputs = []
        places = []
        for client in range(len(index)):
            place = client * adjacent + jnp.arange(adjacent) if adjacent else index[client]
            row = tree.take(clients.rows, jnp.int32(client))
            data = view(clients.data, jnp.int32(client))
            outputs.append(client_fn(tree.take(models, place), row, data, *common))
            places.append(index[client] if topology is Topology.PUSH else place)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)
        uploads = jax.tree.leaves(stacked.upload)
        num_sent = uploads[0].shape[1] if uploads and topology is not Topology.PUSH else held
        sent = jnp.ones((len(index), num_sent), bool) if stacked.sent is None else stacked.sent
        # If no part of a server's model is shared, no leaf shows that there is one.
        num_models = tree.num_rows(models) if jax.tree.leaves(models) else 1
        # dropped where nothing is sent
        receivers = jnp.where(sent, jnp.stack(places)[:, :num_sent], num_models)
        count = jnp.zeros((num_models,), jnp.int32).at[receivers].add(1, mode="drop")

        def total(leaf: Array) -> Array:
            if topology is Topology.PUSH:
                assert stacked.mixing_weights is not None
                leaf = tree.per_row(stacked.mixing_weights, leaf[:, None]) * leaf[:, None]
            return (
                jnp.zeros((num_models, *leaf.shape[2:]), leaf.dtype)
                .at[receivers]
                .add(leaf, mode="drop")
            )

        def replaced(leaf: Array, model: Array) -> Array:
            return jnp.asarray(model).at[receivers].set(leaf, mode="drop")

        if topology.moves:
            upload = jax.tree.map(total, stacked.upload)
        else:
            upload = Upload(
                jax.tree.map(replaced, stacked.upload.update, models) if uploads else models
            )
        sent = jnp.pad(sent, ((0, 0), (0, held - num_sent)))
        aggregate = Aggregate(
            upload, count, sent, stacked.told, stacked.participation, stacked.notes
        )
        return stacked.row, aggregate


def calling(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """In place of `jax.jit`: the function, called with all loops and conditions in Python."""

    @functools.wraps(fn)
    def called(*args: PyTree) -> PyTree:
        with jax.disable_jit():
            return fn(*jax.tree.map(jnp.asarray, args))

    return called
