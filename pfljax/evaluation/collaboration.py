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
    group = np.unique(distribution, return_inverse=True)[1]
    # Pairs of a client and a model that it uses; a repeated index adds. Nothing has the size of clients x models.
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
