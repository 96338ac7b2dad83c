"""Placement of an exchange's clients on devices: padding, buckets and order.

A layout depends only on shapes and is computed before tracing.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import Array, PyTree
from pfljax.exchange.buckets import Buckets


@dataclasses.dataclass(frozen=True)
class Layout:
    """S clients on D devices, an equal number on each.

    Attributes:
        num_clients: S.
        devices: D.
        buckets: (clients side by side, repetitions), processed in turn on each device.
        at_once: Number of clients of a block computed at a time; 0: the whole block.
        by_size: Whether each device processes its clients by size, largest first.
    """

    num_clients: int
    devices: int
    buckets: Buckets
    at_once: int
    by_size: bool = False

    @property
    def per_device(self) -> int:
        return sum(width * count for width, count in self.buckets)

    @property
    def padded(self) -> int:
        """Number of clients on all devices, padding included."""
        return self.devices * self.per_device

    @property
    def as_they_come(self) -> bool:
        """Whether position k is client k: no padding, no reordering."""
        return self.padded == self.num_clients and not self.by_size

    def pad(self, stack: PyTree, num_each: int = 1) -> PyTree:
        """Pads by repeating the last client's `num_each` rows; see `real`."""
        return pad(stack, self.num_clients, self.padded, num_each)

    def cut(self, stack: PyTree, num_each: int = 1) -> PyTree:
        """Undoes `pad`."""
        if self.padded == self.num_clients:
            return stack
        return jax.tree.map(lambda leaf: leaf[: self.num_clients * num_each], stack)

    def real(self) -> Array:
        """(padded,) bool: False for padding."""
        return jnp.arange(self.padded) < self.num_clients

    def order(self, sizes: Array | None) -> Order:
        """The order of one device's clients; `sizes` (S / D,), or None if the layout does not sort."""
        if sizes is None or not self.by_size:
            return Order(jnp.arange(self.per_device), moves=False)
        return Order(jnp.argsort(-sizes, stable=True), moves=True)


@dataclasses.dataclass(frozen=True)
class Order:
    """The order in which a device processes its clients.

    Attributes:
        clients: (S / D,), the client at each position.
        moves: Whether this differs from the original order.
    """

    clients: Array
    moves: bool

    def sort(self, stack: PyTree, num_each: int = 1) -> PyTree:
        """Reorders a stack with `num_each` rows per client from the original order to this order."""
        if not self.moves:
            return stack
        return tree.take(stack, _rows(self.clients, num_each))

    def undo(self, stack: PyTree, num_each: int = 1) -> PyTree:
        """Undoes `sort`."""
        if not self.moves:
            return stack
        positions = jnp.argsort(self.clients)
        return tree.take(stack, _rows(positions, num_each))


def lay_out(
    num_clients: int, devices: int, chunk: int, buckets: Buckets = (), together: int = 1
) -> Layout:
    """Makes a layout.

    Args:
        num_clients: S.
        devices: D.
        chunk: Number of clients that a device processes at a time; 0: all of them.
        buckets: Buckets for uneven clients, which are then sorted by size; (): original order, in chunks of `chunk`.
        together: Largest number of clients whose models travel, or are summed, together.
    """
    if buckets:
        return Layout(num_clients, devices, buckets, at_once=0, by_size=True)
    per_device = -(-num_clients // devices)
    chunk = min(chunk or per_device, per_device)
    width = chunk
    if together > chunk:
        # Clients that travel together; chunks of them still run one after the other. The rest
        # also consists of whole chunks.
        most = min(together // chunk, per_device // chunk)
        if chunk > 1:
            most = _largest_divisor(per_device // chunk, most)
        width = chunk * most

    # The rest is a separate bucket: padding would copy clients and move the others.
    count, rest = divmod(per_device, width)
    buckets = ((width, count), (rest, 1)) if rest else ((width, count),)
    return Layout(num_clients, devices, buckets, at_once=chunk)


def _largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of a number up to `at_most`, or 1."""
    candidates = range(1, max(at_most, 1) + 1)
    return max(candidate for candidate in candidates if number % candidate == 0)


def _rows(clients: Array, num_each: int) -> Array:
    """Row numbers of some clients in a stack with `num_each` rows per client."""
    if num_each == 1:
        return clients
    rows = clients[:, None] * num_each + jnp.arange(num_each)
    return rows.reshape(-1)


def pad(stack: PyTree, num: int, padded: int, num_each: int = 1) -> PyTree:
    """Repeats the last of `num` clients' `num_each` rows up to `padded` clients; the caller masks their results."""
    if num == padded:
        return stack
    clients = jnp.minimum(jnp.arange(padded), num - 1)
    return tree.take(stack, _rows(clients, num_each))


def block(stack: PyTree, at: Array, width: int) -> PyTree:
    """`width` rows of a stack, starting at row `at`."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, at, width), stack)


def replace(stack: PyTree, at: Array, rows: PyTree) -> PyTree:
    """The stack with `rows` written from row `at` on; in place if a loop carries the stack."""

    def write(leaf: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(leaf, new.astype(leaf.dtype), at, 0)

    return jax.tree.map(write, stack, rows)


def by_client(stack: PyTree, num: int) -> PyTree:
    """Reshapes (S num, ...) to (S, num, ...)."""

    def split(leaf: Array) -> Array:
        num_rows, *shape = leaf.shape
        return leaf.reshape(num_rows // num, num, *shape)

    return jax.tree.map(split, stack)


def flat(stack: PyTree) -> PyTree:
    """Reshapes (S, J, ...) to (S J, ...)."""

    def join(leaf: Array) -> Array:
        num_clients, num, *shape = leaf.shape
        return leaf.reshape(num_clients * num, *shape)

    return jax.tree.map(join, stack)
