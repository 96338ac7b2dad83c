"""Networks as users write them, in Flax Linen, Flax NNX and PyTorch: nothing in them is made for pfljax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn

from experiments.architectures import linen


class Architecture(NamedTuple):
    """A network and the work of a round: K clients train for one epoch over n examples in batches of B.

    Attributes:
        make: Makes the Linen module.
        torch: Name of its counterpart in `in_torch`, and its arguments, as names of `torch.nn`.
        nnx: Name of its counterpart in `nnx`, if it has one.
        shape: Shape of an example; (T,) means tokens.
        num_clients: K.
        examples: n.
        batch_size: B.
    """

    make: Callable[[], Any]
    torch: tuple[str, ...]
    nnx: str = ""
    shape: tuple[int, ...] = (32, 32, 3)
    num_clients: int = 8
    examples: int = 32
    batch_size: int = 16


SEQUENCE = (40, 32)
ARCHITECTURES = {
    "McMahan's CNN": Architecture(linen.McMahan, ("mcmahan",), "McMahan", (28, 28, 1), 20, 60, 10),
    # One of the five local epochs of BlazeFL's benchmark.
    "LeNet": Architecture(linen.LeNet, ("lenet",), num_clients=100, examples=500, batch_size=50),
    "CNN 3 x 128": Architecture(linen.ThreeConvolutions, ("three_convolutions",)),
    "ResNet-18 (group norm)": Architecture(linen.ResNet18, ("resnet18",)),
    "ResNet-18 (batch norm)": Architecture(
        lambda: linen.ResNet18(True), ("resnet18", "BatchNorm2d"), "ResNet18"
    ),
    "MobileNet-V2": Architecture(linen.MobileNetV2, ("mobilenet_v2",)),
    "VGG-11": Architecture(linen.VGG11, ("vgg11",)),
    "U-Net": Architecture(linen.UNet, ("UNet",), "UNet"),
    "depthwise separable": Architecture(linen.DepthwiseSeparable, ("depthwise_separable",)),
    "strided and transposed": Architecture(linen.Autoencoder, ("autoencoder",)),
    "LSTM 2 x 128": Architecture(linen.Recurrent, ("Recurrent", "LSTM"), "Recurrent", SEQUENCE),
    "GRU 2 x 128": Architecture(
        lambda: linen.Recurrent(nn.GRUCell), ("Recurrent", "GRU"), "", SEQUENCE
    ),
    "ViT 2 x 64": Architecture(linen.ViT, ("ViT",), "ViT"),
    "decoder 2 x 64": Architecture(linen.Decoder, ("Decoder",), "", (40,)),
}
