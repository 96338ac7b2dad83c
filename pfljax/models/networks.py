"""Networks as Flax Linen modules.

`outputs` is the number of classes (1 for regression); None: set when the model is built for data.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype

from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array
from pfljax.models.structure import UNSET


def check_images(x: Array, least: int) -> None:
    """Raises `ArgumentError` unless x is a batch of images that have `least` rows and columns."""
    if x.ndim != 4 or min(x.shape[1:3]) < least:
        text = f"needs images (height, width, channels) of at least {least} x {least}; this data's examples have shape"
        raise ArgumentError("model", f"{text} {x.shape[1:]}: try mlp")


def normalized(x: Array, width: int, size: int = 3, stride: int = 1, groups: int = 1) -> Array:
    """A convolution without bias and group norm; (size - 1) / 2 zeros on every side, whatever the stride."""
    conv = nn.Conv(
        width, (size, size), stride, (size - 1) // 2, feature_group_count=groups, use_bias=False
    )
    return nn.GroupNorm(num_groups=8)(conv(x))


def pool(x: Array) -> Array:
    """2 x 2 max pooling."""
    return nn.max_pool(x, (2, 2), (2, 2))


# channels, those of images, with which a convolution takes a TPU less time to compute than to write
FEW = 4


def convolved(
    x: Array, kernel: Array, stride: int, padding: str | Sequence[tuple[int, int]]
) -> Array:
    """A convolution of images without bias."""
    numbers = ("NHWC", "HWIO", "NHWC")
    left, right = map(jnp.asarray, (x, kernel))
    return jax.lax.conv_general_dilated(
        left, right, (stride, stride), padding, dimension_numbers=numbers
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def pooled(y: Array, x: Array, kernel: Array, padding: str) -> Array:
    """2 x 2 max pooling of a convolution y of x: without derivatives, the largest of four convolutions with stride 2.

    These never write the outputs that pooling drops. Derivatives are those of pooling y.
    """
    starts = [
        low for low, _ in jax.lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], (1, 1), padding)
    ]
    places = []
    for offsets in itertools.product((0, 1), repeat=2):
        edges = []
        for axis, (start, offset) in enumerate(zip(starts, offsets, strict=True)):
            low = start - offset
            reach = 2 * (y.shape[1 + axis] // 2 - 1) + kernel.shape[axis]
            edges.append((low, reach - x.shape[1 + axis] - low))
        places.append(convolved(x, kernel, 2, edges))
    return functools.reduce(jnp.maximum, places)


@pooled.defjvp
def _(padding: str, given: Sequence[Array], slopes: Sequence[Array]) -> tuple[Array, Array]:
    del padding
    return jax.jvp(pool, given[:1], slopes[:1])


class PooledConv(nn.Module):
    """A convolution with bias, and 2 x 2 max pooling.

    On a TPU, the bias is added after pooling: the same, on a fourth of the values. By its compiler's estimates, a round
    then takes half of the memory and time; on a CPU, gradients would take longer.
    """

    features: int
    size: int
    padding: str

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = self.param(
            "kernel",
            nn.linear.default_kernel_init,
            (self.size, self.size, x.shape[-1], self.features),
        )
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        left, kernel, bias = promote_dtype(x, kernel, bias)
        y = convolved(left, kernel, 1, self.padding)
        fixed = jax.lax.stop_gradient((left, kernel))

        def few(y, bias, x, kernel):
            return pooled(y, x, kernel, self.padding) + bias

        def many(y, bias, *_):
            return pool(y) + bias

        forms = {
            "tpu": few if x.shape[-1] <= FEW else many,
            "default": lambda y, bias, *_: pool(y + bias),
        }
        return jax.lax.platform_dependent(y, bias, *fixed, **forms)


def stacked(
    x: Array,
    stages: Sequence[Sequence[int]],
    hidden: Sequence[int],
    outputs: int,
    *,
    least: int = 0,
    size: int = 3,
    padding: str = "SAME",
    normalize: bool = False,
) -> Array:
    """Stages of convolutions, given by their widths, and hidden dense layers, all with ReLU; then a dense layer.

    A stage ends in 2 x 2 max pooling, which drops an odd last row or column. `least` is the smallest height and width
    of images; `normalize` puts group norm after the convolutions.
    """
    if stages:
        check_images(x, least)
    names = (f"Conv_{number}" for number in itertools.count())

    def convolve(x, width):
        x = nn.Conv(width, (size, size), padding=padding, name=next(names))(x)
        return nn.GroupNorm(num_groups=8)(x) if normalize else x

    for *before, last in stages:
        for width in before:
            x = nn.relu(convolve(x, width))
        x = nn.relu(
            pool(convolve(x, last))
            if normalize
            else PooledConv(last, size, padding, name=next(names))(x)
        )
    x = x.reshape(x.shape[0], -1)
    for width in hidden:
        x = nn.relu(nn.Dense(width)(x))
    return nn.Dense(outputs)(x)


def narrowed(x: Array, features: int | None) -> Array:
    """Features (B, F) as means of `features` neighboring ranges, so that networks of several widths have as many.

    Range i goes from floor(i F / features) to ceil((i + 1) F / features), as in PyTorch's adaptive pooling. None: x.
    """
    if features in (None, x.shape[-1]):
        return x
    starts, ends = (np.arange(2)[:, None] + np.arange(features)) * x.shape[-1]
    starts = starts // features
    ends = -(-ends // features)
    places = np.arange(x.shape[-1])[:, None]
    inside = (places >= starts) & (places < ends)
    return x @ jnp.asarray(inside / (ends - starts), x.dtype)


class MLP(nn.Module):
    """Dense layers with ReLU between them; a linear model without hidden widths."""

    hidden: Sequence[int] = (64,)
    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return stacked(x, (), self.hidden, self.outputs)


class Logistic(nn.Module):
    """Logistic regression, FedEM's model for its synthetic data: one logit z for two classes.

    The scores are (0, z), so that softmax gives class 1 the probability sigmoid(z). 151 parameters for 150 features.
    """

    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if self.outputs != 2:
            raise ArgumentError("model", "accepted only for data with two classes", "logistic")
        logit = nn.Dense(1)(x.reshape(x.shape[0], -1))
        return jnp.concatenate([jnp.zeros_like(logit), logit], axis=-1)


class CNN(nn.Module):
    """3 x 3 convolutions, each with 2 x 2 max pooling and ReLU, then one dense layer.

    With channels (128, 128, 128) it is the CIFAR-10 network of FedeRiCo (Appendix C; "CNN2" of Shen et al., 2020).
    """

    channels: Sequence[int] = (128, 128, 128)
    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return stacked(
            x,
            [(width,) for width in self.channels],
            (),
            self.outputs,
            least=2 ** len(self.channels),
        )


class FemnistCNN(nn.Module):
    """FedEM's network for (F)EMNIST: two 5 x 5 convolutions without margin and two dense layers.

    2,278,334 parameters for 28 x 28 gray images and 62 classes.
    """

    hidden: int = 2048
    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return stacked(
            x, ((32,), (64,)), (self.hidden,), self.outputs, least=16, size=5, padding="VALID"
        )


class LeNet(nn.Module):
    """pFedMB's network for CIFAR-10, after LeCun et al. (1998): two convolutions without margin, three dense layers.

    62,006 parameters for 32 x 32 color images and 10 classes.
    """

    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return stacked(x, ((6,), (16,)), (120, 84), self.outputs, least=16, size=5, padding="VALID")


class McMahanCNN(nn.Module):
    """FedAvg's network for MNIST (McMahan et al., 2017): two 5 x 5 convolutions, two dense layers.

    1,663,370 parameters for 28 x 28 gray images and 10 classes. FedFomo's paper says that it uses the same for all data
    sets; its code has three 3 x 3 convolutions and 122,570 parameters.
    """

    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return stacked(x, ((32,), (64,)), (512,), self.outputs, least=4, size=5)


class PflResearchCNN(nn.Module):
    """The CIFAR-10 network of pfl-research's benchmark (Granqvist et al., 2024), without its dropout.

    Two 3 x 3 convolutions without margin, one 2 x 2 max pooling, a dense layer of 128: 1,626,442 parameters for 32 x 32
    color images and 10 classes.
    """

    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return stacked(x, ((32, 64),), (128,), self.outputs, least=6, padding="VALID")


class VGG11(nn.Module):
    """VGG-11 (Simonyan and Zisserman, 2015, configuration A) for images of 32 x 32.

    Uses group norm instead of the batch norm that is common today, as in MobileNetV2.
    """

    stages: Sequence[Sequence[int]] = ((64,), (128,), (256, 256), (512, 512), (512, 512))
    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return stacked(x, self.stages, (4096, 4096), self.outputs, least=32, normalize=True)


class MobileNetV2(nn.Module):
    """MobileNet-V2 (Sandler et al., 2018), with group norm instead of batch norm.

    Group norm has no running statistics, which clients with different data would have to share or keep separate.
    """

    # Expansion, channels, blocks and stride of the first block, per stage.
    stages: Sequence[tuple[int, int, int, int]] = (
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    )
    features: int | None = None  # see `narrowed`
    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        check_images(x, 8)
        x = nn.relu6(normalized(x, 32, stride=2))
        for expansion, width, blocks, first in self.stages:
            for stride in (first, *[1] * (blocks - 1)):
                y = nn.relu6(normalized(x, expansion * x.shape[-1], 1)) if expansion > 1 else x
                y = nn.relu6(normalized(y, y.shape[-1], 3, stride, groups=y.shape[-1]))
                y = normalized(y, width, 1)
                x = x + y if stride == 1 and x.shape[-1] == width else y
        x = nn.relu6(normalized(x, 1280, 1)).mean(axis=(1, 2))
        return nn.Dense(self.outputs)(narrowed(x, self.features))


class ResNet(nn.Module):
    """A residual network (He et al., 2016) for small images: a 3 x 3 stem without pooling, then stages of blocks.

    A basic block has two 3 x 3 convolutions, a bottleneck a 3 x 3 one between two of 1 x 1, of which the last has four
    times the width. A shortcut that changes its shape is a strided 1 x 1 convolution (the paper's option B). Group norm
    replaces batch norm, as in MobileNetV2, with the same number of parameters.
    """

    # of the stages; all but the first halve height and width
    widths: Sequence[int] = (64, 128, 256, 512)
    blocks: Sequence[int] = (2, 2, 2, 2)  # per stage
    bottleneck: bool = False
    features: int | None = None  # see `narrowed`
    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        check_images(x, 8)
        x = nn.relu(normalized(x, self.widths[0]))
        for stage, (width, blocks) in enumerate(zip(self.widths, self.blocks, strict=True)):
            for stride in (2 if stage else 1, *[1] * (blocks - 1)):
                if self.bottleneck:
                    y = nn.relu(normalized(nn.relu(normalized(x, width, 1)), width, 3, stride))
                    y = normalized(y, 4 * width, 1)
                else:
                    y = normalized(nn.relu(normalized(x, width, 3, stride)), width)
                if y.shape != x.shape:
                    x = normalized(x, y.shape[-1], 1, stride)
                x = nn.relu(x + y)
        return nn.Dense(self.outputs)(narrowed(x.mean(axis=(1, 2)), self.features))


class ResNet18(ResNet):
    """ResNet-18: four stages of two basic blocks. 11,173,962 parameters for color images and 10 classes."""


class GoogLeNet(nn.Module):
    """GoogLeNet (Szegedy et al., 2015) for small images: a 3 x 3 stem without pooling, no auxiliary outputs.

    Group norm after every convolution, where later versions have batch norm. As in torchvision, the branch of 5 x 5
    convolutions has 3 x 3 ones.
    """

    # Outputs of the four branches of each module; before their 3 x 3 convolutions, the second and third have others.
    stages: Sequence[Sequence[tuple[int, tuple[int, int], tuple[int, int], int]]] = (
        ((64, (96, 128), (16, 32), 32), (128, (128, 192), (32, 96), 64)),
        (
            *(
                (192, (96, 208), (16, 48), 64),
                (160, (112, 224), (24, 64), 64),
                (128, (128, 256), (24, 64), 64),
            ),
            *((112, (144, 288), (32, 64), 64), (256, (160, 320), (32, 128), 128)),
        ),
        ((256, (160, 320), (32, 128), 128), (384, (192, 384), (48, 128), 128)),
    )
    features: int | None = None  # see `narrowed`
    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        check_images(x, 8)

        def layer(x, width, size):
            return nn.relu(normalized(x, width, size))

        x = layer(x, 192, 3)
        for number, modules in enumerate(self.stages):
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME") if number else x
            for plain, middle, large, after in modules:
                branches = [
                    layer(x, plain, 1),
                    *(layer(layer(x, first, 1), last, 3) for first, last in (middle, large)),
                ]
                branches.append(layer(nn.max_pool(x, (3, 3), (1, 1), "SAME"), after, 1))
                x = jnp.concatenate(branches, axis=-1)
        return nn.Dense(self.outputs)(narrowed(x.mean(axis=(1, 2)), self.features))
