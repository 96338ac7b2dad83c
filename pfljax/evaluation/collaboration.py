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
    """How much clients share models within their true distributions, and across."""
    alike = cosines(index, weights)
    same = np.equal(distribution[:, None], distribution[None, :])
    others = same & ~np.eye(len(same), dtype=bool)
    mean = lambda mask: float(alike[mask].mean()) if mask.any() else float("nan")
    return Sharing(mean(others), mean(~same))
