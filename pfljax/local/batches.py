"""Mini-batches and blocks of a client's examples; padding must not influence any result."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract import tree
from pfljax.contract.types import Array, Key, PyTree, Split
from pfljax.exchange.side_by_side import BLOCK, bytes_of, width
from pfljax.exchange.views import Chosen, each, read


class Batch(NamedTuple):
    """A mini-batch of B examples of one client."""

    x: PyTree  # (B, *features), or a tree of such arrays
    y: Array  # (B, ...)
    mask: Array  # (B,) float32, 0.0 past the end of the client's data
    index: Array  # (B,) int32, indices of the client's examples
    key: Key  # for privacy noise, dropout and augmentation
    # batch statistics of the model that is trained, if its parameters come without them
    statistics: PyTree = None

    def of_model(self, number: Array | int) -> Batch:
        """The same examples with separate noise and dropout for model `number`."""
        return self._replace(key=jax.random.fold_in(self.key, number))


NOISE = 0x0D9  # folded into a client's key for a round: privacy noise
AUGMENTATION = 0xA6  # folded into a mini-batch's key: random crops and flips
DROPOUT = 0xD0  # folded into a mini-batch's key: the loss in training mode


def examples(split: Split, index: Any) -> tuple[PyTree, Array]:
    """x (B, ...) and y (B, ...) of the examples at `index` (B,) of one client's data; `...`: of all."""
    return read(split[:2], index)


def masked(x: PyTree, y: Array, inside: Array) -> tuple[PyTree, Array]:
    """Replaces padding by the first example; by zeros if there is no example.

    A network then computes on real examples only. Where a loss of padding is not finite, even a weight of 0 has a NaN
    gradient; a network that divides by the norm of its inputs, for instance, has no finite loss of zeros.
    """

    def first(leaf):
        return jnp.where(inside[0], leaf[:1], jnp.zeros_like(leaf[:1]))

    return tree.where(inside, (x, y), jax.tree.map(first, (x, y)))


PLACE_BITS = 12  # bits for an example's position in a 32-bit sort key; the rest is random


def shuffle(key: Key, size: Array, n_max: int, epochs: int) -> Array:
    """Random orders of positions 0..size-1, followed by size..n_max-1: (epochs, n_max) int32.

    Draws position by position, so that more padding does not change the order of the real examples.
    """
    places = jnp.arange(n_max)
    draws = jax.random.bits(key, (n_max, epochs), jnp.uint32).T >> PLACE_BITS
    draws = jnp.where(places < size, draws, jnp.uint32((1 << 32 - PLACE_BITS) - 1))
    if n_max > 1 << PLACE_BITS:
        return jnp.argsort(draws, axis=-1)
    # A CPU sorts numbers about five times as fast as (number, position) pairs.
    mixed = jnp.sort(draws << PLACE_BITS | places.astype(jnp.uint32), axis=-1)
    return (mixed & ((1 << PLACE_BITS) - 1)).astype(jnp.int32)


def random_share(key: Key, split: Split, share: Array | float) -> Split:
    """A random subset of a client's examples, with at least one example if there are any."""
    order = shuffle(key, split.size, split.y.shape[0], 1)[0]
    size = jnp.clip(jnp.rint(share * split.size), 1, split.size).astype(jnp.int32)
    x, y = each(lambda leaf: Chosen(leaf, order), split[:2])
    return Split(x, y, size)


