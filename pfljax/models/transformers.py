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


def quick_gelu(x: Array) -> Array:
    """CLIP's approximation of GELU."""
    return x * jax.nn.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
    "quick_gelu": quick_gelu,
}
DEEPEST = 1000  # blocks, which are traced one by one


@dataclasses.dataclass(frozen=True)
class Style:
    """How a Transformer's blocks are built.

    Attributes:
        norm: "layer" for layer norm, "rms" for RMS norm.
        after: Whether norms follow the sums, as in BERT, instead of preceding attention and MLP.
        activation: Activation of the MLP, a name in `ACTIVATIONS`.
        gated: Whether the MLP multiplies two branches.
        bias: Whether products add a bias.
        eps: Epsilon of the norms.
        layer_scale: Whether trained factors scale what attention and MLP add.
        rotary: Base of rotary position embeddings; 0: learned positions are added to the inputs.
        kv_heads: Number of heads of keys and values; 0: as many as of queries.
        head_width: Width of a head; 0: the model's width over the number of heads.
        qk_norm: Whether queries and keys are normalized.
        registers: Number of trained tokens of a ViT, next to the class token and the patches (Darcet et al., 2024).
        key_bias: Whether keys add a bias, if products do.
        patch_bias: Whether the projection of a ViT's patches adds a bias.
        input_norm: Whether a ViT's tokens are normalized before its blocks.
    """

    norm: Norm = "layer"
    after: bool = False
    activation: str = "gelu"
    gated: bool = False
    bias: bool = True
    eps: float = 1e-6
    layer_scale: bool = False
    rotary: float = 0.0
    kv_heads: int = 0
    head_width: int = 0
    qk_norm: bool = False
    registers: int = 0
    key_bias: bool = True
    patch_bias: bool = True
    input_norm: bool = False

    def normalize(self, name: str) -> nn.Module:
        """A norm of this name."""
        if self.norm == "rms":
            return nn.RMSNorm(epsilon=self.eps, name=name)
        return nn.LayerNorm(self.eps, name=name)

    def head(self, width: int, heads: int) -> int:
        """Width of a head."""
        return self.head_width or width // heads


