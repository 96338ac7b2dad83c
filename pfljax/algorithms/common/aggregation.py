"""Averages of the updates that clients send back.

A client sends theta_k - theta and its weight n_k; the engine adds up n_k (theta_k - theta) and n_k,
and the server adds the mean update to theta. What nobody trained then stays as it is to the last
bit. The difference of n_k theta_k and n_k theta would not be 0 in compiled code, which rounds one
product and not the other; and a rule that reads signs takes any difference for an update.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import Aggregate, Array, Params, PyTree

Mean = Literal["weighted", "uniform"]  # over clients: by number of examples, or equally


def client_weight(size: Array, mean: Mean) -> Array:
    """Weights of clients with these numbers of examples; 0 for clients without examples."""
    return (size if mean == "weighted" else size > 0).astype(jnp.float32)


def mean(aggregate: Aggregate) -> PyTree:
    """sum_k w_k u_k / sum_k w_k over what was sent back for each of N models; zeros if nothing was."""
    weight = aggregate.upload.weight
    return tree.scale(aggregate.upload.update, 1 / jnp.where(weight > 0, weight, 1))


def average(models: Params, aggregate: Aggregate) -> Params:
    """theta + sum_k w_k (theta_k - theta) / sum_k w_k for each of N models; one that got nothing back stays."""
    return tree.add(models, mean(aggregate))
