"""Collaboration between clients: the weights they give to models, and which clients share models."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Sharing(NamedTuple):
    """Mean cosine between two clients' rows of weights; NaN if there are no such pairs."""

    # for clients of the same group; 1: they use the same models with the same weights
    within: float
    across: float  # for clients of different groups; 0: they have no model in common


def dense(
    index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"], num_models: int
) -> Float[np.ndarray, "K N"]:
    """The matrix of each client's weight for each model; repeated indices add up."""
    out = np.zeros((len(index), num_models))
    np.add.at(out, (np.arange(len(index))[:, None], index), weights)
    return out


class Rows(NamedTuple):
    """Clients' rows of weights, one entry per client and model that it uses. No array has the size clients x models."""

    client: np.ndarray  # the clients, in ascending order. Shape (E,).
    model: np.ndarray  # the models. Shape (E,).
    weight: np.ndarray  # the weights. Shape (E,).
    num_clients: int  # K

    @property
    def length(self) -> np.ndarray:
        """The lengths of the rows, 1 for a client without weights. Shape (K,).

        The cosine between two clients' weights is the scalar product of their rows, divided by both lengths.
        """
        length = np.sqrt(np.bincount(self.client, self.weight**2, self.num_clients))
        return np.where(length > 0, length, 1.0)

    @property
    def unit(self) -> np.ndarray:
        """The entries of the rows at unit length. Shape (E,)."""
        return self.weight / self.length[self.client]


def rows_of(
    index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"], least: float = 0.0
) -> Rows:
    """Returns clients' rows of weights; repeated indices add up. Leaves out weights smaller than `least`."""
    # A pair of client and model as one number.
    width = int(index.max(initial=0)) + 1
    clients = np.arange(len(index))[:, None]
    pairs, position = np.unique(clients * width + index, return_inverse=True)
    sums = np.bincount(position.ravel(), weights.ravel(), len(pairs))

    is_used = np.abs(sums) >= least
    client, model = np.divmod(pairs[is_used], width)
    return Rows(client, model, sums[is_used], len(index))


def cosines(
    index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"]
) -> Float[np.ndarray, "K K"]:
    """Similarity of clients' weights: the cosines between their rows, 0 for a client without weights."""
    rows = rows_of(index, weights)
    models, columns = np.unique(rows.model, return_inverse=True)
    unit_rows = np.zeros((len(index), len(models)))
    unit_rows[rows.client, columns] = rows.unit
    return unit_rows @ unit_rows.T


def sharing(
    index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"], group: Int[np.ndarray, " K"]
) -> Sharing:
    """How much clients share models within and across their true groups.

    Uses sums of unit rows instead of a matrix of all pairs: within a group, the cosines of all pairs, each client with
    itself included, add up to |sum of the group's unit rows|^2.
    """
    rows = rows_of(index, weights)
    group = numbered(group)

    # Sums of cosines: of all pairs within groups, of all pairs, and of each client with itself.
    group_and_model = group[rows.client] * (rows.model.max() + 1) + rows.model
    inside = np.square(np.bincount(numbered(group_and_model), rows.unit)).sum()
    everywhere = np.square(np.bincount(rows.model, rows.unit)).sum()
    itself = np.square(rows.unit).sum()

    # Numbers of pairs of different clients.
    sizes = np.bincount(group).astype(float)
    num_within = (sizes * (sizes - 1)).sum()
    num_across = sizes.sum() ** 2 - np.square(sizes).sum()

    within = ratio(inside - itself, num_within)
    across = ratio(everywhere - inside, num_across)
    return Sharing(within, across)


def numbered(values: np.ndarray) -> np.ndarray:
    """The number of each value among the distinct ones, in ascending order."""
    _, numbers = np.unique(values, return_inverse=True)
    return numbers


def ratio(total: float, number: float) -> float:
    """Their ratio; NaN for none."""
    return float(total / number) if number else float("nan")


def top_affinities(
    affinity: Float[np.ndarray, "K K"], group: Int[np.ndarray, " K"], target: Int[np.ndarray, " K"]
) -> float:
    """Returns the fraction of clients whose two highest affinities to others are to clients of their target.

    Counts only clients with at least two others of their target; NaN if there are none.
    """
    is_self = np.eye(len(affinity), dtype=bool)
    is_target = np.equal(group[None, :], target[:, None]) & ~is_self
    counts = is_target.sum(axis=1) >= 2
    if not counts.any():
        return float("nan")

    affinity = np.where(is_self, -np.inf, affinity)
    top = np.argsort(-affinity, axis=1, kind="stable")[:, :2]
    top_is_target = np.take_along_axis(is_target, top, axis=1)
    return float(np.mean(top_is_target.sum(axis=1) == 2, where=counts))


def adjusted_rand_index(a: Int[np.ndarray, " n"], b: Int[np.ndarray, " n"]) -> float:
    """Adjusted Rand index of two partitions of n items, given each item's group (Hubert and Arabie, 1985, Eq. 5).

    1 for equal partitions, 0 on average for random ones. Importing scikit-learn's takes most of a second.
    """

    def num_pairs(counts: np.ndarray) -> np.ndarray:
        return (counts * (counts - 1) // 2).sum()

    # The number of items in each pair of groups.
    a = numbered(a)
    b = numbered(b)
    table = np.zeros((a.max() + 1, b.max() + 1), int)
    np.add.at(table, (a, b), 1)

    # Pairs of items that share a group: in both partitions, in one, and at random.
    in_both = num_pairs(table)
    in_a = num_pairs(table.sum(axis=1))
    in_b = num_pairs(table.sum(axis=0))
    expected = in_a * in_b / max(num_pairs(np.array([a.size])), 1)
    largest = (in_a + in_b) / 2
    if largest <= expected:
        return 1.0
    return float((in_both - expected) / (largest - expected))
