"""Who collaborates with whom: the weights that clients give to models, and which clients share models."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Sharing(NamedTuple):
    """Mean cosines of two clients' rows of weights; NaN where there are no such two.

    Attributes:
        within: Of clients of one distribution; 1: they use the same models with the same weights.
        across: Of clients of different distributions; 0: they have no model in common.
    """

    within: float
    across: float


def dense(
    index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"], num_models: int
) -> Float[np.ndarray, "K N"]:
    """The matrix of each client's weight for each model; a repeated index adds."""
    out = np.zeros((len(index), num_models))
    np.add.at(out, (np.arange(len(index))[:, None], index), weights)
    return out


def cosines(index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"]) -> Float[np.ndarray, "K K"]:
    """How alike two clients' weights of models are: the cosine of their rows, 0 for a client without weights."""
    models, columns = np.unique(index, return_inverse=True)
    rows = dense(columns.reshape(index.shape), weights, len(models))
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(float).tiny)
    return rows @ rows.T


def sharing(
    index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"], distribution: Int[np.ndarray, " K"]
) -> Sharing:
    """How much clients share models within their true distributions, and across.

    From sums of unit rows, without a matrix of all pairs of clients: within a group, the cosines of all pairs and of
    each client with itself add up to |sum of the group's unit rows|^2.
    """
    models, columns = np.unique(index, return_inverse=True)
    groups, group = np.unique(distribution, return_inverse=True)
    columns = columns.reshape(index.shape)
    order = np.argsort(columns, axis=1, kind="stable")  # weights of a repeated index add
    columns, weights = np.take_along_axis(columns, order, 1), np.take_along_axis(weights, order, 1).astype(float)
    for j in range(1, columns.shape[1]):
        again = columns[:, j] == columns[:, j - 1]
        weights[again, j] += weights[again, j - 1]
        weights[again, j - 1] = 0
    unit = weights / np.maximum(np.linalg.norm(weights, axis=1, keepdims=True), np.finfo(float).tiny)
    sums = np.zeros((len(groups), len(models)))
    np.add.at(sums, (group[:, None], columns), unit)
    inside, everywhere = np.square(sums).sum(), np.square(sums.sum(axis=0)).sum()
    sizes = np.bincount(group).astype(float)
    pairs, strangers = (sizes * (sizes - 1)).sum(), sizes.sum() ** 2 - np.square(sizes).sum()
    ratio = lambda total, number: float(total / number) if number else float("nan")
    return Sharing(ratio(inside - np.square(unit).sum(), pairs), ratio(everywhere - inside, strangers))
