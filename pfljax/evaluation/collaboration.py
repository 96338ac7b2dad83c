"""Collaboration between clients: the weights they give to models, and which clients share models."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Sharing(NamedTuple):
    """Mean cosine between two clients' rows of weights; NaN if there are no such pairs.

    Attributes:
        within: For clients of the same distribution; 1: they use the same models with the same weights.
        across: For clients of different distributions; 0: they have no model in common.
    """

    within: float
    across: float


def dense(
    index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"], num_models: int
) -> Float[np.ndarray, "K N"]:
    """The matrix of each client's weight for each model; repeated indices add up."""
    out = np.zeros((len(index), num_models))
    np.add.at(out, (np.arange(len(index))[:, None], index), weights)
    return out


def cosines(index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"]) -> Float[np.ndarray, "K K"]:
    """Similarity of clients' weights: the cosines between their rows, 0 for a client without weights."""
    models, columns = np.unique(index, return_inverse=True)
    rows = dense(columns.reshape(index.shape), weights, len(models))
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(float).tiny)
    return rows @ rows.T


def sharing(
    index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"], distribution: Int[np.ndarray, " K"]
) -> Sharing:
    """How much clients share models within and across their true distributions.

    Uses sums of unit rows instead of a matrix of all pairs: within a group, the cosines of all pairs, each client with
    itself included, add up to |sum of the group's unit rows|^2.
    """
    models, columns = np.unique(index, return_inverse=True)
    group = np.unique(distribution, return_inverse=True)[1]
    # Pairs of a client and a model that it uses; repeated indices add up. No array has the size clients x models.
    pairs, place = np.unique(
        np.arange(len(index))[:, None] * len(models) + columns.reshape(index.shape), return_inverse=True
    )
    used = np.bincount(place.ravel(), weights.ravel())
    client, model = np.divmod(pairs, len(models))
    unit = used / np.maximum(np.sqrt(np.bincount(client, used**2)), np.finfo(float).tiny)[client]
    place = np.unique(group[client] * len(models) + model, return_inverse=True)[1]
    inside, everywhere = (np.square(np.bincount(by, unit)).sum() for by in (place, model))
    sizes = np.bincount(group).astype(float)
    alike, different = (sizes * (sizes - 1)).sum(), sizes.sum() ** 2 - np.square(sizes).sum()  # numbers of pairs
    ratio = lambda total, number: float(total / number) if number else float("nan")
    return Sharing(ratio(inside - np.square(unit).sum(), alike), ratio(everywhere - inside, different))


def adjusted_rand_index(a: Int[np.ndarray, " n"], b: Int[np.ndarray, " n"]) -> float:
    """Adjusted Rand index of two partitions of n items, given each item's group (Hubert and Arabie, 1985, Eq. 5).

    1 for equal partitions, 0 on average for random ones. Importing scikit-learn's takes most of a second.
    """
    pairs = lambda counts: (counts * (counts - 1) // 2).sum()
    (_, a), (_, b) = np.unique(a, return_inverse=True), np.unique(b, return_inverse=True)
    table = np.zeros((a.max() + 1, b.max() + 1), int)
    np.add.at(table, (a, b), 1)
    both, in_a, in_b = pairs(table), pairs(table.sum(1)), pairs(table.sum(0))
    expected, most = in_a * in_b / max(pairs(np.array([a.size])), 1), (in_a + in_b) / 2
    return float((both - expected) / (most - expected)) if most > expected else 1.0