def sampled(key: Key, train: Split, capacity: int, size: Array) -> Split:
    """Examples of all clients' stacked data, drawn uniformly without replacement: `size` of them, padded."""
    n_max = train.y.shape[1]
    real = (jnp.arange(n_max) < train.size[:, None]).reshape(-1)
    lots = jnp.where(real, jax.random.uniform(key, real.shape), -1.0)
    places = jax.lax.top_k(lots, capacity)[1]
    x, y = read(train[:2], (places // n_max, places % n_max))
    return Split(x, y, jnp.minimum(size, capacity).astype(jnp.int32))


# examples at a time: large blocks, then small ones for the rest, so that padding costs little
BLOCKS = (512, 32)
PROBED = 31  # examples of which the bytes are counted; few layers have sizes that it divides


def block_sizes(rows: Callable[[Array], PyTree], n_max: int) -> tuple[int, ...]:
    """Sizes of blocks for `over_blocks`, large ones first; the last is for the rest.

    Clients side by side take as many blocks as the largest of them. So theirs are even, and as small as the bytes of
    rows(positions (B,)) ask for.
    """
    if width() == 1:
        return BLOCKS if n_max > BLOCKS[-1] else (n_max,)
    taken = bytes_of(rows, jax.ShapeDtypeStruct((PROBED,), jnp.int32), of=PROBED)
    large, small = (min(block, max(BLOCK * PROBED // taken, 1)) for block in BLOCKS)
    small = -(-n_max // max(-(-n_max // small), 1))
    return (large, small) if BLOCKS[0] == large <= n_max else (small,)


def over_blocks(
    size: Array,
    n_max: int,
    sizes: tuple[int, ...],
    body: Callable[[Array, PyTree], PyTree],
    carry: PyTree,
) -> PyTree:
    """carry = body(positions, carry) for blocks of positions that cover 0..size-1; the last may extend past it."""
    if sizes == (n_max,):
        return body(jnp.arange(n_max), carry)
    start = 0
    taken = []
    for block in sizes:
        last = block == sizes[-1]
        count = -(-(size - start) // block) if last else size // block

        def step(number, carry, s=start, b=block):
            return body(s + number * b + jnp.arange(b), carry)

        if block <= n_max:
            taken.append(str(block))
            # see `block_counts`
            with jax.named_scope(f"{'rest' if last else 'full'}_{'_'.join(taken)}_of_{n_max}"):
                carry = jax.lax.fori_loop(0, count, step, carry)
            start = start + count * block
    return carry


def block_counts(scope: str, splits: Sequence[Split]) -> np.ndarray | None:
    """How many blocks a loop of `over_blocks` takes for each client; None if `scope` does not name such a loop.

    Args:
        scope: The name of the loop's scope.
        splits: All clients' examples; the first split with the loop's number of places for examples counts.
    """
    found = re.fullmatch(r"(full|rest)_(?:(\d+)_)?(\d+)_of_(\d+)", scope)
    sizes = [
        np.asarray(split.size) for split in splits if found and split.y.shape[1] == int(found[4])
    ]
    if not found or not sizes:
        return None
    rest = sizes[0] % int(found[2]) if found[2] else sizes[0]
    block = int(found[3])
    return rest // block if found[1] == "full" else -(-rest // block)


def sum_over_examples(fn: Callable[[PyTree, Array, Array], PyTree], split: Split) -> PyTree:
    """Sums fn(x (B, ...), y (B,), mask (B,) bool) over a client's examples, block by block.

    `fn` returns sums over the examples where `mask` is True.
    """
    n_max = split.y.shape[0]

    def sums(positions):
        index = jnp.minimum(positions, n_max - 1)
        return fn(*examples(split, index), positions < split.size)

    sizes = block_sizes(sums, n_max)

    def add(positions, total):
        return jax.tree.map(jnp.add, total, sums(positions))

    shape = jax.eval_shape(sums, jax.ShapeDtypeStruct((sizes[-1],), jnp.int32))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
    return over_blocks(split.size, n_max, sizes, add, zeros)


def of_examples(fn: Callable[[PyTree, Array], PyTree], split: Split) -> PyTree:
    """The rows of fn(x (B, ...), y (B, ...)) -> leaves (B, ...) for a client's examples: (n_max, ...), 0 for padding.

    Processes examples in blocks.
    """
    n_max = split.y.shape[0]
    room = n_max + BLOCKS[-1]  # for the last block

    def rows(positions):
        index = jnp.minimum(positions, n_max - 1)
        inside = positions < split.size
        found = fn(*masked(*examples(split, index), inside))
        return tree.where(inside, found, jax.tree.map(jnp.zeros_like, found))

    def note(positions, found):
        def put(all, some):
            return jax.lax.dynamic_update_slice_in_dim(all, some, positions[0], 0)

        return jax.tree.map(put, found, rows(positions))

    shape = jax.eval_shape(rows, jax.ShapeDtypeStruct((1,), jnp.int32))
    found = jax.tree.map(lambda leaf: jnp.zeros((room, *leaf.shape[1:]), leaf.dtype), shape)
    found = over_blocks(split.size, n_max, block_sizes(rows, n_max), note, found)
    return jax.tree.map(lambda leaf: leaf[:n_max], found)
