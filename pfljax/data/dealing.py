"""Assigning pools of examples to clients by their shares."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pfljax.contract.errors import ArgumentError

MIN_EXAMPLES = 2  # one to train on and one to test on


class Assignment(NamedTuple):
    """The examples of each of K clients.

    Attributes:
        indices: K arrays of distinct example ids.
        group: (K,) int32, the true group of each client; None: unknown.
        is_test: (n,) bool, whether an example is for testing; None: split within each client.
        names: (K,) the data set's own ids of the clients.
    """

    indices: list[np.ndarray]
    group: np.ndarray | None
    is_test: np.ndarray | None = None
    names: np.ndarray | None = None


class Pools(NamedTuple):
    """Pools of examples, and the clients' shares in them.

    Attributes:
        pool: (n,) int, the pool of each example, 0..P-1.
        share: (K, P) share of pool p that goes to client k; columns sum to 1, or to 0 for unused pools.
        group: (K,) int, the group of each client; None: the clients have no groups.

    Examples:
        >>> import numpy as np
        >>> from pfljax import partitions
        >>> partitions.Pools(pool=np.array([0, 0, 1]), share=np.eye(2)).group is None
        True
    """

    pool: np.ndarray
    share: np.ndarray
    group: np.ndarray | None = None


def pool_members(pool: np.ndarray, num_pools: int) -> list[np.ndarray]:
    """The positions (n_p,), ascending, of the examples of each of P pools; `pool` (n,) is each example's."""
    order = np.argsort(pool, kind="stable")
    sizes = np.bincount(pool, minlength=num_pools)
    return np.split(order, np.cumsum(sizes)[:-1])


