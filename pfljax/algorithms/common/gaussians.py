"""Gaussians of features by class with one covariance, and the linear head that is computed from them.

McLaughlin, Su, "Personalized federated learning via feature distribution adaptation" (NeurIPS 2024).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import classes
from pfljax.contract import tree
from pfljax.contract.types import Array

EPSILON = 1e-4  # the share of the identity in S, and what is added to shares of classes
blend = lambda weight, mine, theirs: weight * mine + (1 - weight) * theirs


class Gaussians(NamedTuple):
    """Features by class: mu (C, F) and Sigma (F, F)."""

    means: Array
    covariance: Array


def discriminant(gaussians: Gaussians, shares: Array) -> tuple[Array, Array]:
    """The head's weights m (F, C) and offsets (C,)."""
    weights = solved(gaussians.covariance, gaussians.means)
    return weights, jnp.log(shares) - (gaussians.means.T * weights).sum(axis=0) / 2


def solved(covariance: Array, means: Array) -> Array:
    """S^-1 mu, (F, C)."""
    size = len(covariance)
    shrunk = (1 - EPSILON) * covariance + EPSILON * jnp.trace(covariance) / size * jnp.eye(size)
    return jax.scipy.linalg.solve(shrunk, means.T)  # noise on what travels may leave it indefinite


def estimated(z: Array, labels: Array, means: Array, ridge: Array | float, most: int = 0) -> Gaussians:
    """mu_k and Sigma_k of features z (n, F) with `labels` (n, C), rows of zeros where an example does not count.

    A class with at most `most` examples has its row of `means`.
    """
    counts = labels.sum(axis=0)
    means = tree.where(counts > most, classes.means(labels.T @ z, counts), means)
    apart = labels.sum(axis=1)[:, None] * z - labels @ means
    scatter = apart.T @ apart / jnp.maximum(counts.sum() - 1, 1)
    return Gaussians(means, scatter + ridge * jnp.eye(z.shape[1]))


def mixed(own: Gaussians, received: Gaussians, a: Array | float, b: Array | float) -> Gaussians:
    """mu' and Sigma'."""
    return Gaussians(blend(a, own.means, received.means), blend(b, own.covariance, received.covariance))
