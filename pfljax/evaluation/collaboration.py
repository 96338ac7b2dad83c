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
    width = int(index.max(initial=0)) + 1
    pairs, place = np.unique(np.arange(len(index))[:, None] * width + index, return_inverse=True)
    used = np.bincount(place.ravel(), weights.ravel(), len(pairs))
    client, model = np.divmod(pairs[np.abs(used) >= least], width)
    return Rows(client, model, used[np.abs(used) >= least], len(index))


def cosines(
    index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"]
) -> Float[np.ndarray, "K K"]:
    """Similarity of clients' weights: the cosines between their rows, 0 for a client without weights."""
    rows = rows_of(index, weights)
    models, columns = np.unique(rows.model, return_inverse=True)
    dense = np.zeros((len(index), len(models)))
    dense[rows.client, columns] = rows.unit
    return dense @ dense.T


def sharing(
    index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"], group: Int[np.ndarray, " K"]
) -> Sharing:
    """How much clients share models within and across their true groups.

    Uses sums of unit rows instead of a matrix of all pairs: within a group, the cosines of all pairs, each client with
    itself included, add up to |sum of the group's unit rows|^2.
    """
    rows = rows_of(index, weights)
    group = np.unique(group, return_inverse=True)[1]
    place = np.unique(
        group[rows.client] * (rows.model.max() + 1) + rows.model, return_inverse=True
    )[1]
    inside, everywhere = (np.square(np.bincount(by, rows.unit)).sum() for by in (place, rows.model))
    sizes = np.bincount(group).astype(float)
    # numbers of pairs
    alike = (sizes * (sizes - 1)).sum()
    different = sizes.sum() ** 2 - np.square(sizes).sum()

    def ratio(total, number):
        return float(total / number) if number else float("nan")

    return Sharing(
        ratio(inside - np.square(rows.unit).sum(), alike), ratio(everywhere - inside, different)
    )


def top_affinities(
    affinity: Float[np.ndarray, "K K"], group: Int[np.ndarray, " K"], target: Int[np.ndarray, " K"]
) -> float:
    """Returns the fraction of clients whose two highest affinities to others are to clients of their target.

    Counts only clients with at least two others of their target; NaN if there are none.
    """
    own = np.eye(len(affinity), dtype=bool)
    wanted = np.equal(group[None, :], target[:, None]) & ~own
    top = np.argsort(-np.where(own, -np.inf, affinity), axis=1, kind="stable")[:, :2]
    able = wanted.sum(axis=1) >= 2
    found = np.take_along_axis(wanted, top, axis=1).sum(axis=1) == 2
    return float(np.mean(found, where=able)) if able.any() else float("nan")


def adjusted_rand_index(a: Int[np.ndarray, " n"], b: Int[np.ndarray, " n"]) -> float:
    """Adjusted Rand index of two partitions of n items, given each item's group (Hubert and Arabie, 1985, Eq. 5).

    1 for equal partitions, 0 on average for random ones. Importing scikit-learn's takes most of a second.
    """

    def pairs(counts):
        return (counts * (counts - 1) // 2).sum()

    _, a = np.unique(a, return_inverse=True)
    _, b = np.unique(b, return_inverse=True)
    table = np.zeros((a.max() + 1, b.max() + 1), int)
    np.add.at(table, (a, b), 1)
    both = pairs(table)
    in_a = pairs(table.sum(1))
    in_b = pairs(table.sum(0))
    expected = in_a * in_b / max(pairs(np.array([a.size])), 1)
    most = (in_a + in_b) / 2
    return float((both - expected) / (most - expected)) if most > expected else 1.0
