"""Servers that apply updates computed from older models: the last models are a stack, newest first."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract import tree
from pfljax.contract.types import Aggregate, Array, Key, Mixture, Params, Upload

Delays = Literal["half_normal", "uniform"]
THE_NEWEST = Mixture(np.zeros((1,), np.int32), np.ones((1,), np.float32))


def newest(stack: Params) -> Params:
    """The newest model (1, ...) of a stack."""
    return jax.tree.map(lambda leaf: leaf[:1], stack)


def begin(models: Params, most: int) -> Params:
    """A stack of most + 1 models, all the initial one (1, ...)."""
    return tree.repeat(models, most + 1)


def with_newest(stack: Params, new: Params) -> Params:
    """The stack with a new model (1, ...), without its oldest."""

    def push(new: Array, old: Array) -> Array:
        return jnp.concatenate([new, old[:-1]])

    return jax.tree.map(push, new, stack)


def buffer(aggregate: Aggregate) -> Upload:
    """What came for all models of the stack together, leaves (1, ...)."""
    return jax.tree.map(lambda leaf: leaf.sum(axis=0, keepdims=True), aggregate.upload)


def draw_delay(key: Key, delays: Delays, mean: float, most: int, rounds: Array) -> Array:
    """(1,) int32: a client's number of steps late, at most `most` and the number of rounds so far."""
    if delays == "uniform":
        late = jax.random.randint(key, (1,), 0, most + 1)
    else:
        scale = mean * math.sqrt(math.pi / 2)
        drawn = scale * jnp.abs(jax.random.normal(key, (1,)))
        late = jnp.rint(drawn).astype(jnp.int32)
    return jnp.minimum(late, jnp.minimum(most, rounds))


def mean_lateness(late: Array) -> Array:
    """() mean of a round's numbers of steps late (S,)."""
    return late.astype(jnp.float32).mean()
