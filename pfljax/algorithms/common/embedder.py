"""A network that describes a client: an MLP of inputs and one-hot labels, averaged over the client's examples."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pfljax.algorithms.common.hypernetwork import he_layer, mlp
from pfljax.contract import tree
from pfljax.contract.types import Array, Key, PyTree, Split
from pfljax.local.batches import masked, sum_over_examples
from pfljax.local.problem import Problem

PROBES = 100  # number of random inputs


def init(key: Key, problem: Problem, widths: tuple[int, ...]) -> PyTree:
    """The MLP's layers, for classes; `widths` are those of hidden layers and of the descriptor."""
    leaves = jax.tree.leaves(problem.model.example_input)
    first = sum(math.prod(leaf.shape[1:]) for leaf in leaves) + problem.model.output_shape[-1]
    keys = jax.random.split(key, len(widths))
    return [he_layer(key, *pair) for key, *pair in zip(keys, (first, *widths), widths, strict=False)]


def probed(phi: PyTree, key: Key) -> Array:
    """(E,) the mean output for random inputs."""
    return mlp(phi, jax.random.normal(key, (PROBES, phi[0]["kernel"].shape[0]))).mean(axis=0)


def described(phi: PyTree, split: Split) -> Array:
    """v (E,), the mean output for a client's examples; zeros without any."""

    def of_block(x, y, mask):
        return jnp.where(mask[:, None], mlp(phi, inputs_of(phi, *masked(x, y, mask))), 0).sum(axis=0)

    return sum_over_examples(of_block, split) / jnp.maximum(split.size, 1)


def pulled_back(phi: PyTree, split: Split, slope: Array) -> PyTree:
    """The vector-Jacobian product of a client's v with `slope` (E,), in phi."""

    def of_block(x, y, mask):
        inputs = inputs_of(phi, *masked(x, y, mask))
        return jax.grad(lambda phi: jnp.where(mask, mlp(phi, inputs) @ slope, 0).sum())(phi)

    return tree.scale(sum_over_examples(of_block, split), 1 / jnp.maximum(split.size, 1))


def inputs_of(phi: PyTree, x: PyTree, y: Array) -> Array:
    """(B, D) flat inputs, then one-hot labels."""
    flat = [jnp.float32(leaf.reshape(len(y), -1)) for leaf in jax.tree.leaves(x)]
    width = sum(leaf.shape[1] for leaf in flat)
    return jnp.concatenate([*flat, jax.nn.one_hot(y, phi[0]["kernel"].shape[0] - width)], axis=1)
