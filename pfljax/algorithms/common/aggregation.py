"""Averages of the models that clients send back."""

from __future__ import annotations

import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import Aggregate, Array, Params, PyTree


def weighted(models: Params, size: Array, num: int = 1) -> tuple[PyTree, Array]:
    """A client's contributions to averages, weighted by its number of examples, and whether it sends them.

    Args:
        models: The J models that the client trained, leaves (J, ...).
        size: () n_k, or (J,) a weight for each model.
        num: J.

    Returns:
        The upload, leaves (J, ...), and `sent` (J,): a client without examples sends nothing.
    """
    size = jnp.broadcast_to(jnp.float32(size), (num,))
    return {"model": tree.scale(models, size), "weight": size}, size > 0


def average(models: Params, aggregate: Aggregate) -> Params:
    """sum_k n_k theta_k / sum_k n_k for each of N models; a model that got nothing back stays as it is."""
    weight = aggregate.upload["weight"]
    mean = tree.scale(aggregate.upload["model"], 1 / jnp.where(weight > 0, weight, 1))
    return tree.where(weight > 0, mean, models)
