"""Networks as pure functions: `Model`, for any Flax module, and networks available by name."""

from pfljax.models import adapters, weights
from pfljax.models.building import FAMILIES, NAMES, SEQUENCES, build, make
from pfljax.models.groups import Networks
from pfljax.models.model import Model
from pfljax.models.networks import (
    CNN,
    MLP,
    VGG11,
    FemnistCNN,
    GoogLeNet,
    LeNet,
    McMahanCNN,
    MobileNetV2,
    PFLlibCNN,
    PflResearchCNN,
    ResNet,
    ResNet18,
)
from pfljax.models.pytorch import from_torch
from pfljax.models.recurrent import CharacterLSTM
from pfljax.models.torchvision import PretrainedMobileNetV2, PretrainedResNet
from pfljax.models.transformers import STYLES, Transformer, ViT

__all__ = [
    "CNN",
    "FAMILIES",
    "MLP",
    "NAMES",
    "SEQUENCES",
    "STYLES",
    "VGG11",
    "CharacterLSTM",
    "FemnistCNN",
    "GoogLeNet",
    "LeNet",
    "McMahanCNN",
    "MobileNetV2",
    "Model",
    "Networks",
    "PFLlibCNN",
    "PflResearchCNN",
    "PretrainedMobileNetV2",
    "PretrainedResNet",
    "ResNet",
    "ResNet18",
    "Transformer",
    "ViT",
    "adapters",
    "build",
    "from_torch",
    "make",
    "weights",
]


def __dir__() -> list[str]:
    return __all__
