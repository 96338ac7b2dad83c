"""Stacks of models as a device sees them in an exchange: all of them here, or a part here and the others around a ring.

A block of clients fetches models from a store by index, and deposits its contributions for their owners.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pfljax.core import tree
from pfljax.core.types import Array, Params, PyTree

AXIS = "clients"  # of the mesh of devices
OWN_MESSAGE = 64 << 10  # bytes from which on an array is a message of its own


@dataclasses.dataclass(frozen=True)
class Local:
    """A stack of N models, all of them on this device."""

    num_models: int

    def empty(self, contribution: PyTree, num_leading: int) -> tuple[PyTree, Array]:
        sums = jax.tree.map(lambda c: jnp.zeros((self.num_models, *c.shape[num_leading:]), c.dtype), contribution)
        return sums, jnp.zeros((self.num_models,), jnp.int32)

    def fetch(self, models: Params, index: Array) -> Params:
        return tree.take(models, index)

    def deposit(self, sums, index: Array, contribution: PyTree, mask: Array):
        total, count = sums
        index = jnp.where(mask, index, self.num_models)  # out of range: dropped
        total = jax.tree.map(lambda t, c: t.at[index].add(c, mode="drop"), total, contribution)
        return total, count.at[index].add(1, mode="drop")

    def mix(self, sums, index: Array, upload: PyTree, shares: Array, mask: Array):
        """Adds shares[c, j] upload[c] to model index[c, j]."""
        total, count = sums
        index = jnp.where(mask, index, self.num_models)
        senders = jnp.arange(index.shape[0])
        if index.shape[1] * 8 > self.num_models:  # most models count most uploads: a product of matrices
            matrix = jnp.zeros((self.num_models, len(senders)))
            matrix = matrix.at[index, senders[:, None]].add(shares, mode="drop")
            total = jax.tree.map(lambda t, u: t + jnp.tensordot(matrix, u, axes=1), total, upload)
        else:
            weigh = lambda u: shares.reshape(*shares.shape, *[1] * (u.ndim - 1)) * u[:, None]
            total = jax.tree.map(lambda t, u: t.at[index].add(weigh(u), mode="drop"), total, upload)
        return total, count.at[index].add(1, mode="drop")


@dataclasses.dataclass(frozen=True)
class Ring(Local):
    """N models of a larger stack on each of D devices; what a block of clients needs and sends goes around the ring.

    What travels visits every device once. Memory beside the stack is that of one block's models.
    """

    devices: int

    def _hop(self, travels: PyTree) -> PyTree:
        neighbors = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        packed, unpack = _pack(travels)
        return unpack(jax.tree.map(lambda part: jax.lax.ppermute(part, AXIS, neighbors), packed))

    def _visit_all(self, visit: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], travels: PyTree, stays: PyTree):
        """(travels, stays) <- visit(travels, stays) on this device and, hop by hop, on all others."""
        return jax.lax.fori_loop(
            1, self.devices, lambda _, carry: visit(self._hop(carry[0]), carry[1]), visit(travels, stays)
        )

    def _mine(self, index: Array) -> tuple[Array, Array]:
        local = index - jax.lax.axis_index(AXIS) * self.num_models
        mine = (local >= 0) & (local < self.num_models)
        return jnp.where(mine, local, 0), mine

    def fetch(self, models: Params, index: Array) -> Params:
        """models[index] of the whole stack: the index goes around, and each device fills in what it has."""

        def visit(travels, _):
            index, rows = travels
            local, mine = self._mine(index)
            return (index, tree.where(mine, tree.take(models, local), rows)), ()

        start = jax.tree.map(lambda leaf: jnp.zeros((*index.shape, *leaf.shape[1:]), leaf.dtype), models)
        # Sent off empty, so that the last hop brings it home.
        return self._visit_all(visit, (self._hop(index), start), ())[0][1]

    def deposit(self, sums, index: Array, contribution: PyTree, mask: Array):
        def visit(travels, sums):
            index, contribution = travels
            local, mine = self._mine(index)
            return travels, Local.deposit(self, sums, local, contribution, mine)

        return self._visit_all(visit, (jnp.where(mask, index, -1), contribution), sums)[1]

    def mix(self, sums, index: Array, upload: PyTree, shares: Array, mask: Array):
        def visit(travels, sums):
            index, upload, shares = travels
            local, mine = self._mine(index)
            return travels, Local.mix(self, sums, local, upload, shares, mine)

        return self._visit_all(visit, (jnp.where(mask, index, -1), upload, shares), sums)[1]

    def replace(self, stack: PyTree, ids: Array, rows: PyTree) -> PyTree:
        def visit(travels, stack):
            ids, rows = travels
            local, mine = self._mine(ids)
            local = jnp.where(mine, local, self.num_models)
            # Padded ids repeat the last row with the same content, so the order of writes does not matter.
            return travels, jax.tree.map(lambda leaf, new: leaf.at[local].set(new, mode="drop"), stack, rows)

        return self._visit_all(visit, (ids, rows), stack)[1]


def _pack(arrays: PyTree) -> tuple[dict[str, Array], Callable[[dict[str, Array]], PyTree]]:
    """The messages that hold some arrays, and the way back.

    A large array is a message of its own; small ones of a dtype share one, since every message costs the same however
    little it holds.
    """
    leaves, treedef = jax.tree.flatten(arrays)
    kinds, places = {}, []
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
