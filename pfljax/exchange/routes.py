"""Routes that carry models to clients and contributions back to the models' owners.

Every route has three operations: a block of clients receives models, deposits its contributions, and at the end each
owner's contributions are collected. In between, the exchange carries the route's state: the sums so far or, under
"own", the models themselves, replaced in place.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pfljax.contract import tree
from pfljax.contract.pooled import is_pooled
from pfljax.contract.types import Array, ClientOutput, Params, PyTree
from pfljax.contract.vectors import Packed, pack
from pfljax.exchange.layout import block, by_client, flat, replace
from pfljax.exchange.model_axis import WORTH, devices_here, on_parts

AXIS = "clients"  # axis of the device mesh
OWN_MESSAGE = 64 << 10  # arrays of at least this many bytes travel as separate messages
SPREAD = PartitionSpec(AXIS)
WHOLE = PartitionSpec()
Kept = tuple[PyTree, jax.Array]  # sums or models, and (N,), the number of contributions to each


@dataclasses.dataclass(frozen=True)
class Block:
    """Clients that a device processes side by side.

    Attributes:
        at: () int32, position of the first client.
        index: (W, J) int32, the models that each client receives.
    """

    at: Array
    index: Array


class Route(abc.ABC):
    """A route between clients and models.

    Attributes:
        models_at: Sharding of the stack of models when the exchange begins.
        sums_at: Sharding of the collected sums when it ends.
        models_held: Number of models per client if the stack holds the clients' own models, client by client; otherwise
            0.
        sums_held: The same for the collected sums.
    """

    models_at = sums_at = WHOLE
    models_held = sums_held = 0

    def open(self, models: Params) -> Params:
        """Makes the stack that `receive` reads, once on each device."""
        return models

    @abc.abstractmethod
    def start(self, models: Params, index: Array, output: Callable[[], ClientOutput]) -> Kept:
        """The initial carry; `output` provides the output shapes of a block of clients."""

    @abc.abstractmethod
    def receive(self, models: Params, kept: Any, at: Block) -> Params:
        """The models that a block of clients receives, (W, J, ...); only `Own` reads the carry."""

    @abc.abstractmethod
    def deposit(self, kept: Kept, at: Block, output: ClientOutput, sent: Array) -> Kept:
        """Adds a block's contributions; `sent` (W, J') bool says which of them count."""

    def collect(self, kept: Kept) -> Kept:
        """The sum of contributions to every model, and their number, sharded as in `sums_at`."""
        return kept


@dataclasses.dataclass(frozen=True)
class Own(Route):
    """Every model stays with its client, whose update replaces it in place."""

    models_held: int  # J, consecutive: a stack of shape (S, J, ...) would be copied

    models_at = sums_at = SPREAD

    @property
    def sums_held(self) -> int:
        return self.models_held

    def start(self, models: Params, index: Array, output: Callable[[], ClientOutput]) -> Kept:
        return models, jnp.zeros((index.size,), jnp.int32)

    def receive(self, models: Params, kept: Any, at: Block) -> Params:
        return by_client(self._block(kept[0], at), self.models_held)

    def deposit(self, kept: Kept, at: Block, output: ClientOutput, sent: Array) -> Kept:
        (models, count) = kept
        row = at.at * self.models_held
        if jax.tree.leaves(output.upload.update):
            new = flat(output.upload.update)
            if output.sent is not None:
                new = tree.where(sent.reshape(-1), new, self._block(models, at))
            models = replace(models, row, new)
        return models, replace(count, row, sent.reshape(-1))

    def _block(self, models: Params, at: Block) -> Params:
        return block(models, at.at * self.models_held, at.index.shape[0] * self.models_held)


@dataclasses.dataclass(frozen=True)
class AtServer(Route):
    """All N models are on every device; sums go over each device's clients, then over devices."""

    num_models: int  # a device keeps sums for all of them
    devices: int

    def start(self, models: Params, index: Array, output: Callable[[], ClientOutput]) -> Kept:
        out = output()
        return self.empty(out.upload, num_leading=2 if out.mixing_weights is None else 1)

    def empty(self, upload: PyTree, num_leading: int) -> Kept:
        sums = jax.tree.map(
            lambda leaf: jnp.zeros((self.num_models, *leaf.shape[num_leading:]), leaf.dtype), upload
        )
        return sums, jnp.zeros((self.num_models,), jnp.int32)

    def receive(self, models: Params, kept: Any, at: Block) -> Params:
        return tree.take(models, at.index)

    def deposit(self, kept: Kept, at: Block, output: ClientOutput, sent: Array) -> Kept:
        index = at.index[:, : sent.shape[1]]
        return _add(kept, index, sent, output.upload, output.mixing_weights)

    def collect(self, kept: Kept) -> Kept:
        return jax.lax.psum(kept, AXIS) if self.devices > 1 else kept


