"""How models reach the clients of a device, and contributions their models' owners.

Every route has the same three verbs: a block of clients receives models, deposits what it makes of them, and in the end
each owner's contributions are collected. In between, an exchange carries what a route keeps: the sums so far, or under
"own" the models themselves, replaced in place.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pfljax.core import tree
from pfljax.core.pooled import is_pooled
from pfljax.core.types import Array, ClientOutput, Params, PyTree
from pfljax.engine.layout import block, by_client, flat, replace

AXIS = "clients"  # of the mesh of devices
OWN_MESSAGE = 64 << 10  # bytes from which on an array is a message of its own
SPREAD, WHOLE = PartitionSpec(AXIS), PartitionSpec()
Kept = tuple[PyTree, jax.Array]  # sums or models, and (N,) the number of contributions to each


@dataclasses.dataclass(frozen=True)
class Block:
    """Clients that work side by side on a device.

    Attributes:
        at: () int32, place of the first.
        index: (W, J) int32, the models that each receives.
    """

    at: Array
    index: Array


class Route(abc.ABC):
    """A way between clients and models.

    Attributes:
        models_at: How the stack of models lies on the devices when the exchange begins.
        sums_at: How what was collected lies on them when it ends.
        models_held: Number of models to a client where the stack holds the clients' own, one client after the other;
            else 0.
        sums_held: The same of what is collected.
    """

    models_at = sums_at = WHOLE
    models_held = sums_held = 0

    def open(self, models: Params) -> Params:
        """The stack that `receive` reads, made once on each device."""
        return models

    @abc.abstractmethod
    def start(self, models: Params, index: Array, output: Callable[[], ClientOutput]) -> Kept:
        """What is kept at the beginning; `output` tells the shapes of what a block of clients puts out."""

    @abc.abstractmethod
    def receive(self, models: Params, kept: Any, at: Block) -> Params:
        """The models that a block of clients receives, (W, J, ...); only `Own` reads what is kept."""

    @abc.abstractmethod
    def deposit(self, kept: Kept, at: Block, output: ClientOutput, sent: Array) -> Kept:
        """Takes a block's contributions; `sent` (W, J') bool says which of them count."""

    def collect(self, kept: Kept) -> Kept:
        """Every model's sum, and the number of contributions to it, where `sums_at` says."""
        return kept


@dataclasses.dataclass(frozen=True)
class Own(Route):
    """Every model stays with its client, and is replaced in place by the client's upload."""

    models_held: int  # J, one after the other: a stack of another shape, (S, J, ...), would be copied

    models_at = sums_at = SPREAD

    @property
    def sums_held(self) -> int:
        return self.models_held

    def start(self, models: Params, index: Array, output: Callable[[], ClientOutput]) -> Kept:
        return models, jnp.zeros((index.size,), jnp.int32)

    def receive(self, models: Params, kept: Any, at: Block) -> Params:
        return by_client(self._block(kept[0], at), self.models_held)

    def deposit(self, kept: Kept, at: Block, output: ClientOutput, sent: Array) -> Kept:
        (models, count), row = kept, at.at * self.models_held
        if jax.tree.leaves(output.upload):
            new = flat(output.upload)
            if output.sent is not None:
                new = tree.where(sent.reshape(-1), new, self._block(models, at))
            models = replace(models, row, new)
        return models, replace(count, row, sent.reshape(-1))

    def _block(self, models: Params, at: Block) -> Params:
        return block(models, at.at * self.models_held, at.index.shape[0] * self.models_held)


@dataclasses.dataclass(frozen=True)
class Server(Route):
    """All N models are on every device; each device sums its clients' contributions, and the devices theirs."""

    num_models: int  # of which a device keeps sums
    devices: int

    def start(self, models: Params, index: Array, output: Callable[[], ClientOutput]) -> Kept:
        out = output()
        return self.empty(out.upload, num_leading=2 if out.mixing_weights is None else 1)

    def empty(self, upload: PyTree, num_leading: int) -> Kept:
        sums = jax.tree.map(lambda leaf: jnp.zeros((self.num_models, *leaf.shape[num_leading:]), leaf.dtype), upload)
        return sums, jnp.zeros((self.num_models,), jnp.int32)

    def receive(self, models: Params, kept: Any, at: Block) -> Params:
        return tree.take(models, at.index)

    def deposit(self, kept: Kept, at: Block, output: ClientOutput, sent: Array) -> Kept:
        index = at.index[:, : sent.shape[1]]
        return _add(kept, index, sent, output.upload, output.mixing_weights)

    def collect(self, kept: Kept) -> Kept:
        return jax.lax.psum(kept, AXIS) if self.devices > 1 else kept


