"""Multi-branch layers as a transformation of the parameter tree: a layer's parameters are a mixture of B branches.

pFedMB (Mori, Yoshiyama, Ryo, Teranishi, 2022), Eq. 1: W_l = sum_b alpha_{b,l} W_{b,l}. The result is an ordinary layer
with mixed weights, so any model can be multi-branch: its parameters get a leading axis of B branches.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pfljax.contract.types import Array, Params, PyTree
from pfljax.local.problem import Problem


def by_layer(problem: Problem, weights: Array, params: Params, fn) -> PyTree:
    """fn(weights of the leaf's layer (..., B), leaf) for every leaf; weights (..., L, B), or (..., 1, B) for all.

    Batch statistics pass no gradient to the weights.
    """

    def one(number, statistic, leaf):
        of_layer = weights[..., number if weights.shape[-2] > 1 else 0, :]
        return fn(jax.lax.stop_gradient(of_layer) if statistic else of_layer, leaf)

    statistics = problem.model.statistics(params) or jax.tree.map(lambda _: False, params)
    return jax.tree.map(one, problem.model.layer_numbers(params), statistics, params)


def mix(problem: Problem, alpha: Array, branches: Params) -> Params:
    """Eq. 1: alpha (..., L, B) and branches with leaves (B, ...) give parameters with leaves (..., ...)."""
    return by_layer(problem, alpha, branches, lambda weights, leaf: jnp.tensordot(weights, leaf, axes=1))


def scale(problem: Problem, weights: Array, branches: Params) -> Params:
    """Every branch (B, ...) times its weight (L, B)."""
    return by_layer(problem, weights, branches, lambda w, leaf: leaf * w.reshape(w.shape + (1,) * (leaf.ndim - w.ndim)))
