"""Transformers for images and tokens, in the forms of published ones, so that their weights can be loaded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array
from pfljax.models.networks import check_images
from pfljax.models.structure import UNSET

Norm = Literal["layer", "rms"]
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
}
DEEPEST = 1000  # blocks, which are traced one by one


@dataclasses.dataclass(frozen=True)
class Style:
    """In which published Transformers' blocks differ."""

    norm: Norm = "layer"  # layer norm or RMS norm
    # whether norms follow the sums, as in BERT, instead of preceding attention and MLP
    after: bool = False
    activation: str = "gelu"  # of the MLP
    gated: bool = False  # whether the MLP multiplies two branches
    bias: bool = True  # whether products add a bias
    eps: float = 1e-6  # of the norms
    layer_scale: bool = False  # whether trained factors scale what attention and MLP add
    # base of rotary position embeddings; 0: learned positions are added to the inputs
    rotary: float = 0.0
    kv_heads: int = 0  # number of heads of keys and values; 0: as many as of queries
    head_width: int = 0  # width of a head; 0: the model's width over the number of heads
    qk_norm: bool = False  # whether queries and keys are normalized
    # number of trained tokens of a ViT beside the class token and the patches (Darcet et al., 2024)
    registers: int = 0
    key_bias: bool = True  # whether keys add a bias, where products do

    def normalize(self, name: str) -> nn.Module:
        return (
            nn.RMSNorm(epsilon=self.eps, name=name)
            if self.norm == "rms"
            else nn.LayerNorm(self.eps, name=name)
        )

    def head(self, width: int, heads: int) -> int:
        return self.head_width or width // heads


STYLES = {
    "vit": Style(),
    "dinov2": Style(layer_scale=True),
    "dinov3": Style(layer_scale=True, eps=1e-5, rotary=100.0, registers=4, key_bias=False),
    "bert": Style(after=True, eps=1e-12),
    "gpt2": Style(activation="gelu_tanh", eps=1e-5),
    "qwen3": Style("rms", activation="silu", gated=True, bias=False, rotary=1e6, qk_norm=True),
}


class Attention(nn.Module):
    """Multi-head attention; keys and values may have fewer heads than queries."""

    heads: int
    style: Style
    causal: bool

    @nn.compact
    def __call__(self, x: Array, mask: Array | None, angles: Array | None) -> Array:
        """Attends within tokens x (B, T, width), to those of a mask (B, T).

        Pairs of coordinates of queries and keys are rotated by angles (T, head width / 2).
        """
        style = self.style
        width = x.shape[-1]

        def project(name, num, bias):
            return nn.DenseGeneral(
                (num, style.head(width, self.heads)), use_bias=bias and style.bias, name=name
            )(x)

        keys = style.kv_heads or self.heads
        q = project("query", self.heads, True)
        k = project("key", keys, style.key_bias)
        v = project("value", keys, True)
        if style.qk_norm:
            q = style.normalize("query_norm")(q)
            k = style.normalize("key_norm")(k)
        if angles is not None:
            q = rotated(q, angles)
            k = rotated(k, angles)
        wide = None if mask is None else mask[:, None, None, :]
        y = jax.nn.dot_product_attention(q, k, v, mask=wide, is_causal=self.causal)
        return nn.DenseGeneral(width, (-2, -1), use_bias=style.bias, name="out")(y)


class MLP(nn.Module):
    """Two dense layers with an activation, or three with a gate."""

    hidden: int
    style: Style

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """x (..., width) -> (..., width)."""
        style = self.style
        act = ACTIVATIONS[self.style.activation]
        dense = functools.partial(nn.Dense, use_bias=style.bias)
        y = dense(self.hidden, name="up")(x)
        y = act(dense(self.hidden, name="gate")(x)) * y if style.gated else act(y)
        return dense(x.shape[-1], name="down")(y)


