"""Subspaces that the rows of LoRA's B span, one for each adapted weight: how they move, overlap and cluster.

Bases are trees of arrays (L, r, outputs), for L stacked layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pfljax.algorithms.common import low_rank
from pfljax.algorithms.common.clusters import by_eigengap
from pfljax.contract import tree
from pfljax.contract.types import Array, Params, PyTree
from pfljax.contract.vectors import orthonormal
from pfljax.local.problem import Problem


def bases(problem: Problem, params: Params) -> PyTree:
    """B of each weight."""
    return {path: b for path, (_, b) in problem.model.network.factors(params).items()}


def zeros(problem: Problem, *num: int) -> PyTree:
    """Zeros in the shapes of `num` bases, or of one."""
    shapes = jax.eval_shape(lambda params: bases(problem, params), problem.model.network.shapes)
    return jax.tree.map(lambda b: jnp.zeros((*num, *b.shape)), shapes)


def moved(problem: Problem, basis: PyTree, params: Params, decay: Array | float) -> PyTree:
    """decay C + (1 - decay) B / |B| for each weight."""
    norm = lambda b: jnp.maximum(jnp.linalg.norm(b), jnp.finfo(jnp.float32).tiny)
    return jax.tree.map(lambda c, b: decay * c + (1 - decay) * b / norm(b), basis, bases(problem, params))


def spanned(basis: PyTree) -> PyTree:
    """U (L, r, outputs) for each weight: orthonormal rows that span the rows of C; zeros for rows that add nothing."""
    return jax.tree.map(orthonormal, basis)


def overlap(a: PyTree, b: PyTree) -> Array:
    """() |A B^T|^2, summed over layers and weights (..., r, outputs)."""
    squares = jax.tree.map(lambda x, y: jnp.square(x @ y.mT).sum(), a, b)
    return jnp.asarray(sum(jax.tree.leaves(squares)))


def similarity(a: PyTree, b: PyTree) -> Array:
    """(N, M) mean |U_n U_m^T|^2 / r over layers and weights, of bases (N, L, r, outputs) and (M, L, r, outputs)."""

    def one(x, y):
        products = jnp.einsum("nlro,mlqo->nmlrq", x, y)
        return jnp.square(products).sum(axis=(-1, -2)).mean(axis=-1) / x.shape[-2]

    each = jax.tree.leaves(jax.tree.map(one, a, b))
    return jnp.stack(each).mean(axis=0)


def closest(basis: PyTree, clusters: PyTree) -> Array:
    """() the cluster whose basis is most similar to a client's."""
    return jnp.argmax(similarity(tree.stack_one(basis), clusters)[0])


def leading(bases: PyTree, num: int) -> PyTree:
    """(num, L, r, outputs) leading directions of clusters of clients, from their bases (S, L, r, outputs)."""
    distance = 1 - similarity(bases, bases)
    sigma = jnp.nanmedian(jnp.where(jnp.eye(len(distance), dtype=bool), jnp.nan, distance))
    affinity = jnp.exp(-jnp.square(distance / jnp.maximum(sigma, 1e-6)) / 2)
    member = jax.nn.one_hot(by_eigengap(affinity, num), num)

    def one(u):
        rows = jnp.einsum("sc,slro->clsro", member, u).reshape(num, u.shape[1], -1, u.shape[-1])
        return low_rank.svd(rows)[2][..., : u.shape[-2], :]

    return jax.tree.map(one, bases)
