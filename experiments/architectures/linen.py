"""The networks in Flax Linen, as users write them: nothing in them is made for pfljax."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp

CLASSES = 10
TOKENS = 65
WIDTH = 64


class McMahan(nn.Module):
    """FedAvg's network for MNIST: two 5 x 5 convolutions, two dense layers."""

    @nn.compact
    def __call__(self, x):
        for width in (32, 64):
            x = nn.max_pool(nn.relu(nn.Conv(width, (5, 5))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(512)(x.reshape(x.shape[0], -1)))
        return nn.Dense(CLASSES)(x)


class LeNet(nn.Module):
    """The network of BlazeFL's benchmark on CIFAR-10: two 5 x 5 convolutions of few channels, three dense layers."""

    @nn.compact
    def __call__(self, x):
        for width in (6, 16):
            x = nn.relu(nn.Conv(width, (5, 5), padding="VALID")(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        for width in (120, 84):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(CLASSES)(x)


class ThreeConvolutions(nn.Module):
    """Three 3 x 3 convolutions of 128 channels."""

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.max_pool(nn.relu(nn.Conv(128, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(CLASSES)(x.reshape(x.shape[0], -1))


class ResNet18(nn.Module):
    """ResNet-18 for small images, with group norm or batch norm."""

    batch_norm: bool = False

    @nn.compact
    def __call__(self, x, train: bool = False):
        def norm(x):
            return (
                nn.BatchNorm(use_running_average=not train)(x)
                if self.batch_norm
                else nn.GroupNorm(8)(x)
            )

        x = nn.relu(norm(nn.Conv(64, (3, 3), use_bias=False)(x)))
        for stage, width in enumerate((64, 128, 256, 512)):
            for stride in (2 if stage else 1, 1):
                y = nn.relu(norm(nn.Conv(width, (3, 3), stride, use_bias=False)(x)))
                y = norm(nn.Conv(width, (3, 3), use_bias=False)(y))
                if y.shape != x.shape:
                    x = norm(nn.Conv(width, (1, 1), stride, use_bias=False)(x))
                x = nn.relu(x + y)
        return nn.Dense(CLASSES)(x.mean((1, 2)))


# Expansion, channels, blocks and stride of the first block, per stage.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class MobileNetV2(nn.Module):
    """MobileNet-V2 with group norm."""

    @nn.compact
    def __call__(self, x):
        def conv(x, width, size=1, stride=1, groups=1):
            convolution = nn.Conv(
                width, (size, size), stride, feature_group_count=groups, use_bias=False
            )
            return nn.GroupNorm(8)(convolution(x))

        x = nn.relu6(conv(x, 32, 3, 2))
        for expansion, width, blocks, first in STAGES:
            for number in range(blocks):
                stride = first if number == 0 else 1
                inner = expansion * x.shape[-1]
                y = nn.relu6(conv(x, inner)) if expansion > 1 else x
                y = conv(nn.relu6(conv(y, inner, 3, stride, inner)), width)
                x = x + y if stride == 1 and x.shape[-1] == width else y
        return nn.Dense(CLASSES)(nn.relu6(conv(x, 1280)).mean((1, 2)))


class VGG11(nn.Module):
    """VGG-11 with group norm, for small images."""

    @nn.compact
    def __call__(self, x):
        for widths in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
            for width in widths:
                x = nn.relu(nn.GroupNorm(8)(nn.Conv(width, (3, 3))(x)))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(4096)(x))
        return nn.Dense(CLASSES)(x)


class UNet(nn.Module):
    """A small U-Net, with strided transposed convolutions on the way up; classes from the mean of its pixels."""

    @nn.compact
    def __call__(self, x):
        def twice(x, width):
            return nn.relu(nn.Conv(width, (3, 3))(nn.relu(nn.Conv(width, (3, 3))(x))))

        kept = []
        for width in (16, 32):
            kept.append(twice(x, width))
            x = nn.max_pool(kept[-1], (2, 2), (2, 2))
        x = twice(x, 64)
        for width in (32, 16):
            x = nn.ConvTranspose(width, (2, 2), (2, 2))(x)
            x = twice(jnp.concatenate([x, kept.pop()], axis=-1), width)
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class DepthwiseSeparable(nn.Module):
    """Depthwise and pointwise convolutions with group norm, strides and average pooling."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.GroupNorm(8)(nn.Conv(32, (3, 3))(x)))
        for width, stride in ((64, 1), (128, 2), (128, 1)):
            x = nn.relu(
                nn.GroupNorm(8)(
                    nn.Conv(x.shape[-1], (3, 3), stride, feature_group_count=x.shape[-1])(x)
                )
            )
            x = nn.relu(nn.GroupNorm(8)(nn.Conv(width, (1, 1))(x)))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(CLASSES)(x.reshape(x.shape[0], -1))


class Autoencoder(nn.Module):
    """Strided convolutions and transposed ones; classes from the mean of its pixels."""

    @nn.compact
    def __call__(self, x):
        for width in (32, 64):
            x = nn.relu(nn.Conv(width, (3, 3), 2)(x))
        for width in (32, 16):
            x = nn.relu(nn.ConvTranspose(width, (3, 3), (2, 2))(x))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class Recurrent(nn.Module):
    """Two recurrent layers of 128; classes from the last state."""

    cell: type[nn.RNNCellBase] = nn.LSTMCell

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.RNN(self.cell(128))(x)
        return nn.Dense(CLASSES)(x[:, -1])


class Block(nn.Module):
    """A Transformer's block: attention and a perceptron, each added to its normalized input."""

    @nn.compact
    def __call__(self, x, mask=None):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4)(y, y, mask=mask)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class ViT(nn.Module):
    """A vision Transformer of two blocks, with patches of 4 x 4 pixels."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(WIDTH, (4, 4), (4, 4))(x)
        x = x.reshape(x.shape[0], -1, WIDTH)
        x = x + self.param("position", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for _ in range(2):
            x = Block()(x)
        return nn.Dense(CLASSES)(nn.LayerNorm()(x).mean(1))


class Decoder(nn.Module):
    """A decoder of two blocks: the next token at every position."""

    @nn.compact
    def __call__(self, tokens):
        tokens = tokens.astype(jnp.int32)
        x = nn.Embed(TOKENS, WIDTH)(tokens)
        x = x + self.param("position", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for _ in range(2):
            x = Block()(x, nn.make_causal_mask(tokens))
        return nn.Dense(TOKENS)(nn.LayerNorm()(x))
