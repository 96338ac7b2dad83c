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
# sums or models, and (N,), the number of contributions to each
Contributions = tuple[PyTree, jax.Array]


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
    def start(
        self, models: Params, index: Array, output: Callable[[], ClientOutput]
    ) -> Contributions:
        """The initial carry; `output` provides the output shapes of a block of clients."""

    @abc.abstractmethod
    def receive(self, models: Params, contributions: Any, here: Block) -> Params:
        """The models that a block of clients receives, (W, J, ...); only `Own` reads the carry."""

    @abc.abstractmethod
    def deposit(
        self, contributions: Contributions, here: Block, output: ClientOutput, sent: Array
    ) -> Contributions:
        """Adds a block's contributions; `sent` (W, J') bool says which of them count."""

    def collect(self, contributions: Contributions) -> Contributions:
        """The sum of contributions to every model, and their number, sharded as in `sums_at`."""
        return contributions


@dataclasses.dataclass(frozen=True)
class OwnModels(Route):
    """Every model stays with its client, whose update replaces it in place."""

    models_held: int  # J, consecutive: a stack of shape (S, J, ...) would be copied

    models_at = sums_at = SPREAD

    @property
    def sums_held(self) -> int:
        return self.models_held

    def start(
        self, models: Params, index: Array, output: Callable[[], ClientOutput]
    ) -> Contributions:
        return models, jnp.zeros((index.size,), jnp.int32)

    def receive(self, models: Params, contributions: Any, here: Block) -> Params:
        current, _ = contributions
        return by_client(self._block(current, here), self.models_held)

    def deposit(
        self, contributions: Contributions, here: Block, output: ClientOutput, sent: Array
    ) -> Contributions:
        models, count = contributions
        first_row = here.at * self.models_held
        if jax.tree.leaves(output.upload.update):
            trained = flat(output.upload.update)
            if output.sent is not None:
                trained = tree.where(sent.reshape(-1), trained, self._block(models, here))
            models = replace(models, first_row, trained)
        count = replace(count, first_row, sent.reshape(-1))
        return models, count

    def _block(self, models: Params, here: Block) -> Params:
        width = here.index.shape[0]
        return block(models, here.at * self.models_held, width * self.models_held)


@dataclasses.dataclass(frozen=True)
class AtServer(Route):
    """All N models are on every device; sums go over each device's clients, then over devices."""

    num_models: int  # a device keeps sums for all of them
    devices: int

    def start(
        self, models: Params, index: Array, output: Callable[[], ClientOutput]
    ) -> Contributions:
        shapes = output()
        num_leading = 2 if shapes.mixing_weights is None else 1
        return self.empty(shapes.upload, num_leading)

    def empty(self, upload: PyTree, num_leading: int) -> Contributions:
        """Sums of nothing, for uploads with so many leading axes of clients and their models."""

        def zeros(leaf: Array) -> Array:
            return jnp.zeros((self.num_models, *leaf.shape[num_leading:]), leaf.dtype)

        sums = jax.tree.map(zeros, upload)
        count = jnp.zeros((self.num_models,), jnp.int32)
        return sums, count

    def receive(self, models: Params, contributions: Any, here: Block) -> Params:
        return tree.take(models, here.index)

    def deposit(
        self, contributions: Contributions, here: Block, output: ClientOutput, sent: Array
    ) -> Contributions:
        index = here.index[:, : sent.shape[1]]
        return _add(contributions, index, sent, output.upload, output.mixing_weights)

    def collect(self, contributions: Contributions) -> Contributions:
        return jax.lax.psum(contributions, AXIS) if self.devices > 1 else contributions


@dataclasses.dataclass(frozen=True)
class Gather(AtServer):
    """Every device has its clients' models; they are copied to all devices, and contributions summed at the owners."""

    models_at = sums_at = SPREAD

    def open(self, models: Params) -> Params:
        def gather(stack: PyTree) -> PyTree:
            return jax.lax.all_gather(stack, AXIS, tiled=True)

        return on_parts(gather, models)

    def collect(self, contributions: Contributions) -> Contributions:
        def scatter(stack: PyTree) -> PyTree:
            return jax.lax.psum_scatter(stack, AXIS, scatter_dimension=0, tiled=True)

        return on_parts(scatter, contributions)


