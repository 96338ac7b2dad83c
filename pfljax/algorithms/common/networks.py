"""Layers that methods train beside a model: parameters drawn as in PyTorch, computed by Flax.

A normalized layer is affine and has a layer normalization: {"weight": (inputs, outputs), "bias": (outputs,),
"gain": (outputs,), "offset": (outputs,)}.
"""

from __future__ import annotations

from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfljax.contract.types import Array, Key, Params

EPSILON = 1e-5  # of the layer normalization, as in PyTorch


def uniform_as_in_pytorch(key: Key, shape: tuple[int, ...], inputs: int) -> Array:
    """Weights or biases of PyTorch's `Linear`: uniform between -1 and 1 over the root of the number of inputs."""
    bound = inputs**-0.5
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def init_normalized_layer(weight_key: Key, bias_key: Key, inputs: int, outputs: int) -> Params:
    """A normalized layer at first."""
    return {
        "weight": uniform_as_in_pytorch(weight_key, (inputs, outputs), inputs),
        "bias": uniform_as_in_pytorch(bias_key, (outputs,), inputs),
        "gain": jnp.ones(outputs),
        "offset": jnp.zeros(outputs),
    }


def affine(layer: Params, inputs: Array) -> Array:
    """The outputs (..., outputs) of a layer's weight and bias for inputs (..., inputs)."""
    params = {"kernel": layer["weight"], "bias": layer["bias"]}
    dense = nn.Dense(len(layer["bias"]))
    return cast(Array, dense.apply({"params": params}, inputs))


def normalized(layer: Params, inputs: Array) -> Array:
    """The layer normalization (..., outputs) of inputs (..., outputs), with a layer's gain and offset."""
    params = {"scale": layer["gain"], "bias": layer["offset"]}
    layer_norm = nn.LayerNorm(epsilon=EPSILON, use_fast_variance=False)
    return cast(Array, layer_norm.apply({"params": params}, inputs))