@dataclasses.dataclass(frozen=True)
class Gather(AtServer):
    """Every device has its clients' models; they are copied to all devices, and contributions summed at the owners."""

    models_at = sums_at = SPREAD

    def open(self, models: Params) -> Params:
        return on_parts(lambda part: jax.lax.all_gather(part, AXIS, tiled=True), models)

    def collect(self, kept: Kept) -> Kept:
        return on_parts(
            lambda part: jax.lax.psum_scatter(part, AXIS, scatter_dimension=0, tiled=True), kept
        )


@dataclasses.dataclass(frozen=True)
class Ring(AtServer):
    """Every device has its clients' N / D models; a block's models and contributions travel around the ring of devices.

    Each message visits every device once. Besides the stack, this takes the memory of one block's models.
    """

    models_at = sums_at = SPREAD

    def receive(self, models: Params, kept: Any, at: Block) -> Params:
        return self.fetch(models, at.index)

    def fetch(self, models: PyTree, index: Array) -> PyTree:
        """Returns models[index] of the whole stack: the index travels around, and each device fills in the rows it has.

        Pooled examples arrive as copies.
        """

        leaves, treedef = jax.tree.flatten(models, is_leaf=is_pooled)

        def visit(travels, _):
            index, rows = travels
            local, mine = self._mine(index)
            found = [
                leaf.examples(leaf.index[local]) if is_pooled(leaf) else tree.take(leaf, local)
                for leaf in leaves
            ]
            return (index, tree.where(mine, found, rows)), ()

        start = [jnp.zeros((*index.shape, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        # It starts empty, so that the last hop brings it home.
        return jax.tree.unflatten(
            treedef, self._visit_all(visit, (self._hop(index), start), ())[0][1]
        )

    def deposit(self, kept: Kept, at: Block, output: ClientOutput, sent: Array) -> Kept:
        def visit(travels, kept):
            index, upload, weights = travels
            local, mine = self._mine(index)
            return travels, _add(kept, local, mine, upload, weights)

        index = jnp.where(sent, at.index[:, : sent.shape[1]], -1)
        return self._visit_all(visit, (index, output.upload, output.mixing_weights), kept)[1]

    def collect(self, kept: Kept) -> Kept:
        return kept

    def replace(self, stack: PyTree, ids: Array, rows: PyTree) -> PyTree:
        """Replaces rows `ids` of the whole stack."""

        def visit(travels, stack):
            ids, rows = travels
            local, mine = self._mine(ids)
            local = jnp.where(mine, local, self.num_models)
            # Padded ids repeat the last row with equal content, so the order of writes does not matter.
            return travels, jax.tree.map(
                lambda leaf, new: leaf.at[local].set(new, mode="drop"), stack, rows
            )

        return self._visit_all(visit, (ids, rows), stack)[1]

    def _hop(self, travels: PyTree) -> PyTree:
        neighbors = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        packed, unpack = _pack(travels)
        return unpack(jax.tree.map(lambda part: jax.lax.ppermute(part, AXIS, neighbors), packed))

    def _visit_all(
        self, visit: Callable[[Any, Any], tuple[Any, Any]], travels: Any, stays: Any
    ) -> tuple[Any, Any]:
        """Applies (travels, stays) <- visit(travels, stays) on this device and, hop by hop, on all others."""
        return jax.lax.fori_loop(
            1,
            self.devices,
            lambda _, carry: visit(self._hop(carry[0]), carry[1]),
            visit(travels, stays),
        )

    def _mine(self, index: Array) -> tuple[Array, Array]:
        local = index - jax.lax.axis_index(AXIS) * self.num_models
        mine = (local >= 0) & (local < self.num_models)
        return jnp.where(mine, local, 0), mine


@dataclasses.dataclass(frozen=True)
class Partly(Route):
    """A route that models or uploads take in part; it is that of the class itself for the rest.

    Attributes:
        others: The route.
    """

    others: AtServer

    @property
    def sums_at(self) -> PartitionSpec:
        return self.others.sums_at

    def start(self, models: Params, index: Array, output: Callable[[], ClientOutput]) -> Kept:
        return self.others.start(models, index, output)

    def deposit(self, kept: Kept, at: Block, output: ClientOutput, sent: Array) -> Kept:
        return self.others.deposit(kept, at, output, sent)

    def collect(self, kept: Kept) -> Kept:
        return self.others.collect(kept)


@dataclasses.dataclass(frozen=True)
class OwnFirst(Partly):
    """The clients' own models, in column 0 of the index, stay in place; the other models take the route `others`."""

    @property
    def models_at(self) -> PartitionSpec:
        return self.others.models_at

    def open(self, models: Params) -> Params:
        return self.others.open(models)

    def receive(self, models: Params, kept: Any, at: Block) -> Params:
        own = by_client(block(models, at.at, at.index.shape[0]), 1)
        if at.index.shape[1] == 1:
            return own
        others = self.others.receive(models, kept, dataclasses.replace(at, index=at.index[:, 1:]))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), own, others)

    def deposit(self, kept: Kept, at: Block, output: ClientOutput, sent: Array) -> Kept:
        own, others = (
            jax.tree.map(lambda leaf, p=p: leaf[:, p], output.upload) for p in (0, slice(1, None))
        )
        if sent.shape[1] > 1:
            to_others = dataclasses.replace(at, index=at.index[:, 1:])
            kept = self.others.deposit(kept, to_others, output._replace(upload=others), sent[:, 1:])
        rows = block(kept, at.at, sent.shape[0])
        added = tree.add(rows, (own, jnp.ones_like(rows[1])))
        return replace(kept, at.at, tree.where(sent[:, 0], added, rows))


@dataclasses.dataclass(frozen=True)
class Push(Partly):
    """A client receives its own model in place; its one upload takes the route `others` to all models in its index."""

    models_at = SPREAD
    models_held = 1

    def receive(self, models: Params, kept: Any, at: Block) -> Params:
        return by_client(block(models, at.at, at.index.shape[0]), 1)


def is_dense(held: int, num_models: int) -> bool:
    """Whether an upload goes to so many models that a dense product, mostly with weights 0, is best."""
    return held * 8 > num_models


def _add(kept: Kept, index: Array, mask: Array, upload: PyTree, weights: Array | None) -> Kept:
    """Adds upload[w, j], or weights[w, j] upload[w], to the sum of model index[w, j] where mask[w, j] is True."""
    sums, count = kept
    num_models = count.shape[0]
    (width, held) = index.shape
    index = jnp.where(mask, index, num_models)  # out-of-range updates are dropped
    if weights is None:
        sums = jax.tree.map(lambda s, u: s.at[index].add(u, mode="drop"), sums, upload)
    elif is_dense(held, num_models):  # a matrix product
        matrix = jnp.zeros((num_models, width))
        matrix = matrix.at[index, jnp.arange(width)[:, None]].add(weights, mode="drop")
        sums = jax.tree.map(lambda s, u: s + jnp.tensordot(matrix, u, axes=1), sums, upload)
    else:

        def weigh(u):
            return tree.per_row(weights, u[:, None]) * u[:, None]

        sums = jax.tree.map(lambda s, u: s.at[index].add(weigh(u), mode="drop"), sums, upload)
    return sums, count.at[index].add(1, mode="drop")


def _pack(arrays: PyTree) -> tuple[list[Array], Callable[[list[Array]], PyTree]]:
    """Packs arrays into messages; also returns the function that unpacks them.

    A large array is a separate message; small arrays of one dtype share a message, since every message has a fixed
    cost. An array that may be spread over several devices is not small: to share a message, it would be gathered.
    """
    leaves, treedef = jax.tree.flatten(arrays)
    spread = devices_here() > 1
    messages: dict[Any, list[int]] = {}  # numbers of the leaves in each message
    for number, leaf in enumerate(leaves):
        is_alone = leaf.nbytes > OWN_MESSAGE or (spread and leaf.size >= WORTH)
        messages.setdefault(number if is_alone else leaf.dtype, []).append(number)

    packed = []
    for name, numbers in messages.items():
        own = [leaves[number] for number in numbers]
        is_alone = isinstance(name, int)
        packed.append(Packed(own[0], lambda received: [received]) if is_alone else pack(own))

    def unpack(received: list[Array]) -> PyTree:
        unpacked = list(leaves)
        for numbers, message, array in zip(messages.values(), packed, received, strict=True):
            for number, leaf in zip(numbers, message.unpack(array), strict=True):
                unpacked[number] = leaf
        return jax.tree.unflatten(treedef, unpacked)

    return [message.array for message in packed], unpack