STYLES = {
    "vit": Style(),
    "dinov2": Style(layer_scale=True),
    "dinov3": Style(layer_scale=True, eps=1e-5, rotary=100.0, registers=4, key_bias=False),
    "clip": Style(activation="quick_gelu", eps=1e-5, patch_bias=False, input_norm=True),
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
        head_width = style.head(width, self.heads)

        def project(name: str, num_heads: int, bias: bool) -> Array:
            shape = (num_heads, head_width)
            return nn.DenseGeneral(shape, use_bias=bias and style.bias, name=name)(x)

        num_keys = style.kv_heads or self.heads
        q = project("query", self.heads, True)
        k = project("key", num_keys, style.key_bias)
        v = project("value", num_keys, True)
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
        activation = ACTIVATIONS[style.activation]
        dense = functools.partial(nn.Dense, use_bias=style.bias)
        y = dense(self.hidden, name="up")(x)
        if style.gated:
            y = activation(dense(self.hidden, name="gate")(x)) * y
        else:
            y = activation(y)
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
        """x + fn(norm(x)), or norm(x + fn(x))."""
        norm = self.style.normalize(f"{name}_norm")
        y = fn(x) if self.style.after else fn(norm(x))
        if self.style.layer_scale:
            y = y * self.param(f"{name}_scale", nn.initializers.constant(0.1), x.shape[-1:])
        return norm(x + y) if self.style.after else x + y


def text_angles(length: int, head: int, base: float) -> Array:
    """(length, head / 2) angles of rotary position embeddings (Su et al., 2021)."""
    half = head // 2
    return jnp.arange(length)[:, None] / base ** (jnp.arange(half) / half)


def patch_angles(rows: int, columns: int, head: int, base: float) -> Array:
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

    Examples:
        >>> import pfljax as pfl
        >>> network = pfl.models.ViT(patch=4, width=16, depth=1, heads=2)
        >>> pfl.models.build(network, (8, 8, 3), "classification", 10).output_shape
        (1, 10)
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
            text = f"needs images whose sides are multiples of {self.patch}, not {x.shape[1:3]}"
            raise ArgumentError("model", text)
        style = as_style(self.style)

        # A token of each patch, after the class token and registers.
        size = (self.patch, self.patch)
        bias = style.patch_bias
        x = nn.Conv(self.width, size, size, "VALID", use_bias=bias, name="patches")(x)
        _, rows, columns, _ = x.shape
        x = x.reshape(x.shape[0], -1, self.width)
        init = nn.initializers.normal(0.02)
        numbers = {"class_token": int(self.pool == "class"), "registers": style.registers}
        before = sum(numbers.values())
        tokens = []
        for name, num in numbers.items():
            if num:
                token = self.param(name, init, (1, num, self.width))
                shape = (x.shape[0], num, self.width)
                tokens.append(jnp.broadcast_to(token, shape).astype(x.dtype))
        x = jnp.concatenate([*tokens, x], axis=1)

        # Positions.
        angles = None
        if style.rotary:
            head_width = style.head(self.width, self.heads)
            angles = patch_angles(rows, columns, head_width, style.rotary)
            angles = jnp.pad(angles, ((before, 0), (0, 0)))  # only patches have positions
        else:
            x = x + positions(self, x.shape[1], self.width)
        if style.input_norm:
            x = style.normalize("input_norm")(x)
        x = blocks(self, x, style, angles=angles)
        x = style.normalize("norm")(x)
        features = x[:, 0] if self.pool == "class" else x[:, before:].mean(1)
        return nn.Dense(self.outputs, name="head")(features)


class Transformer(nn.Module):
    """A Transformer for tokens: a decoder that predicts every token's successor, or an encoder that classifies texts.

    Attributes:
        outputs: Number of tokens of a decoder, of classes of an encoder.
        kind: "decoder" or "encoder".
        tokens: Number of different tokens in the inputs; None: `outputs`.
        width, depth, heads, hidden, style: As in `ViT`.
        length: Largest length of a text, if positions are learned; None: the data's.
        padding: The token that pads texts, to which no other attends; None: texts are not padded.
        tied: Whether a decoder's last layer is the transposed embedding.
        types: Whether the embeddings of BERT's first segment are added, and BERT's pooling layer precedes the head.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pfljax as pfl
        >>> network = pfl.models.Transformer(width=16, depth=1, heads=2)
        >>> model = pfl.models.build(network, (12,), "classification", 30, dtype=jnp.int32)
        >>> model.output_shape  # a prediction of each token's successor
        (1, 12, 30)
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
            text = f"needs tokens (batch, length); this data's examples have shape {x.shape[1:]}"
            raise ArgumentError("model", text)
        style = as_style(self.style)
        x = x.astype(jnp.int32)
        mask = None if self.padding is None else x != self.padding
        embed = nn.Embed(self.tokens or self.outputs, self.width, name="embedding")
        y: Any = embed(x)
        angles = None
        if style.rotary:
            head_width = style.head(self.width, self.heads)
            angles = text_angles(x.shape[1], head_width, style.rotary)
        else:
            learned = positions(self, self.length or x.shape[1], self.width)
            y = y + learned[: x.shape[1]]
        if self.types:
            y = y + self.param("type", nn.initializers.normal(0.02), (self.width,))
        if style.after:
            y = style.normalize("embedding_norm")(y)
        y = blocks(self, y, style, mask=mask, angles=angles, causal=self.kind == "decoder")
        if not style.after:
            y = style.normalize("norm")(y)

        # An encoder classifies BERT's pooled first token, or the mean over all that are not padding.
        if self.kind == "encoder" and self.types:
            y = jnp.tanh(nn.Dense(self.width, name="pooler")(y[:, 0]))
        elif self.kind == "encoder":
            weights = jnp.ones(x.shape) if mask is None else mask
            shares = weights / jnp.maximum(weights.sum(1, keepdims=True), 1)
            y = jnp.einsum("bt,btd->bd", shares, y)
        if self.tied:
            return embed.attend(y)
        return nn.Dense(self.outputs, use_bias=style.bias, name="head")(y)


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
    hidden = module.hidden or 4 * module.width
    for number in range(module.depth):
        block = Block(module.heads, hidden, style, causal, name=f"block_{number}")
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
        text = f"accepted: multiples of the number of heads, {module.heads}"
        raise ArgumentError("width", text, module.width)


def as_style(style: str | Style) -> Style:
    """The style of a name; a style as it is. Raises `ArgumentError` for an unknown name."""
    if isinstance(style, Style):
        return style
    if style not in STYLES:
        raise ArgumentError("model", f"style: accepted: {', '.join(STYLES)}, or a Style", style)
    return STYLES[style]
