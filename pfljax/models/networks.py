"""Networks as Flax Linen modules.

`outputs` is the number of classes (1 for regression); None: set when the model is built for data. The examples count
the parameters of a network that is built for data.
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
        images = f"images (height, width, channels) of at least {least} x {least}"
        text = f"needs {images}; this data's examples have shape {x.shape[1:]}: try mlp"
        raise ArgumentError("model", text)


def normalized(x: Array, width: int, size: int = 3, stride: int = 1, groups: int = 1) -> Array:
    """A convolution without bias and group norm; (size - 1) / 2 zeros on every side, whatever the stride."""
    conv = nn.Conv(
        width,
        kernel_size=(size, size),
        strides=stride,
        padding=(size - 1) // 2,
        feature_group_count=groups,
        use_bias=False,
    )
    return nn.GroupNorm(num_groups=8)(conv(x))


def pool(x: Array) -> Array:
    """2 x 2 max pooling."""
    return nn.max_pool(x, (2, 2), (2, 2))


# Numbers of channels, those of images, for which a TPU computes a convolution in less time than it writes it
FEW_CHANNELS = 4


def convolved(
    x: Array, kernel: Array, stride: int, padding: str | Sequence[tuple[int, int]]
) -> Array:
    """A convolution of images without bias."""
    return jax.lax.conv_general_dilated(
        jnp.asarray(x),
        jnp.asarray(kernel),
        window_strides=(stride, stride),
        padding=padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def pooled(y: Array, x: Array, kernel: Array, padding: str) -> Array:
    """2 x 2 max pooling of a convolution y of x: without derivatives, the largest of four convolutions with stride 2.

    These never write the outputs that pooling drops. Derivatives are those of pooling y.
    """
    pads = jax.lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], (1, 1), padding)
    corners = []
    for offsets in itertools.product((0, 1), repeat=2):
        edges = []
        for axis, ((before, _), offset) in enumerate(zip(pads, offsets, strict=True)):
            low = before - offset
            reach = 2 * (y.shape[1 + axis] // 2 - 1) + kernel.shape[axis]
            edges.append((low, reach - x.shape[1 + axis] - low))
        corners.append(convolved(x, kernel, 2, edges))
    return functools.reduce(jnp.maximum, corners)


@pooled.defjvp
def _(padding: str, primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
    del padding
    return jax.jvp(pool, primals[:1], tangents[:1])


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
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.linear.default_kernel_init, shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        left, kernel, bias = promote_dtype(x, kernel, bias)
        y = convolved(left, kernel, 1, self.padding)
        fixed = jax.lax.stop_gradient((left, kernel))

        def pool_four(y: Array, bias: Array, x: Array, kernel: Array) -> Array:
            return pooled(y, x, kernel, self.padding) + bias

        def pool_first(y: Array, bias: Array, *_: Array) -> Array:
            return pool(y) + bias

        def pool_last(y: Array, bias: Array, *_: Array) -> Array:
            return pool(y + bias)

        on_tpu = pool_four if x.shape[-1] <= FEW_CHANNELS else pool_first
        return jax.lax.platform_dependent(y, bias, *fixed, tpu=on_tpu, default=pool_last)


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
    number = itertools.count()

    def convolve(x: Array, width: int) -> Array:
        conv = nn.Conv(width, (size, size), padding=padding, name=f"Conv_{next(number)}")
        x = conv(x)
        return nn.GroupNorm(num_groups=8)(x) if normalize else x

    def convolve_and_pool(x: Array, width: int) -> Array:
        if normalize:
            return pool(convolve(x, width))
        return PooledConv(width, size, padding, name=f"Conv_{next(number)}")(x)

    for *widths, last in stages:
        for width in widths:
            x = nn.relu(convolve(x, width))
        x = nn.relu(convolve_and_pool(x, last))
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
    width = x.shape[-1]
    numbers = np.arange(features)
    starts = numbers * width // features
    ends = -(-(numbers + 1) * width // features)
    positions = np.arange(width)[:, None]
    inside = (positions >= starts) & (positions < ends)
    return x @ jnp.asarray(inside / (ends - starts), x.dtype)


class MLP(nn.Module):
    """Dense layers with ReLU between them; a linear model without hidden widths.

    Attributes:
        hidden: Widths of the hidden layers.
        outputs: Number of classes; 1 for regression.

    Examples:
        >>> import pfljax as pfl
        >>> network = pfl.models.MLP((32,))
        >>> pfl.models.build(network, (8, 8, 1), "classification", 10).num_parameters
        2410
    """

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

    Attributes:
        channels: Numbers of channels of the convolutions.
        outputs: Number of classes; 1 for regression.

    Examples:
        >>> import pfljax as pfl
        >>> network = pfl.models.CNN()
        >>> pfl.models.build(network, (32, 32, 3), "classification", 10).num_parameters
        319242
    """

    channels: Sequence[int] = (128, 128, 128)
    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        stages = [(width,) for width in self.channels]
        return stacked(x, stages, (), self.outputs, least=2 ** len(stages))


