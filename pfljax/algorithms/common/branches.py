"""Multi-branch layers as a transformation of the parameter tree: a layer's parameters are a mixture of B branches.

pFedMB (Mori, Yoshiyama, Ryo, Teranishi, 2022), Eq. 1: W_l = sum_b alpha_{b,l} W_{b,l}. Since that is an ordinary layer
with mixed weights, any model becomes a multi-branch one: its parameters get an axis of B branches in front.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from pfljax.core.types import Array, Params, PyTree
from pfljax.engine.plan import ExecutionPlan
from pfljax.models import Model


def layer_of(model: Model) -> dict[str, int]:
    """The layer to which each top-level name of the model's parameters belongs: kernel, bias and norm go together."""
    return {name: number for number, names in enumerate(model.layers) for name in names}


def by_layer(model: Model, weights: Array, params: Params, fn) -> PyTree:
    """fn(weights of the leaf's layer (..., B), leaf) for every leaf; weights (..., L, B), or (..., 1, B) for all."""
    layers = layer_of(model)
    of = lambda name: weights[..., layers[name] if weights.shape[-2] > 1 else 0, :]
    return {name: jax.tree.map(lambda leaf, name=name: fn(of(name), leaf), branch) for name, branch in params.items()}


def mix(model: Model, alpha: Array, branches: Params) -> Params:
    """Eq. 1: alpha (..., L, B) and branches with leaves (B, ...) give parameters with leaves (..., ...)."""
    return by_layer(model, alpha, branches, lambda weights, leaf: jnp.tensordot(weights, leaf, axes=1))


def scale(model: Model, weights: Array, branches: Params) -> Params:
    """Every branch (B, ...) times its weight (L, B)."""
    return by_layer(model, weights, branches, lambda w, leaf: leaf * w.reshape(w.shape + (1,) * (leaf.ndim - w.ndim)))


def projected(plan: ExecutionPlan, optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The optimizer, each of whose steps ends on the simplex: for alpha (L, B), by projecting every row."""

    def update(updates, state, params, **extra):
        del extra
        updates, state = optimizer.update(updates, state, params)
        return plan.over_rows(optax.projections.projection_simplex, params + updates) - params, state

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
