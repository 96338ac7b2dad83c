"""Weights of any sign by which peers' parameters (not predictions) are mixed, as a run records them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pfljax.contract.types import Array, Mixture

NUM_SHOWN = 16  # number of heaviest models that a run records for each client


def heaviest(weights: Array) -> dict[str, Array]:
    """The models with the largest |weights| (K,); "signed" holds the weights with their signs."""
    num_shown = min(NUM_SHOWN, len(weights))
    _, index = jax.lax.top_k(jnp.abs(weights), num_shown)
    index = index.astype(jnp.int32)
    shown = by_size(index, weights[index])
    return {"index": shown.index, "weights": shown.weights, "signed": weights[index]}


def by_size(index: Array, weights: Array) -> Mixture:
    """The models in index (J,), weighted by |weights| (J,), normalized to sum to 1."""
    size = jnp.abs(weights)
    total = jnp.maximum(size.sum(), jnp.finfo(jnp.float32).tiny)
    return Mixture(index, size / total)
