"""Dealing pools of examples to clients by their shares."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pfljax.contract.errors import ArgumentError

MIN_EXAMPLES = 2  # one to train on and one to test on


class Assignment(NamedTuple):
    """The examples of each of K clients."""

    indices: list[np.ndarray]  # K arrays of distinct example ids
    distribution: np.ndarray | None  # (K,) int32, the true distribution of each client; None: unknown
    is_test: np.ndarray | None = None  # (n,) bool, whether an example is for testing; None: split within each client
    names: np.ndarray | None = None  # (K,) the data set's own ids of the clients


class Pools(NamedTuple):
    """Pools of examples, and the clients' shares in them."""

    pool: np.ndarray  # (n,) int: the pool of each example, 0..P-1
    share: np.ndarray  # (K, P): share of pool p that goes to client k; columns sum to 1, or to 0 for unused pools
    distribution: np.ndarray | None = None  # (K,) int: the group of each client; None: the clients have no groups


def deal(rng: np.random.Generator, pools: Pools, name: str) -> list[np.ndarray]:
    """Gives every example of a pool to one client, in proportion to the shares, and at least two to each client.

    Raises `ArgumentError` for num_clients if there are too few examples; `name` is the partition's, for the message.
    """
    members = [rng.permutation(np.flatnonzero(pools.pool == p)) for p in range(pools.share.shape[1])]
    sizes = np.array([len(ids) for ids in members])
    num_clients = len(pools.share)
    edges = np.rint(np.cumsum(pools.share, axis=0) * sizes).astype(int)
    counts = np.diff(edges, axis=0, prepend=0)  # (K, P), within 1 of share x size
    if not _feed(counts, pools.share):
        held = pools.share > 0
        room = (held * (sizes / np.maximum(held.sum(axis=0), 1))).sum(axis=1).min()
        possible = int(num_clients * room / MIN_EXAMPLES)
        raise too_many(num_clients, name, possible)
    ids = np.concatenate([ids[: counts[:, p].sum()] for p, ids in enumerate(members)])
    owner = np.concatenate([np.repeat(np.arange(num_clients), column) for column in counts.T])
    return np.split(ids[np.argsort(owner, kind="stable")], np.cumsum(counts.sum(axis=1))[:-1])


def _feed(counts: np.ndarray, share: np.ndarray) -> bool:
    """Moves examples, in place, to clients with fewer than two; returns False if there are too few to move.

    A client takes from the pools that it has a share in, largest share first, and in each pool from the client with the
    most examples. No client is served twice, so this terminates (redrawing until all have enough may not).
    """
    total = counts.sum(axis=1)
    for k in np.flatnonzero(total < MIN_EXAMPLES):
        for p in np.argsort(-share[k], kind="stable"):
            while total[k] < MIN_EXAMPLES and share[k, p] > 0:
                spare = np.where(total > MIN_EXAMPLES, counts[:, p], 0)
                donor = np.argmax(spare)
                if not spare[donor]:
                    break
                counts[[donor, k], p] += (-1, 1)
                total[[donor, k]] += (-1, 1)
        if total[k] < MIN_EXAMPLES:
            return False
    return True


def set_apart(rng: np.random.Generator, pool: np.ndarray, fraction: float) -> np.ndarray:
    """(n,) a random mask of `fraction` of every pool; neither empty nor full for pools of two or more examples."""
    mask = np.zeros(len(pool), bool)
    for p in np.unique(pool):
        ids = np.flatnonzero(pool == p)
        size = np.clip(round(fraction * len(ids)), 1, len(ids) - 1) if len(ids) > 1 else 0
        mask[rng.choice(ids, size, replace=False)] = True
    return mask


def draw(rng: np.random.Generator, pools: Pools, among: np.ndarray, size: int) -> list[np.ndarray]:
    """Draws `size` examples for each client independently, from those `among` (n,), without repetition per client.

    Raises `ArgumentError` for replacement if there is nothing to draw for a client.
    """
    members = [np.flatnonzero((pools.pool == p) & among) for p in range(pools.share.shape[1])]
    sizes = np.array([len(ids) for ids in members])
    weights = pools.share * sizes  # each client's distribution over pools, up to a factor
    if not weights.any(axis=1).all():
        raise ArgumentError("replacement", "a client's classes have no examples to train or to test on")
    counts = np.minimum(rng.multinomial(size, weights / weights.sum(axis=1, keepdims=True)), sizes)
    return [
        np.concatenate([rng.choice(members[p], row[p], replace=False) for p in np.flatnonzero(row)]) for row in counts
    ]


def too_many(num_clients: int, name: str, possible: int) -> ArgumentError:
    """The error for more clients than a partition has examples for."""
    text = f"too many for two examples per client with partition={name}; accepted: up to about {possible}, or any "
    return ArgumentError(
        "num_clients", text + "number with replacement, which lets clients share examples", num_clients
    )