def deal(
    rng: np.random.Generator,
    pools: Pools,
    name: str,
    is_test: np.ndarray | None = None,
    classes: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Gives every example of a pool to one client, in proportion to the shares, and enough to each client.

    Args:
        rng: Random generator.
        pools: The pools and the clients' shares.
        name: Name of the partition, for messages.
        is_test: (n,) bool, whether an example is for testing. Then a client gets test examples of each pool and class
            in proportion to its training examples, and at least one example of each. None: it gets at least two
            examples.
        classes: (n,) int, the class of each example, if it has one.

    Returns:
        The ids of each client's examples.

    Raises:
        ArgumentError: for num_clients, if there are too few examples.
    """
    if is_test is None:
        everything = np.arange(len(pools.pool))
        indices, _ = _deal_examples(
            rng, everything, pools, pools.share, pools.share, MIN_EXAMPLES, name
        )
        return indices
    train_ids = np.flatnonzero(~is_test)
    train, counts = _deal_examples(rng, train_ids, pools, pools.share, pools.share, 1, name)
    if classes is not None:
        # Test examples follow pools and classes: each pair is a pool of its own.
        pairs = pools.pool * (int(classes.max()) + 1) + classes
        _, first, pair = np.unique(pairs, return_index=True, return_inverse=True)
        pools = Pools(pair, pools.share[:, pools.pool[first]])
        counts = np.array([np.bincount(pair[ids], minlength=len(first)) for ids in train])
    tests = deal_tests(rng, pools, counts, name, is_test)
    return [np.concatenate(ids) for ids in zip(train, tests, strict=True)]


def deal_tests(
    rng: np.random.Generator, pools: Pools, counts: np.ndarray, name: str, is_test: np.ndarray
) -> list[np.ndarray]:
    """Gives each client test examples of every pool in proportion to its training examples, and at least one.

    Args:
        rng: Random generator.
        pools: The pools; their shares apply to pools without training examples.
        counts: (K, P) numbers of training examples of each client by pool.
        name: Name of the partition, for messages.
        is_test: (n,) bool, whether an example is for testing.

    Returns:
        The ids of each client's test examples.

    Raises:
        ArgumentError: for num_clients, if there are too few test examples.
    """
    total = counts.sum(axis=0)
    share = np.where(total > 0, counts / np.maximum(total, 1), pools.share)
    # A client without test examples gets some of the pools that it trains on, or else of others that it has a share in.
    wanted = counts + pools.share / (1 + pools.share.max())
    indices, _ = _deal_examples(rng, np.flatnonzero(is_test), pools, share, wanted, 1, name)
    return indices


def _deal_examples(
    rng: np.random.Generator,
    ids: np.ndarray,
    pools: Pools,
    share: np.ndarray,
    wanted: np.ndarray,
    least: int,
    name: str,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Deals examples `ids` by shares (K, P), and moves some to clients with fewer than `least`; see `_feed`.

    Returns the ids of each client's examples, and their numbers (K, P) by pool.
    """
    num_clients, num_pools = share.shape
    pool = pools.pool[ids]
    members = [rng.permutation(ids[positions]) for positions in pool_members(pool, num_pools)]
    sizes = np.array([len(pool_ids) for pool_ids in members])

    # (K, P) numbers of examples, within 1 of share x size
    edges = np.rint(np.cumsum(share, axis=0) * sizes).astype(int)
    counts = np.diff(edges, axis=0, prepend=0)
    if not _feed(counts, wanted, least):
        takes = wanted > 0
        room = takes * (sizes / np.maximum(takes.sum(axis=0), 1))
        possible = int(num_clients * room.sum(axis=1).min() / least)
        raise too_many(num_clients, name, possible)

    # Of each pool, the first examples go to client 0, the next ones to client 1, and so on.
    assigned = []
    owners = []
    for pool_ids, column in zip(members, counts.T, strict=True):
        assigned.append(pool_ids[: column.sum()])
        owners.append(np.repeat(np.arange(num_clients), column))
    by_client = np.concatenate(assigned)[np.argsort(np.concatenate(owners), kind="stable")]
    ends = np.cumsum(counts.sum(axis=1))
    return np.split(by_client, ends[:-1]), counts


def _feed(counts: np.ndarray, wanted: np.ndarray, least: int) -> bool:
    """Moves examples, in place, to clients with fewer than `least`; returns False if there are too few to move.

    A client takes from the pools that it has `wanted` (K, P) above 0 in, largest first, and in each pool from the
    client with the most examples. No client is served twice, so this terminates (redrawing until all have enough may
    not).
    """
    total = counts.sum(axis=1)
    for k in np.flatnonzero(total < least):
        for p in np.argsort(-wanted[k], kind="stable"):
            while total[k] < least and wanted[k, p] > 0:
                spare = np.where(total > least, counts[:, p], 0)
                donor = np.argmax(spare)
                if not spare[donor]:
                    break
                counts[[donor, k], p] += (-1, 1)
                total[[donor, k]] += (-1, 1)
        if total[k] < least:
            return False
    return True


def draw_tests(rng: np.random.Generator, pool: np.ndarray, fraction: float) -> np.ndarray:
    """(n,) a random mask of `fraction` of every pool; neither empty nor full for pools of two or more examples."""
    mask = np.zeros(len(pool), bool)
    for ids in pool_members(pool, int(pool.max(initial=0)) + 1):
        if not len(ids):
            continue
        size = 0
        if len(ids) > 1:
            size = np.clip(round(fraction * len(ids)), 1, len(ids) - 1)
        mask[rng.choice(ids, size, replace=False)] = True
    return mask


def draw(rng: np.random.Generator, pools: Pools, among: np.ndarray, size: int) -> list[np.ndarray]:
    """Draws `size` examples for each client independently, from those `among` (n,), without repetition per client.

    Raises `ArgumentError` for replacement if there is nothing to draw for a client.
    """
    candidates = np.flatnonzero(among)
    num_pools = pools.share.shape[1]
    members = [
        candidates[positions] for positions in pool_members(pools.pool[candidates], num_pools)
    ]
    sizes = np.array([len(ids) for ids in members])

    # Each client's distribution over pools, up to a factor
    weights = pools.share * sizes
    if not weights.any(axis=1).all():
        text = "a client's classes have no examples to train or to test on"
        raise ArgumentError("replacement", text)
    shares = weights / weights.sum(axis=1, keepdims=True)
    counts = np.minimum(rng.multinomial(size, shares), sizes)
    indices = []
    for row in counts:
        drawn = [rng.choice(members[p], row[p], replace=False) for p in np.flatnonzero(row)]
        indices.append(np.concatenate(drawn))
    return indices


def too_many(num_clients: int, name: str, possible: int) -> ArgumentError:
    """The error for more clients than a partition has examples for."""
    text = f"too many for two examples per client with partition={name}"
    accepted = f"accepted: up to about {possible}"
    others = "or any number with replacement, which lets clients share examples"
    return ArgumentError("num_clients", f"{text}; {accepted}, {others}", num_clients)
