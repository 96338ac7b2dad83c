"""What a client sends, seen as an update: the part of an upload that attackers and compression may change."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import Algorithm, Params, PyTree


def payload(update: PyTree, axes: int = 1) -> PyTree:
    """A tree of bools: which leaves of an upload or report are payload.

    Weights, counts, numbers that are no floats, and leaves with only the leading `axes` next to other leaves are none.
    """
    found, form = jax.tree.flatten_with_path(update)
    alone = axes > 0 and len(found) == 1

    def one(path, leaf):
        # Only entries of the update itself: a model's parameters may have these names, too.
        name: Any = getattr(path[0], "key", None) if len(path) == 1 else None
        floats = jnp.issubdtype(leaf.dtype, jnp.floating)
        return alone or (name not in ("weight", "count") and floats and leaf.ndim > axes)

    return jax.tree.unflatten(form, [one(path, leaf) for path, leaf in found])


def relative(algorithm: Algorithm, models: Params, upload: PyTree) -> PyTree:
    """The upload with weighted updates in place of weighted models that were trained from received `models`."""
    if algorithm.averages is None:
        return upload
    start = tree.scale(algorithm.averages(models), upload["weight"])
    return upload | {"model": tree.subtract(upload["model"], start)}


def absolute(algorithm: Algorithm, models: Params, update: PyTree) -> PyTree:
    """Undoes `relative`; the server has the `models` that clients train from."""
    if algorithm.averages is None:
        return update
    start = tree.scale(algorithm.averages(models), update["weight"])
    return update | {"model": tree.add(start, update["model"])}
