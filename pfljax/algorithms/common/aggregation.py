"""Averages of the updates that clients send back.

A client sends n_k (theta_k - theta), and the server adds the mean update to theta. What nobody trained then stays as it
is to the last bit. The difference of n_k theta_k and n_k theta would not be 0 in compiled code, which rounds one
product and not the other; and a rule that reads signs takes any difference for an update.
"""

from __future__ import annotations

import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import Aggregate, Array, Params, PyTree


def weighted(update: PyTree, size: Array, num: int = 1) -> tuple[PyTree, Array]:
    """A client's contributions to averages, weighted by its number of examples, and whether it sends them.

    Args:
        update: theta_k - theta for the J models that the client trained, or what else is averaged, leaves (J, ...).
        size: () n_k, or (J,) a weight for each model.
        num: J.

    Returns:
        The upload, leaves (J, ...), and `sent` (J,): a client without examples sends nothing.
    """
    size = jnp.broadcast_to(jnp.float32(size), (num,))
    return {"model": tree.scale(update, size), "weight": size}, size > 0


def mean(aggregate: Aggregate) -> PyTree:
    """sum_k n_k u_k / sum_k n_k over what was sent back for each of N models; zeros if nothing was."""
    weight = aggregate.upload["weight"]
    return tree.scale(aggregate.upload["model"], 1 / jnp.where(weight > 0, weight, 1))


def average(models: Params, aggregate: Aggregate) -> Params:
    """theta + sum_k n_k (theta_k - theta) / sum_k n_k for each of N models; one that got nothing back stays."""
    return tree.add(models, mean(aggregate))
