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
from pfljax.exchange.views import Chosen, map_examples, read


class Batch(NamedTuple):
    """A mini-batch of B examples of one client."""

    x: PyTree  # (B, *features), or a tree of such arrays
    y: Array  # (B, ...)
    mask: Array  # (B,) float32, 0.0 past the end of the client's data
    index: Array  # (B,) int32, indices of the client's examples
    key: Key  # for privacy noise, dropout and augmentation
    # batch statistics of the model that is trained, if its parameters come without them
    statistics: PyTree = None

    def for_model(self, number: Array | int) -> Batch:
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

    def first_or_zeros(leaf: Array) -> Array:
        return jnp.where(inside[0], leaf[:1], jnp.zeros_like(leaf[:1]))

    replacements = jax.tree.map(first_or_zeros, (x, y))
    return tree.where(inside, (x, y), replacements)


POSITION_BITS = 12  # bits for an example's position in a 32-bit sort key; the rest is random


def shuffle(key: Key, size: Array, n_max: int, epochs: int) -> Array:
    """Random orders of positions 0..size-1, followed by size..n_max-1: (epochs, n_max) int32.

    Draws position by position, so that more padding does not change the order of the real examples.
    """
    # Padding gets the largest number, so that it comes last.
    positions = jnp.arange(n_max)
    largest = (1 << 32 - POSITION_BITS) - 1
    draws = jax.random.bits(key, (n_max, epochs), jnp.uint32).T >> POSITION_BITS
    draws = jnp.where(positions < size, draws, jnp.uint32(largest))
    if n_max > 1 << POSITION_BITS:
        return jnp.argsort(draws, axis=-1)

    # A CPU sorts numbers about five times as fast as (number, position) pairs.
    draws_and_positions = draws << POSITION_BITS | positions.astype(jnp.uint32)
    ordered = jnp.sort(draws_and_positions, axis=-1)
    order = ordered & ((1 << POSITION_BITS) - 1)
    return order.astype(jnp.int32)


def random_share(key: Key, split: Split, share: Array | float) -> Split:
    """A random subset of a client's examples, with at least one example if there are any."""
    order = shuffle(key, split.size, split.y.shape[0], 1)[0]
    size = jnp.clip(jnp.rint(share * split.size), 1, split.size)
    x, y = map_examples(lambda leaf: Chosen(leaf, order), split[:2])
    return Split(x, y, size.astype(jnp.int32))


def sampled(key: Key, train: Split, capacity: int, size: Array) -> Split:
    """Examples of all clients' stacked data, drawn uniformly without replacement: `size` of them, padded."""
    n_max = train.y.shape[1]
    is_real = jnp.arange(n_max) < train.size[:, None]
    is_real = is_real.reshape(-1)
    draws = jnp.where(is_real, jax.random.uniform(key, is_real.shape), -1.0)
    _, positions = jax.lax.top_k(draws, capacity)
    x, y = read(train[:2], (positions // n_max, positions % n_max))
    size = jnp.minimum(size, capacity)
    return Split(x, y, size.astype(jnp.int32))


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
    # The number of examples whose arrays fit.
    positions = jax.ShapeDtypeStruct((PROBED,), jnp.int32)
    num_bytes = bytes_of(rows, positions, multiple_of=PROBED)
    fitting = max(BLOCK * PROBED // num_bytes, 1)
    large = min(BLOCKS[0], fitting)
    small = min(BLOCKS[1], fitting)

    # Even blocks.
    num_small = max(-(-n_max // small), 1)
    small = -(-n_max // num_small)
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
    names = []
    for block in sizes:
        last = block == sizes[-1]
        count = -(-(size - start) // block) if last else size // block
        if block > n_max:
            continue
        # see `block_counts`
        names.append(str(block))
        with jax.named_scope(f"{'rest' if last else 'full'}_{'_'.join(names)}_of_{n_max}"):
            carry = jax.lax.fori_loop(0, count, block_step(body, start, block), carry)
        start = start + count * block
    return carry


def block_step(
    body: Callable[[Array, PyTree], PyTree], start: Array | int, block: int
) -> Callable[[Array, PyTree], PyTree]:
    """A loop's step: `body` for the positions of block `number` from `start` on."""

    def step(number: Array, carry: PyTree) -> PyTree:
        return body(start + number * block + jnp.arange(block), carry)

    return step


def block_counts(scope: str, splits: Sequence[Split]) -> np.ndarray | None:
    """How many blocks a loop of `over_blocks` takes for each client; None if `scope` does not name such a loop.

    Args:
        scope: The name of the loop's scope.
        splits: All clients' examples; the first split with the loop's number of places for examples counts.
    """
    match = re.fullmatch(r"(full|rest)_(?:(\d+)_)?(\d+)_of_(\d+)", scope)
    if match is None:
        return None
    kind, large, block, n_max = match.groups()
    sizes = [np.asarray(split.size) for split in splits if split.y.shape[1] == int(n_max)]
    if not sizes:
        return None
    rest = sizes[0] % int(large) if large else sizes[0]
    return rest // int(block) if kind == "full" else -(-rest // int(block))


def sum_over_examples(fn: Callable[[PyTree, Array, Array], PyTree], split: Split) -> PyTree:
    """Sums fn(x (B, ...), y (B,), mask (B,) bool) over a client's examples, block by block.

    `fn` returns sums over the examples where `mask` is True.
    """
    n_max = split.y.shape[0]

    def sums(positions: Array) -> PyTree:
        index = jnp.minimum(positions, n_max - 1)
        x, y = examples(split, index)
        return fn(x, y, positions < split.size)

    sizes = block_sizes(sums, n_max)

    def add(positions: Array, total: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, total, sums(positions))

    shape = jax.eval_shape(sums, jax.ShapeDtypeStruct((sizes[-1],), jnp.int32))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
    return over_blocks(split.size, n_max, sizes, add, zeros)


def over_examples(fn: Callable[[PyTree, Array], PyTree], split: Split) -> PyTree:
    """The rows of fn(x (B, ...), y (B, ...)) -> leaves (B, ...) for a client's examples: (n_max, ...), 0 for padding.

    Processes examples in blocks.
    """
    n_max = split.y.shape[0]
    length = n_max + BLOCKS[-1]  # with room for the last block

    def rows_at(positions: Array) -> PyTree:
        index = jnp.minimum(positions, n_max - 1)
        is_real = positions < split.size
        x, y = examples(split, index)
        x, y = masked(x, y, is_real)
        rows = fn(x, y)
        return tree.where(is_real, rows, jax.tree.map(jnp.zeros_like, rows))

    def fill(positions: Array, rows: PyTree) -> PyTree:
        """The rows of all examples, with those at these positions filled in."""

        def put(leaf: Array, block: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(leaf, block, positions[0], 0)

        return jax.tree.map(put, rows, rows_at(positions))

    shapes = jax.eval_shape(rows_at, jax.ShapeDtypeStruct((1,), jnp.int32))
    zeros = jax.tree.map(lambda leaf: jnp.zeros((length, *leaf.shape[1:]), leaf.dtype), shapes)
    rows = over_blocks(split.size, n_max, block_sizes(rows_at, n_max), fill, zeros)
    return jax.tree.map(lambda leaf: leaf[:n_max], rows)
