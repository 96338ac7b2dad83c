"""An LSTM that computes each weight gradient in one matrix product, and a next-character prediction network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array
from pfljax.models.structure import UNSET

# x, wx, wh, h, c and the gates of all steps
Residuals = tuple[Array, Array, Array, Array, Array, Array]


def _gates(z: Array) -> Array:
    """Input, forget, cell and output gates (B, 4 H) from pre-activations; one tanh, since sigmoid uses tanh too."""
    width = z.shape[-1] // 4
    # sigmoid(z) = (1 + tanh(z / 2)) / 2
    slope = jnp.repeat(jnp.array([0.5, 0.5, 1.0, 0.5], z.dtype), width)
    return jnp.tanh(z * slope) * slope + (1 - slope)


@jax.custom_vjp
def lstm(x: Array, wx: Array, wh: Array, b: Array) -> Array:
    """An LSTM layer (Hochreiter and Schmidhuber, 1997, with forget gates), from zero states.

    c_t = f c_{t-1} + i g and h_t = o tanh(c_t), with (i, f, g, o) from x_t wx + h_{t-1} wh + b. Differentiating the
    scan would update the gradient of `wh` at every step, which reads it T times from memory. Here the backward scan
    computes only the gates' gradients, and the weight gradients are products over all steps at once.

    Args:
        x: (T, B, F).
        wx: (F, 4 H), gates in the order input, forget, cell, output.
        wh: (H, 4 H).
        b: (4 H,).

    Returns:
        h (T, B, H).
    """
    return _forward(x, wx, wh, b)[0]


def _forward(x: Array, wx: Array, wh: Array, b: Array) -> tuple[Array, Residuals]:
    """h, and what the gradient needs."""
    zeros = jnp.zeros((x.shape[1], wh.shape[0]), x.dtype)

    def step(carry: tuple[Array, Array, Array], t: Array) -> tuple[Any, tuple[Array, Array]]:
        h, c, z = carry
        gates = _gates(jax.lax.dynamic_index_in_dim(z, t, keepdims=False) + (h @ wh + b))
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = f * c + i * g
        h = o * jnp.tanh(c)
        # Gates overwrite their pre-activations, which saves a buffer, and the bias needs no separate pass.
        z = jax.lax.dynamic_update_index_in_dim(z, gates, t, 0)
        return (h, c, z), (h, c)

    start = (zeros, zeros, x @ wx)
    (_, _, gates), (h, c) = jax.lax.scan(step, start, jnp.arange(x.shape[0]))
    return h, (x, wx, wh, h, c, gates)


def _backward(residuals: Residuals, dy: Array) -> tuple[Array, Array, Array, Array]:
    """The gradients with respect to x, wx, wh and b, given that of h."""
    x, wx, wh, h, c, gates = residuals

    def before(states: Array) -> Array:
        """The states before each step."""
        return jnp.concatenate([jnp.zeros_like(states[:1]), states[:-1]])

    def step(carry: tuple[Array, Array], inputs: Any) -> tuple[tuple[Array, Array], Array]:
        dh, dc = carry
        dy, c, c_before, gates = inputs
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        dh = dh + dy
        tanh_c = jnp.tanh(c)
        dc = dc + dh * o * (1 - tanh_c * tanh_c)
        dz = [
            dc * g * i * (1 - i),
            dc * c_before * f * (1 - f),
            dc * i * (1 - g * g),
            dh * tanh_c * o * (1 - o),
        ]
        dz = jnp.concatenate(dz, axis=-1)
        return (dz @ wh.T, dc * f), dz

    zeros = jnp.zeros_like(h[0])
    _, dz = jax.lax.scan(step, (zeros, zeros), (dy, c, before(c), gates), reverse=True)

    # The gradients of the matrices are products over all steps at once.
    dx = dz @ wx.T
    dwx = _rows(x).T @ _rows(dz)
    dwh = _rows(before(h)).T @ _rows(dz)
    return dx, dwx, dwh, _rows(dz).sum(axis=0)


def _rows(a: Array) -> Array:
    """(T, B, F) -> (T B, F)."""
    return a.reshape(-1, a.shape[-1])


lstm.defvjp(_forward, _backward)


class LSTMLayer(nn.Module):
    """`lstm` with its weights: (T, B, F) -> (T, B, H)."""

    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = nn.initializers.lecun_normal()
        width = 4 * self.features
        wx = self.param("wx", kernel, (x.shape[-1], width))
        wh = self.param("wh", kernel, (self.features, width))
        bias = self.param("bias", nn.initializers.zeros, (width,))
        # One-hot rows are float32, whatever the weights are cast to.
        return lstm(x.astype(wx.dtype), wx, wh, bias)


class CharacterLSTM(nn.Module):
    """Next-character prediction as in FedEM (Table 1): tokens (B, T) -> logits (B, T, C).

    Attributes:
        embedding: Width of a token's embedding.
        hidden: Widths of the LSTM layers.
        outputs: Number C of characters; None: set when the model is built for data.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pfljax as pfl
        >>> network = pfl.models.CharacterLSTM(hidden=(16,))
        >>> model = pfl.models.build(network, (80,), "classification", 90, dtype=jnp.int32)
        >>> model.output_shape
        (1, 80, 90)
    """

    embedding: int = 8
    hidden: Sequence[int] = (256, 256)
    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if x.ndim != 2:
            text = f"needs sequences of tokens; this data's examples have shape {x.shape[1:]}"
            raise ArgumentError("model", text)
        # A product with one-hot rows: on a CPU, the gradient of a gather is a slow scatter.
        embed = nn.Dense(self.embedding, use_bias=False, name="embedding")
        x = embed(jax.nn.one_hot(x.T, self.outputs))
        for width in self.hidden:
            x = LSTMLayer(width)(x)
        logits = nn.Dense(self.outputs)(x)
        return jnp.swapaxes(logits, 0, 1)
