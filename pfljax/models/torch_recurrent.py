"""PyTorch's recurrent layers as loops over time; torchax would compile a step for each position.

What the inputs add is one matrix product over all positions, outside the loop. Gates are in PyTorch's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract.types import Array, Key

State = tuple[Array, ...]  # h, or h and c


class Weights(NamedTuple):
    """The weights of one layer in one direction, for G gates.

    Attributes:
        inputs: (G H, F).
        states: (G H, P), where P is H, or the width that h is projected to.
        input_bias: (G H,); 0: none.
        state_bias: (G H,); 0: none.
        projection: (P, H) of an LSTM; None: h is not projected.
    """

    inputs: Array
    states: Array
    input_bias: Array | float = 0.0
    state_bias: Array | float = 0.0
    projection: Array | None = None


# (what the inputs add to the gates (B, G H), what h adds, the state before) -> the state after, h not projected
Cell = Callable[[Array, Array, State], State]


def lstm(input_part: Array, state_part: Array, state: State) -> State:
    """c' = f c + i g and h' = o tanh(c'), with the gates i, f, g and o."""
    _, c = state
    i, f, g, o = jnp.split(input_part + state_part, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def gru(input_part: Array, state_part: Array, state: State) -> State:
    """h' = (1 - z) n + z h, where the reset gate r scales what h adds to n."""
    (h,) = state
    input_r, input_z, input_n = jnp.split(input_part, 3, axis=-1)
    state_r, state_z, state_n = jnp.split(state_part, 3, axis=-1)
    r = jax.nn.sigmoid(input_r + state_r)
    z = jax.nn.sigmoid(input_z + state_z)
    n = jnp.tanh(input_n + r * state_n)
    return ((1 - z) * n + z * h,)


def rnn_tanh(input_part: Array, state_part: Array, state: State) -> State:
    """h' = tanh(W x + U h + b)."""
    del state
    return (jnp.tanh(input_part + state_part),)


def rnn_relu(input_part: Array, state_part: Array, state: State) -> State:
    """h' = relu(W x + U h + b)."""
    del state
    return (jax.nn.relu(input_part + state_part),)


def run_layers(
    cell: Cell,
    x: Array,
    start: State,
    layers: Sequence[Weights],
    num_directions: int,
    rate: float,
    key: Key | None,
) -> tuple[Array, State]:
    """Runs stacked layers, each of which reads the outputs of the one before.

    Args:
        cell: A step.
        x: (T, B, F).
        start: The first states, (layers, B, H) each.
        layers: The weights; with two directions, forward and backward ones take turns.
        num_directions: 1 or 2.
        rate: Rate of the dropout between layers.
        key: Of the dropout; None: no dropout.

    Returns:
        The last layer's outputs (T, B, directions H), and the last states, as `start`.
    """
    last = []
    for number in range(0, len(layers), num_directions):
        if number > 0 and key is not None:
            key, subkey = jax.random.split(key)
            is_kept = jax.random.bernoulli(subkey, 1 - rate, x.shape)
            x = jnp.where(is_kept, x / (1 - rate), 0)
        outputs = []
        for direction in range(num_directions):
            position = number + direction
            state = tuple(states[position] for states in start)
            h, state = run_layer(cell, x, state, layers[position], direction == 1)
            outputs.append(h)
            last.append(state)
        x = jnp.concatenate(outputs, axis=-1)
    states = tuple(jnp.stack(values) for values in zip(*last, strict=True))
    return x, states


def run_layer(
    cell: Cell, x: Array, state: State, weights: Weights, backward: bool
) -> tuple[Array, State]:
    """A layer's outputs (T, B, H), and its last state; `backward`: from the last position to the first."""
    input_parts = x @ weights.inputs.T + weights.input_bias
    state = tuple(value.astype(input_parts.dtype) for value in state)
    matrix = weights.states.T

    def step(state: State, input_part: Array) -> tuple[State, Array]:
        state_part = state[0] @ matrix + weights.state_bias
        h, *others = cell(input_part, state_part, state)
        if weights.projection is not None:
            h = h @ weights.projection.T
        return (h, *others), h

    state, h = jax.lax.scan(step, state, input_parts, reverse=backward)
    return h, state