@dataclasses.dataclass(frozen=True)
class Gather(Server):
    """Every device has the models of its clients; they are copied to all, and contributions summed at their owners'."""

    models_at = sums_at = SPREAD

    def open(self, models: Params) -> Params:
        return jax.lax.all_gather(models, AXIS, tiled=True)

    def collect(self, kept: Kept) -> Kept:
        return jax.lax.psum_scatter(kept, AXIS, scatter_dimension=0, tiled=True)


@dataclasses.dataclass(frozen=True)
class Ring(Server):
    """Every device has the models of its clients, N / D; what a block needs and sends goes around the ring of devices.

    What travels visits every device once. Memory beside the stack is that of one block's models.
    """

    models_at = sums_at = SPREAD

    def receive(self, models: Params, kept: Any, at: Block) -> Params:
        return self.fetch(models, at.index)

    def fetch(self, models: PyTree, index: Array) -> PyTree:
        """models[index] of the whole stack: the index goes around, and each device fills in what it has.

        Pooled examples arrive as copies.
        """

        leaves, treedef = jax.tree.flatten(models, is_leaf=is_pooled)

        def visit(travels, _):
            index, rows = travels
            local, mine = self._mine(index)
            found = [leaf.examples(leaf.index[local]) if is_pooled(leaf) else tree.take(leaf, local) for leaf in leaves]
            return (index, tree.where(mine, found, rows)), ()

        start = [jnp.zeros((*index.shape, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        # Sent off empty, so that the last hop brings it home.
        return jax.tree.unflatten(treedef, self._visit_all(visit, (self._hop(index), start), ())[0][1])

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
        """The whole stack with rows `ids` replaced."""

        def visit(travels, stack):
            ids, rows = travels
            local, mine = self._mine(ids)
            local = jnp.where(mine, local, self.num_models)
            # Padded ids repeat the last row with the same content, so the order of writes does not matter.
            return travels, jax.tree.map(lambda leaf, new: leaf.at[local].set(new, mode="drop"), stack, rows)

        return self._visit_all(visit, (ids, rows), stack)[1]

    def _hop(self, travels: PyTree) -> PyTree:
        neighbors = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        packed, unpack = _pack(travels)
        return unpack(jax.tree.map(lambda part: jax.lax.ppermute(part, AXIS, neighbors), packed))

    def _visit_all(self, visit: Callable[[Any, Any], tuple[Any, Any]], travels: Any, stays: Any) -> tuple[Any, Any]:
        """(travels, stays) <- visit(travels, stays) on this device and, hop by hop, on all others."""
        return jax.lax.fori_loop(
            1, self.devices, lambda _, carry: visit(self._hop(carry[0]), carry[1]), visit(travels, stays)
        )

    def _mine(self, index: Array) -> tuple[Array, Array]:
        local = index - jax.lax.axis_index(AXIS) * self.num_models
        mine = (local >= 0) & (local < self.num_models)
        return jnp.where(mine, local, 0), mine


@dataclasses.dataclass(frozen=True)
class OwnFirst(Route):
    """The models of column 0 of the index are the clients' own and stay where they are; the others go by `others`."""

    others: Server

    @property
    def models_at(self) -> PartitionSpec:
        return self.others.models_at

    @property
    def sums_at(self) -> PartitionSpec:
        return self.others.sums_at

    def open(self, models: Params) -> Params:
        return self.others.open(models)

    def start(self, models: Params, index: Array, output: Callable[[], ClientOutput]) -> Kept:
        return self.others.start(models, index, output)

    def receive(self, models: Params, kept: Any, at: Block) -> Params:
        own = by_client(block(models, at.at, at.index.shape[0]), 1)
        if at.index.shape[1] == 1:
            return own
        others = self.others.receive(models, kept, dataclasses.replace(at, index=at.index[:, 1:]))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), own, others)

    def deposit(self, kept: Kept, at: Block, output: ClientOutput, sent: Array) -> Kept:
        own, others = (jax.tree.map(lambda leaf, p=p: leaf[:, p], output.upload) for p in (0, slice(1, None)))
        if sent.shape[1] > 1:
            to_others = dataclasses.replace(at, index=at.index[:, 1:])
            kept = self.others.deposit(kept, to_others, output._replace(upload=others), sent[:, 1:])
        rows = block(kept, at.at, sent.shape[0])
        added = tree.add(rows, (own, jnp.ones_like(rows[1])))
        return replace(kept, at.at, tree.where(sent[:, 0], added, rows))

    def collect(self, kept: Kept) -> Kept:
        return self.others.collect(kept)


@dataclasses.dataclass(frozen=True)
class Push(Route):
    """A client receives its own model where it lies; its one upload goes by `uploads` to all models of its index."""

    uploads: Server

    models_at = SPREAD
    models_held = 1

    @property
    def sums_at(self) -> PartitionSpec:
        return self.uploads.sums_at

    def start(self, models: Params, index: Array, output: Callable[[], ClientOutput]) -> Kept:
        return self.uploads.start(models, index, output)

    def receive(self, models: Params, kept: Any, at: Block) -> Params:
        return by_client(block(models, at.at, at.index.shape[0]), 1)

    def deposit(self, kept: Kept, at: Block, output: ClientOutput, sent: Array) -> Kept:
        return self.uploads.deposit(kept, at, output, sent)

    def collect(self, kept: Kept) -> Kept:
        return self.uploads.collect(kept)


def is_dense(held: int, num_models: int) -> bool:
    """Whether so many of the models count an upload that all are best multiplied by a weight, most of them 0."""
    return held * 8 > num_models


def _add(kept: Kept, index: Array, mask: Array, upload: PyTree, weights: Array | None) -> Kept:
    """Adds upload[w, j], or weights[w, j] upload[w], to the sum of model index[w, j] where mask[w, j] holds."""
    sums, count = kept
    num_models, (width, held) = count.shape[0], index.shape
    index = jnp.where(mask, index, num_models)  # out of range: dropped
    if weights is None:
        sums = jax.tree.map(lambda s, u: s.at[index].add(u, mode="drop"), sums, upload)
    elif is_dense(held, num_models):  # a product of matrices
        matrix = jnp.zeros((num_models, width))
        matrix = matrix.at[index, jnp.arange(width)[:, None]].add(weights, mode="drop")
        sums = jax.tree.map(lambda s, u: s + jnp.tensordot(matrix, u, axes=1), sums, upload)
    else:
        weigh = lambda u: tree.per_row(weights, u[:, None]) * u[:, None]
        sums = jax.tree.map(lambda s, u: s.at[index].add(weigh(u), mode="drop"), sums, upload)
    return sums, count.at[index].add(1, mode="drop")


def _pack(arrays: PyTree) -> tuple[dict[str, Array], Callable[[dict[str, Array]], PyTree]]:
    """The messages that hold some arrays, and the way back.

    A large array is a message of its own; small ones of a dtype share one, since every message costs the same however
    little it holds.
    """
    leaves, treedef = jax.tree.flatten(arrays)
    kinds: dict[str, list[Array]] = {}
    places = []
    for number, leaf in enumerate(leaves):
        name = f"{number}" if leaf.nbytes > OWN_MESSAGE else f"{leaf.dtype}"
        kind = kinds.setdefault(name, [])
        start = sum(part.size for part in kind)
        places.append((name, start, start + leaf.size, leaf.shape))
        kind.append(leaf if leaf.nbytes > OWN_MESSAGE else leaf.reshape(-1))

    def unpack(packed):
        part = lambda name, start, stop, shape: (
            packed[name][start:stop].reshape(shape) if name[0].isalpha() else packed[name]
        )
        return jax.tree.unflatten(treedef, [part(*place) for place in places])

    return {name: parts[0] if len(parts) == 1 else jnp.concatenate(parts) for name, parts in kinds.items()}, unpack