class Block(nn.Module):
    """Attention and an MLP, each with a norm and a sum around it."""

    heads: int
    hidden: int
    style: Style
    causal: bool

    @nn.compact
    def __call__(self, x: Array, mask: Array | None = None, angles: Array | None = None) -> Array:
        """x (B, T, width) -> (B, T, width); mask and angles as in `Attention`."""
        attention = Attention(self.heads, self.style, self.causal, name="attention")
        x = self._added(x, lambda x: attention(x, mask, angles), "attention")
        return self._added(x, MLP(self.hidden, self.style, name="mlp"), "mlp")

    def _added(self, x: Array, fn: Callable[[Array], Array], name: str) -> Array:
        norm = self.style.normalize(f"{name}_norm")
        y = fn(x) if self.style.after else fn(norm(x))
        if self.style.layer_scale:
            y = y * self.param(f"{name}_scale", nn.initializers.constant(0.1), x.shape[-1:])
        return norm(x + y) if self.style.after else x + y


def angles_of_text(length: int, head: int, base: float) -> Array:
    """(length, head / 2) angles of rotary position embeddings (Su et al., 2021)."""
    half = head // 2
    return jnp.arange(length)[:, None] / base ** (jnp.arange(half) / half)


def angles_of_patches(rows: int, columns: int, head: int, base: float) -> Array:
    """(rows columns, head / 2) angles of patches' centers in [-1, 1]; half of the pairs are for each axis (DINOv3)."""
    centers = [2 * (jnp.arange(num) + 0.5) / num - 1 for num in (rows, columns)]
    grid = jnp.stack(jnp.meshgrid(*centers, indexing="ij"), axis=-1).reshape(-1, 2, 1)
    angles = 2 * jnp.pi * grid / base ** (jnp.arange(head // 4) / (head // 4))
    return angles.reshape(rows * columns, -1)


def rotated(x: Array, angles: Array) -> Array:
    """Queries or keys (B, T, heads, width), rotated by angles (T, width / 2), with halves as pairs."""
    cos = jnp.cos(angles)[:, None]
    sin = jnp.sin(angles)[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def positions(module: nn.Module, num: int, width: int) -> Array:
    """Learned positions (num, width)."""
    return module.param("positions", nn.initializers.normal(0.02), (num, width))


class ViT(nn.Module):
    """A vision Transformer (Dosovitskiy et al., 2021).

    Attributes:
        outputs: Number of classes.
        patch: Rows and columns of a patch.
        width: Width of tokens.
        depth: Number of blocks.
        heads: Number of attention heads.
        hidden: Width of the MLPs; 0: 4 times `width`.
        pool: Whether the class token's output is classified, or the mean over patches.
        style: How blocks are built, a name in `STYLES` or a `Style`.
    """

    outputs: int = UNSET
    patch: int = 4
    width: int = 192
    depth: int = 6
    heads: int = 3
    hidden: int = 0
    pool: Literal["class", "mean"] = "class"
    style: str | Style = "vit"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Images (B, height, width, channels) -> logits."""
        check_sizes(self, "patch")
        check_images(x, self.patch)
        if any(side % self.patch for side in x.shape[1:3]):
            raise ArgumentError(
                "model",
                f"needs images whose sides are multiples of {self.patch}, not {x.shape[1:3]}",
            )
        style = style_of(self.style)
        x = nn.Conv(self.width, (self.patch,) * 2, (self.patch,) * 2, "VALID", name="patches")(x)
        _, rows, columns, _ = x.shape
        x = x.reshape(x.shape[0], -1, self.width)
        init = nn.initializers.normal(0.02)
        own = {"class_token": self.pool == "class", "registers": style.registers}
        tokens = [
            self.param(name, init, (1, int(num), self.width)) for name, num in own.items() if num
        ]
        before = sum(own.values())
        every = [
            jnp.broadcast_to(each, (x.shape[0], *each.shape[1:])).astype(x.dtype) for each in tokens
        ]
        x = jnp.concatenate([*every, x], axis=1)
        angles = None
        if style.rotary:
            angles = angles_of_patches(
                rows, columns, style.head(self.width, self.heads), style.rotary
            )
            angles = jnp.pad(angles, ((before, 0), (0, 0)))  # only patches have positions
        else:
            x = x + positions(self, x.shape[1], self.width)
        x = blocks(self, x, style, angles=angles)
        x = style.normalize("norm")(x)
        return nn.Dense(self.outputs, name="head")(
            x[:, 0] if self.pool == "class" else x[:, before:].mean(1)
        )


class Transformer(nn.Module):
    """A Transformer for tokens: a decoder that predicts every token's successor, or an encoder that classifies texts.

    Attributes:
        outputs: Number of tokens of a decoder, of classes of an encoder.
        kind: "decoder" or "encoder".
        tokens: Number of different tokens in the inputs; None: `outputs`.
        width, depth, heads, hidden, style: As in `ViT`.
        length: Largest length of a text, if positions are learned; None: the data's.
        padding: The token that pads texts, which no other attends to; None: texts are not padded.
        tied: Whether a decoder's last layer is the transposed embedding.
        types: Whether the embeddings of BERT's first segment are added, and BERT's pooling layer precedes the head.
    """

    outputs: int = UNSET
    kind: Literal["decoder", "encoder"] = "decoder"
    tokens: int | None = None
    width: int = 128
    depth: int = 4
    heads: int = 4
    hidden: int = 0
    style: str | Style = "gpt2"
    length: int | None = None
    padding: int | None = None
    tied: bool = False
    types: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Tokens (B, T), integers -> logits (B, T, outputs) or (B, outputs)."""
        check_sizes(self)
        if self.kind not in ("decoder", "encoder"):
            raise ArgumentError("kind", "accepted: decoder or encoder", self.kind)
        if x.ndim != 2:
            raise ArgumentError(
                "model",
                f"needs tokens (batch, length); this data's examples have shape {x.shape[1:]}",
            )
        style = style_of(self.style)
        x = x.astype(jnp.int32)
        mask = None if self.padding is None else x != self.padding
        embed = nn.Embed(self.tokens or self.outputs, self.width, name="embedding")
        y: Any = embed(x)
        angles = None
        if style.rotary:
            angles = angles_of_text(x.shape[1], style.head(self.width, self.heads), style.rotary)
        else:
            y = y + positions(self, self.length or x.shape[1], self.width)[: x.shape[1]]
        if self.types:
            y = y + self.param("type", nn.initializers.normal(0.02), (self.width,))
        y = style.normalize("embedding_norm")(y) if style.after else y
        y = blocks(self, y, style, mask=mask, angles=angles, causal=self.kind == "decoder")
        y = y if style.after else style.normalize("norm")(y)
        if self.kind == "encoder":
            if self.types:
                y = jnp.tanh(nn.Dense(self.width, name="pooler")(y[:, 0]))
            else:
                weights = jnp.ones(x.shape) if mask is None else mask
                y = jnp.einsum(
                    "bt,btd->bd", weights / jnp.maximum(weights.sum(1, keepdims=True), 1), y
                )
        return (
            embed.attend(y)
            if self.tied
            else nn.Dense(self.outputs, use_bias=style.bias, name="head")(y)
        )


def blocks(
    module: ViT | Transformer,
    x: Array,
    style: Style,
    *,
    mask: Array | None = None,
    angles: Array | None = None,
    causal: bool = False,
) -> Array:
    """A Transformer's blocks, one after the other; mask and angles as in `Attention`."""
    for number in range(module.depth):
        block = Block(
            module.heads, module.hidden or 4 * module.width, style, causal, name=f"block_{number}"
        )
        x = block(x, mask, angles)
    return x


def check_sizes(module: ViT | Transformer, *further: str) -> None:
    """Raises `ArgumentError` for sizes that no Transformer has; `further` are names of other sizes to check."""
    for name in ("width", "depth", "heads", *further):
        value = getattr(module, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ArgumentError(name, "accepted: 1 or more", value)
    if module.depth > DEEPEST:
        raise ArgumentError("depth", f"accepted: 1 to {DEEPEST}", module.depth)
    if module.width % module.heads:
        raise ArgumentError(
            "width", f"accepted: multiples of the number of heads, {module.heads}", module.width
        )


def style_of(style: str | Style) -> Style:
    if isinstance(style, Style):
        return style
    if style not in STYLES:
        raise ArgumentError("model", f"style: accepted: {', '.join(STYLES)}, or a Style", style)
    return STYLES[style]