class FemnistCNN(nn.Module):
    """FedEM's network for (F)EMNIST: two 5 x 5 convolutions without margin and two dense layers.

    2,278,334 parameters for 28 x 28 gray images and 62 classes.

    Attributes:
        hidden: Width of the hidden dense layer.
        outputs: Number of classes; 1 for regression.

    Examples:
        >>> import pfljax as pfl
        >>> network = pfl.models.FemnistCNN()
        >>> pfl.models.build(network, (28, 28, 1), "classification", 62).num_parameters
        2278334
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

    Examples:
        >>> import pfljax as pfl
        >>> network = pfl.models.LeNet()
        >>> pfl.models.build(network, (32, 32, 3), "classification", 10).num_parameters
        62006
    """

    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return stacked(x, ((6,), (16,)), (120, 84), self.outputs, least=16, size=5, padding="VALID")


class McMahanCNN(nn.Module):
    """FedAvg's network for MNIST (McMahan et al., 2017): two 5 x 5 convolutions, two dense layers.

    1,663,370 parameters for 28 x 28 gray images and 10 classes. FedFomo's paper says that it uses the same for all data
    sets; its code has three 3 x 3 convolutions and 122,570 parameters.

    Examples:
        >>> import pfljax as pfl
        >>> network = pfl.models.McMahanCNN()
        >>> pfl.models.build(network, (28, 28, 1), "classification", 10).num_parameters
        1663370
    """

    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return stacked(x, ((32,), (64,)), (512,), self.outputs, least=4, size=5)


class PFLlibCNN(nn.Module):
    """The default network of PFLlib's benchmark (Zhang et al., 2025), `FedAvgCNN`.

    Two 5 x 5 convolutions without margin, each with 2 x 2 max pooling, and a dense layer of 512: 878,538 parameters for
    32 x 32 color images and 10 classes. Parameters begin as in all networks here, not as in PyTorch.

    Examples:
        >>> import pfljax as pfl
        >>> network = pfl.models.PFLlibCNN()
        >>> pfl.models.build(network, (32, 32, 3), "classification", 10).num_parameters
        878538
    """

    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return stacked(x, ((32,), (64,)), (512,), self.outputs, least=16, size=5, padding="VALID")


class PflResearchCNN(nn.Module):
    """The CIFAR-10 network of pfl-research's benchmark (Granqvist et al., 2024), without its dropout.

    Two 3 x 3 convolutions without margin, one 2 x 2 max pooling, a dense layer of 128: 1,626,442 parameters for 32 x 32
    color images and 10 classes.

    Examples:
        >>> import pfljax as pfl
        >>> network = pfl.models.PflResearchCNN()
        >>> pfl.models.build(network, (32, 32, 3), "classification", 10).num_parameters
        1626442
    """

    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return stacked(x, ((32, 64),), (128,), self.outputs, least=6, padding="VALID")


class VGG11(nn.Module):
    """VGG-11 (Simonyan and Zisserman, 2015, configuration A) for images of 32 x 32.

    Uses group norm instead of the batch norm that is common today, as in MobileNetV2.

    Attributes:
        stages: Numbers of channels of the convolutions, per stage.
        outputs: Number of classes; 1 for regression.

    Examples:
        >>> import pfljax as pfl
        >>> network = pfl.models.VGG11()
        >>> pfl.models.build(network, (32, 32, 3), "classification", 10).num_parameters
        28149514
    """

    stages: Sequence[Sequence[int]] = ((64,), (128,), (256, 256), (512, 512), (512, 512))
    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return stacked(x, self.stages, (4096, 4096), self.outputs, least=32, normalize=True)