@dataclasses.dataclass(frozen=True)
class Ring(AtServer):
    """Every device has its clients' N / D models; a block's models and contributions travel around the ring of devices.

    Each message visits every device once. Besides the stack, this takes the memory of one block's models.
    """

    models_at = sums_at = SPREAD

    def receive(self, models: Params, contributions: Any, here: Block) -> Params:
        return self.fetch(models, here.index)

    def fetch(self, models: PyTree, index: Array) -> PyTree:
        """Returns models[index] of the whole stack: the index travels around, and each device fills in the rows it has.

        Pooled examples arrive as copies.
        """
        leaves, treedef = jax.tree.flatten(models, is_leaf=is_pooled)

        def read(leaf: Any, positions: Array) -> Array:
            if is_pooled(leaf):
                return leaf.examples(leaf.index[positions])
            return tree.take(leaf, positions)

        def visit(travels: Any, _: Any) -> tuple[Any, Any]:
            index, rows = travels
            positions, is_here = self._positions_here(index)
            rows_here = [read(leaf, positions) for leaf in leaves]
            return (index, tree.where(is_here, rows_here, rows)), ()

        rows = [jnp.zeros((*index.shape, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        # The index starts at the next device, so that the last hop brings it home.
        travels = (self._hop(index), rows)
        (_, rows), _ = self._visit_all(visit, travels, ())
        return jax.tree.unflatten(treedef, rows)

    def deposit(
        self, contributions: Contributions, here: Block, output: ClientOutput, sent: Array
    ) -> Contributions:
        def visit(travels: Any, contributions: Contributions) -> tuple[Any, Contributions]:
            index, upload, weights = travels
            positions, is_here = self._positions_here(index)
            return travels, _add(contributions, positions, is_here, upload, weights)

        index = jnp.where(sent, here.index[:, : sent.shape[1]], -1)
        travels = (index, output.upload, output.mixing_weights)
        _, contributions = self._visit_all(visit, travels, contributions)
        return contributions

    def collect(self, contributions: Contributions) -> Contributions:
        return contributions

    def replace(self, stack: PyTree, ids: Array, rows: PyTree) -> PyTree:
        """Replaces rows `ids` of the whole stack."""

        def visit(travels: Any, stack: PyTree) -> tuple[Any, PyTree]:
            ids, rows = travels
            positions, is_here = self._positions_here(ids)
            positions = jnp.where(is_here, positions, self.num_models)  # out of range: dropped

            # Padded ids repeat the last row with equal content, so the order of writes does not matter.
            def write(leaf: jax.Array, new: Array) -> jax.Array:
                return leaf.at[positions].set(new, mode="drop")

            return travels, jax.tree.map(write, stack, rows)

        _, stack = self._visit_all(visit, (ids, rows), stack)
        return stack

    def _hop(self, travels: PyTree) -> PyTree:
        """Sends arrays to the next device, and returns those that the previous one sent."""
        neighbors = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        messages, unpack = _pack(travels)
        received = [jax.lax.ppermute(message, AXIS, neighbors) for message in messages]
        return unpack(received)

    def _visit_all(
        self, visit: Callable[[Any, Any], tuple[Any, Any]], travels: Any, stays: Any
    ) -> tuple[Any, Any]:
        """Applies (travels, stays) <- visit(travels, stays) on this device and, hop by hop, on all others."""

        def hop_and_visit(_: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            travels, stays = carry
            return visit(self._hop(travels), stays)

        carry = visit(travels, stays)
        return jax.lax.fori_loop(1, self.devices, hop_and_visit, carry)

    def _positions_here(self, index: Array) -> tuple[Array, Array]:
        """Positions of some models in this device's part of the stack, 0 for the others, and which are in it."""
        positions = index - jax.lax.axis_index(AXIS) * self.num_models
        is_here = (positions >= 0) & (positions < self.num_models)
        return jnp.where(is_here, positions, 0), is_here


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

    def start(
        self, models: Params, index: Array, output: Callable[[], ClientOutput]
    ) -> Contributions:
        return self.others.start(models, index, output)

    def deposit(
        self, contributions: Contributions, here: Block, output: ClientOutput, sent: Array
    ) -> Contributions:
        return self.others.deposit(contributions, here, output, sent)

    def collect(self, contributions: Contributions) -> Contributions:
        return self.others.collect(contributions)


@dataclasses.dataclass(frozen=True)
class OwnFirst(Partly):
    """The clients' own models, in column 0 of the index, stay in place; the other models take the route `others`."""

    @property
    def models_at(self) -> PartitionSpec:
        return self.others.models_at

    def open(self, models: Params) -> Params:
        return self.others.open(models)

    def receive(self, models: Params, contributions: Any, here: Block) -> Params:
        width, num_received = here.index.shape
        own_models = by_client(block(models, here.at, width), 1)
        if num_received == 1:
            return own_models
        others_here = dataclasses.replace(here, index=here.index[:, 1:])
        others = self.others.receive(models, contributions, others_here)
        return jax.tree.map(lambda *pieces: jnp.concatenate(pieces, axis=1), own_models, others)

    def deposit(
        self, contributions: Contributions, here: Block, output: ClientOutput, sent: Array
    ) -> Contributions:
        width, num_sent = sent.shape
        to_own = jax.tree.map(lambda leaf: leaf[:, 0], output.upload)
        to_others = jax.tree.map(lambda leaf: leaf[:, 1:], output.upload)
        if num_sent > 1:
            others_here = dataclasses.replace(here, index=here.index[:, 1:])
            output_to_others = output._replace(upload=to_others)
            contributions = self.others.deposit(
                contributions, others_here, output_to_others, sent[:, 1:]
            )

        # A client's contribution to its own model is added in place.
        before = block(contributions, here.at, width)
        _, count = before
        after = tree.add(before, (to_own, jnp.ones_like(count)))
        return replace(contributions, here.at, tree.where(sent[:, 0], after, before))


@dataclasses.dataclass(frozen=True)
class Push(Partly):
    """A client receives its own model in place; its one upload takes the route `others` to all models in its index."""

    models_at = SPREAD
    models_held = 1

    def receive(self, models: Params, contributions: Any, here: Block) -> Params:
        return by_client(block(models, here.at, here.index.shape[0]), 1)


def is_dense(num_received: int, num_models: int) -> bool:
    """Whether an upload goes to so many models that a dense product, mostly with weights 0, is best."""
    return num_received * 8 > num_models


def _add(
    contributions: Contributions, index: Array, mask: Array, upload: PyTree, weights: Array | None
) -> Contributions:
    """Adds upload[w, j], or weights[w, j] upload[w], to the sum of model index[w, j] where mask[w, j] is True."""
    sums, count = contributions
    num_models = count.shape[0]
    width, num_sent = index.shape
    index = jnp.where(mask, index, num_models)  # out-of-range updates are dropped

    def add(total: jax.Array, update: Array) -> jax.Array:
        return total.at[index].add(update, mode="drop")

    if weights is None:
        sums = jax.tree.map(add, sums, upload)
    elif is_dense(num_sent, num_models):
        # matrix[n, w] is the weight of client w's upload in the sum of model n
        matrix = jnp.zeros((num_models, width))
        matrix = matrix.at[index, jnp.arange(width)[:, None]].add(weights, mode="drop")

        def add_product(total: Array, update: Array) -> Array:
            return total + jnp.tensordot(matrix, update, axes=1)

        sums = jax.tree.map(add_product, sums, upload)
    else:

        def add_weighted(total: jax.Array, update: Array) -> jax.Array:
            weighted = tree.per_row(weights, update[:, None]) * update[:, None]
            return add(total, weighted)

        sums = jax.tree.map(add_weighted, sums, upload)
    count = count.at[index].add(1, mode="drop")
    return sums, count


def _pack(arrays: PyTree) -> tuple[list[Array], Callable[[list[Array]], PyTree]]:
    """Packs arrays into messages; also returns the function that unpacks them.

    A large array is a separate message; small arrays of one dtype share a message, since every message has a fixed
    cost. An array that may be spread over several devices is not small: to share a message, it would be gathered.
    """
    leaves, treedef = jax.tree.flatten(arrays)
    is_spread = devices_here() > 1
    messages: dict[Any, list[int]] = {}  # numbers of the leaves in each message
    for number, leaf in enumerate(leaves):
        is_alone = leaf.nbytes > OWN_MESSAGE or (is_spread and leaf.size >= WORTH)
        name = number if is_alone else leaf.dtype
        messages.setdefault(name, []).append(number)

    packed = []
    for name, numbers in messages.items():
        contents = [leaves[number] for number in numbers]
        if isinstance(name, int):  # a message of one array
            message = Packed(contents[0], lambda array: [array])
        else:
            message = pack(contents)
        packed.append(message)

    def unpack(received: list[Array]) -> PyTree:
        unpacked = list(leaves)
        for numbers, message, array in zip(messages.values(), packed, received, strict=True):
            for number, leaf in zip(numbers, message.unpack(array), strict=True):
                unpacked[number] = leaf
        return jax.tree.unflatten(treedef, unpacked)

    return [message.array for message in packed], unpack
