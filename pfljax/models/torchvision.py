"""Convolutional networks in the forms of torchvision's, so that their weights can be loaded; see `weights`.

They have batch norm, whose running statistics come with the weights. For training from new parameters, `networks` has
the same networks with group norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn

from pfljax.contract.types import Array
from pfljax.models.networks import check_images
from pfljax.models.structure import UNSET


def conv(name: str, width: int, size: int, stride: int = 1, groups: int = 1) -> nn.Module:
    """A convolution without bias, padded by half its size on each side."""
    margin = (size - 1) // 2
    return nn.Conv(
        width,
        (size, size),
        stride,
        padding=margin,
        feature_group_count=groups,
        use_bias=False,
        name=name,
    )


def norm(name: str, train: bool) -> nn.Module:
    """Batch norm with PyTorch's momentum and epsilon."""
    return nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, name=name)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions, or a bottleneck, and a shortcut."""

    width: int
    stride: int
    bottleneck: bool

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        """x (B, H, W, C) -> (B, H / stride, W / stride, outputs)."""
        if self.bottleneck:
            sizes = (1, 3, 1)
            widths = (self.width, self.width, 4 * self.width)
            strides = (1, self.stride, 1)
        else:
            sizes = (3, 3)
            widths = (self.width, self.width)
            strides = (self.stride, 1)
        y = x
        for number, size in enumerate(sizes):
            y = conv(f"conv{number + 1}", widths[number], size, strides[number])(y)
            y = norm(f"bn{number + 1}", train)(y)
            if number < len(sizes) - 1:
                y = nn.relu(y)
        if y.shape != x.shape:
            x = conv("downsample_conv", y.shape[-1], 1, self.stride)(x)
            x = norm("downsample_bn", train)(x)
        return nn.relu(x + y)


class PretrainedResNet(nn.Module):
    """A residual network (He et al., 2016) in torchvision's form, for the weights layout "resnet".

    The first convolution is 7 x 7 with stride 2, and pooling follows. In a bottleneck, the 3 x 3 convolution has the
    stride.

    Attributes:
        outputs: Number of classes.
        blocks: Number of blocks, per stage: (2, 2, 2, 2) for ResNet-18, (3, 4, 6, 3) for ResNet-34 and ResNet-50.
        bottleneck: Whether blocks are bottlenecks, as in ResNet-50.
        width: Width of the first stage; each further one has twice the width.

    Examples:
        >>> import jax
        >>> import pfljax as pfl
        >>> network = pfl.models.PretrainedResNet()
        >>> params = pfl.models.build(network, (64, 64, 3), "classification", 1000).network.shapes
        >>> statistics = params.pop("batch_stats")
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        11689512
    """

    outputs: int = UNSET
    blocks: Sequence[int] = (2, 2, 2, 2)
    bottleneck: bool = False
    width: int = 64

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        """Images (B, height, width, channels) -> logits."""
        check_images(x, 2)
        x = nn.Conv(self.width, (7, 7), 2, padding=3, use_bias=False, name="conv1")(x)
        x = nn.relu(norm("bn1", train)(x))
        margin: Any = ((1, 1), (1, 1))
        x = nn.max_pool(x, (3, 3), (2, 2), padding=margin)
        for stage, num_blocks in enumerate(self.blocks):
            for number in range(num_blocks):
                stride = 2 if stage > 0 and number == 0 else 1
                name = f"layer{stage + 1}_{number}"
                block = ResidualBlock(2**stage * self.width, stride, self.bottleneck, name=name)
                x = block(x, train)
        return nn.Dense(self.outputs, name="head")(x.mean(axis=(1, 2)))


class InvertedResidual(nn.Module):
    """Expanded channels, a depthwise convolution, and fewer channels."""

    width: int
    stride: int
    expansion: int

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        """x (B, H, W, C) -> (B, H / stride, W / stride, width)."""
        y = x
        if self.expansion > 1:
            y = conv("expand_conv", self.expansion * x.shape[-1], 1)(y)
            y = nn.relu6(norm("expand_bn", train)(y))
        y = conv("depthwise_conv", y.shape[-1], 3, self.stride, groups=y.shape[-1])(y)
        y = nn.relu6(norm("depthwise_bn", train)(y))
        y = conv("project_conv", self.width, 1)(y)
        y = norm("project_bn", train)(y)
        return x + y if y.shape == x.shape else y


class PretrainedMobileNetV2(nn.Module):
    """MobileNet-V2 (Sandler et al., 2018) in torchvision's form, for the weights layout "mobilenet_v2".

    Attributes:
        outputs: Number of classes.
        stages: Expansion, channels, blocks and stride of the first block, per stage. Only the first stage, of one
            block, has expansion 1.
        first: Channels of the first convolution.
        last: Channels of the last convolution.
        dropout: Rate of dropout before the last layer.

    Examples:
        >>> import jax
        >>> import pfljax as pfl
        >>> network = pfl.models.PretrainedMobileNetV2()
        >>> params = pfl.models.build(network, (64, 64, 3), "classification", 1000).network.shapes
        >>> statistics = params.pop("batch_stats")
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        3504872
    """

    outputs: int = UNSET
    stages: Sequence[tuple[int, int, int, int]] = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    first: int = 32
    last: int = 1280
    dropout: float = 0.2

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        """Images (B, height, width, channels) -> logits."""
        check_images(x, 2)
        x = conv("first_conv", self.first, 3, 2)(x)
        x = nn.relu6(norm("first_bn", train)(x))
        position = 1  # of a block in torchvision's list
        for expansion, width, num_blocks, first_stride in self.stages:
            for number in range(num_blocks):
                stride = first_stride if number == 0 else 1
                block = InvertedResidual(width, stride, expansion, name=f"block_{position}")
                x = block(x, train)
                position += 1
        x = nn.relu6(norm("last_bn", train)(conv("last_conv", self.last, 1)(x)))
        x = nn.Dropout(self.dropout, deterministic=not train)(x.mean(axis=(1, 2)))
        return nn.Dense(self.outputs, name="head")(x)
