"""Some of the networks in Flax NNX, as users write them."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from experiments.architectures.linen import CLASSES, WIDTH


class McMahan(nnx.Module):
    """FedAvg's network for MNIST."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, 32, (5, 5), rngs=rngs)
        self.second = nnx.Conv(32, 64, (5, 5), rngs=rngs)
        self.hidden = nnx.Linear(7 * 7 * 64, 512, rngs=rngs)
        self.head = nnx.Linear(512, CLASSES, rngs=rngs)

    def __call__(self, x):
        for layer in (self.first, self.second):
            x = nnx.max_pool(nnx.relu(layer(x)), (2, 2), (2, 2))
        return self.head(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


class Normalized(nnx.Module):
    """A convolution without bias, and batch norm."""

    def __init__(self, width, features, size=3, stride=1, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(width, features, (size, size), stride, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(features, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.conv(x))


class BasicBlock(nnx.Module):
    """Two convolutions, added to their input."""

    def __init__(self, width, features, stride, *, rngs: nnx.Rngs):
        self.first = Normalized(width, features, 3, stride, rngs=rngs)
        self.second = Normalized(features, features, rngs=rngs)
        same = width == features and stride == 1
        self.shortcut = (lambda x: x) if same else Normalized(width, features, 1, stride, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.shortcut(x) + self.second(nnx.relu(self.first(x))))


class ResNet18(nnx.Module):
    """ResNet-18 for small images, with batch norm."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.stem = Normalized(3, 64, rngs=rngs)
        blocks = []
        width = 64
        for stage, features in enumerate((64, 128, 256, 512)):
            for stride in (2 if stage else 1, 1):
                blocks.append(BasicBlock(width, features, stride, rngs=rngs))
                width = features
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(512, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class Twice(nnx.Module):
    """Two 3 x 3 convolutions with ReLU."""

    def __init__(self, width, features, *, rngs: nnx.Rngs):
        self.first = nnx.Conv(width, features, (3, 3), rngs=rngs)
        self.second = nnx.Conv(features, features, (3, 3), rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.second(nnx.relu(self.first(x))))


class UNet(nnx.Module):
    """A small U-Net, with strided transposed convolutions on the way up."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.down = nnx.List([Twice(3, 16, rngs=rngs), Twice(16, 32, rngs=rngs)])
        self.middle = Twice(32, 64, rngs=rngs)
        self.up = nnx.List(
            [nnx.ConvTranspose(2 * w, w, (2, 2), (2, 2), rngs=rngs) for w in (32, 16)]
        )
        self.merge = nnx.List([Twice(2 * w, w, rngs=rngs) for w in (32, 16)])
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        kept = []
        for block in self.down:
            kept.append(block(x))
            x = nnx.max_pool(kept[-1], (2, 2), (2, 2))
        x = self.middle(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(jnp.concatenate([up(x), kept.pop()], axis=-1))
        return self.head(x.mean((1, 2)))


class Recurrent(nnx.Module):
    """Two LSTM layers of 128; classes from the last state."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.layers = nnx.List(
            [nnx.RNN(nnx.LSTMCell(width, 128, rngs=rngs)) for width in (32, 128)]
        )
        self.head = nnx.Linear(128, CLASSES, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, -1])


class Block(nnx.Module):
    """A Transformer's block."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.wide = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.narrow(nnx.gelu(self.wide(self.norms[1](x))))


class ViT(nnx.Module):
    """A vision Transformer of two blocks, with patches of 4 x 4 pixels."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Conv(3, WIDTH, (4, 4), (4, 4), rngs=rngs)
        self.position = nnx.Param(0.02 * rngs.params.normal((1, 64, WIDTH)))
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        x = x.reshape(x.shape[0], -1, WIDTH) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))
