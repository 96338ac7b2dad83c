"""Servers that apply updates computed from older models: the last models are a stack, newest first."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp

from pfljax.contract import tree
from pfljax.contract.types import Array, Key, Params

Delays = Literal["half_normal", "uniform"]


def newest(stack: Params) -> Params:
    """The newest model (1, ...) of a stack."""
    return jax.tree.map(lambda leaf: leaf[:1], stack)


def begin(models: Params, most: int) -> Params:
    """A stack of most + 1 models, all the initial one (1, ...)."""
    return tree.repeat(models, most + 1)


def with_newest(stack: Params, new: Params) -> Params:
    """The stack with a new model (1, ...), without its oldest."""
    return jax.tree.map(lambda new, old: jnp.concatenate([new, old[:-1]]), new, stack)


def drawn(key: Key, delays: Delays, mean: float, most: int, rounds: Array) -> Array:
    """(1,) int32: how many steps a client is late, at most `most` and the number of rounds so far."""
    if delays == "uniform":
        late = jax.random.randint(key, (1,), 0, most + 1)
    else:
        scale = mean * math.sqrt(math.pi / 2)
        late = jnp.rint(scale * jnp.abs(jax.random.normal(key, (1,)))).astype(jnp.int32)
    return jnp.minimum(late, jnp.minimum(most, rounds))


def mean_lateness(late: Array) -> Array:
    """() mean of a round's numbers of steps late (S,)."""
    return late.astype(jnp.float32).mean()
