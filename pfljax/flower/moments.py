"""Means and deviations of all clients' features, from sums that each node computes on its own examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pfljax.contract.pooled import is_pooled
from pfljax.data import Federation
from pfljax.flower.wire import Arrays

CATEGORY = (
    "="  # in the name of a column that says whether an example has a category; it is never scaled
)


def measure(federation: Federation) -> Arrays:
    """Count, mean and sum of squared differences of a client's scaled features; {} if models scale nothing.

    Args:
        federation: The client alone. Its `scaling` says which arrays are scaled, and along which axes.
    """
    if federation.scaling is None:
        return {}
    size = int(federation.train.size[0])
    arrays: Arrays = {}

    def measured(path: Any, mean: np.ndarray | None, x: Any) -> None:
        if mean is None:
            return
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "value"
        values = np.asarray(x[0, :size]).astype(np.float64)
        axes = tuple(range(values.ndim - np.ndim(mean)))
        center = values.mean(axes)
        arrays[f"count/{name}"] = np.array(values.size // max(np.size(center), 1), np.float64)
        arrays[f"mean/{name}"] = np.asarray(center)
        arrays[f"squares/{name}"] = np.asarray(np.square(values - center).sum(axes))

    jax.tree_util.tree_map_with_path(
        measured, federation.scaling.mean, federation.train.x, is_leaf=is_leaf
    )
    if len(federation.feature_names) > 0:
        is_category = [CATEGORY in name for name in federation.feature_names]
        arrays["category/columns"] = np.array(is_category)
    return arrays


def is_leaf(node: Any) -> bool:
    """Whether a node is an array of examples, or stands for one that is not scaled."""
    return node is None or is_pooled(node)


def combined(measured: Sequence[Mapping[str, np.ndarray]]) -> Arrays:
    """The mean and the deviation of all examples, as `scaling/mean/NAME` and `scaling/std/NAME`.

    Args:
        measured: What each client measured.
    """
    names = [key.removeprefix("mean/") for key in measured[0] if key.startswith("mean/")]
    arrays: Arrays = {}
    for name in names:
        counts = np.array([client[f"count/{name}"] for client in measured])
        means = np.stack([client[f"mean/{name}"] for client in measured])
        squares = np.stack([client[f"squares/{name}"] for client in measured])
        total = counts.sum()
        weights = counts.reshape(-1, *[1] * (means.ndim - 1))
        mean = (weights * means).sum(axis=0) / total
        between = (weights * np.square(means - mean)).sum(axis=0)
        std = np.sqrt((squares.sum(axis=0) + between) / total)
        std = np.where(std > 0, std, 1)  # a constant feature becomes 0
        if "category/columns" in measured[0]:
            is_category = measured[0]["category/columns"]
            mean = np.where(is_category, 0, mean)
            std = np.where(is_category, 1, std)
        arrays[f"scaling/mean/{name}"] = np.asarray(mean)
        arrays[f"scaling/std/{name}"] = np.asarray(std)
    return arrays


def section(arrays: Mapping[str, np.ndarray], kind: str) -> Arrays:
    """The arrays `scaling/KIND/NAME` as `scaling/NAME`."""
    prefix = f"scaling/{kind}/"
    return {
        f"scaling/{name.removeprefix(prefix)}": array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