class MobileNetV2(nn.Module):
    """MobileNet-V2 (Sandler et al., 2018), with group norm instead of batch norm.

    Group norm has no running statistics, which clients with different data would have to share or keep separate.

    Attributes:
        stages: Expansion, channels, blocks and stride of the first block, per stage.
        features: Number of features; None: that of the last convolution. See `narrowed`.
        outputs: Number of classes; 1 for regression.

    Examples:
        >>> import pfljax as pfl
        >>> network = pfl.models.MobileNetV2(stages=((1, 16, 1, 1),))
        >>> pfl.models.build(network, (8, 8, 3), "classification", 10).num_parameters
        37674
    """

    stages: Sequence[tuple[int, int, int, int]] = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    features: int | None = None
    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        check_images(x, 8)
        x = nn.relu6(normalized(x, 32, stride=2))
        for expansion, width, num_blocks, first_stride in self.stages:
            for number in range(num_blocks):
                stride = first_stride if number == 0 else 1
                # Expanded channels, a depthwise convolution, and fewer channels.
                y = x
                if expansion > 1:
                    y = nn.relu6(normalized(x, expansion * x.shape[-1], 1))
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

    Attributes:
        widths: Widths of the stages; all but the first halve height and width.
        blocks: Number of blocks, per stage.
        bottleneck: Whether blocks are bottlenecks.
        features: Number of features; None: that of the last convolution. See `narrowed`.
        outputs: Number of classes; 1 for regression.

    Examples:
        >>> import pfljax as pfl
        >>> network = pfl.models.ResNet(widths=(8, 16), blocks=(1, 1))
        >>> pfl.models.build(network, (8, 8, 3), "classification", 10).num_parameters
        5266
    """

    widths: Sequence[int] = (64, 128, 256, 512)
    blocks: Sequence[int] = (2, 2, 2, 2)
    bottleneck: bool = False
    features: int | None = None
    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        check_images(x, 8)
        x = nn.relu(normalized(x, self.widths[0]))
        for stage, (width, num_blocks) in enumerate(zip(self.widths, self.blocks, strict=True)):
            for number in range(num_blocks):
                stride = 2 if stage > 0 and number == 0 else 1
                if self.bottleneck:
                    y = nn.relu(normalized(x, width, 1))
                    y = nn.relu(normalized(y, width, 3, stride))
                    y = normalized(y, 4 * width, 1)
                else:
                    y = nn.relu(normalized(x, width, 3, stride))
                    y = normalized(y, width)
                if y.shape != x.shape:
                    x = normalized(x, y.shape[-1], 1, stride)
                x = nn.relu(x + y)
        return nn.Dense(self.outputs)(narrowed(x.mean(axis=(1, 2)), self.features))


class ResNet18(ResNet):
    """ResNet-18: four stages of two basic blocks. 11,173,962 parameters for color images and 10 classes.

    Examples:
        >>> import pfljax as pfl
        >>> network = pfl.models.ResNet18()
        >>> pfl.models.build(network, (8, 8, 3), "classification", 10).num_parameters
        11173962
    """


class GoogLeNet(nn.Module):
    """GoogLeNet (Szegedy et al., 2015) for small images: a 3 x 3 stem without pooling, no auxiliary outputs.

    Group norm after every convolution, where later versions have batch norm. As in torchvision, the branch of 5 x 5
    convolutions has 3 x 3 ones.

    Attributes:
        stages: Outputs of the four branches of each module; before their 3 x 3 convolutions, the second and third
            have others.
        features: Number of features; None: that of the last module. See `narrowed`.
        outputs: Number of classes; 1 for regression.

    Examples:
        >>> import pfljax as pfl
        >>> network = pfl.models.GoogLeNet(stages=(((8, (8, 8), (8, 8), 8),),))
        >>> pfl.models.build(network, (8, 8, 3), "classification", 10).num_parameters
        13290
    """

    stages: Sequence[Sequence[tuple[int, tuple[int, int], tuple[int, int], int]]] = (
        ((64, (96, 128), (16, 32), 32), (128, (128, 192), (32, 96), 64)),
        (
            (192, (96, 208), (16, 48), 64),
            (160, (112, 224), (24, 64), 64),
            (128, (128, 256), (24, 64), 64),
            (112, (144, 288), (32, 64), 64),
            (256, (160, 320), (32, 128), 128),
        ),
        ((256, (160, 320), (32, 128), 128), (384, (192, 384), (48, 128), 128)),
    )
    features: int | None = None
    outputs: int = UNSET

    @nn.compact
    def __call__(self, x: Array) -> Array:
        check_images(x, 8)

        def layer(x: Array, width: int, size: int) -> Array:
            return nn.relu(normalized(x, width, size))

        x = layer(x, 192, 3)
        for stage, modules in enumerate(self.stages):
            if stage > 0:
                x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for plain, (narrow, wide), (narrower, wider), last in modules:
                branches = [
                    layer(x, plain, 1),
                    layer(layer(x, narrow, 1), wide, 3),
                    layer(layer(x, narrower, 1), wider, 3),
                    layer(nn.max_pool(x, (3, 3), (1, 1), "SAME"), last, 1),
                ]
                x = jnp.concatenate(branches, axis=-1)
        features = narrowed(x.mean(axis=(1, 2)), self.features)
        return nn.Dense(self.outputs)(features)
