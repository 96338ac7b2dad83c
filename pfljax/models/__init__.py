"""Networks as pure functions: `Model`, for any Flax module, and networks available by name."""

from pfljax.models import adapters, weights
from pfljax.models.building import NAMES, SEQUENCES, build, make
from pfljax.models.model import Model, module_of
from pfljax.models.networks import (
    CNN,
    MLP,
    VGG11,
    FemnistCNN,
    LeNet,
    McMahanCNN,
    MobileNetV2,
    PflResearchCNN,
    ResNet18,
)
from pfljax.models.recurrent import CharacterLSTM
from pfljax.models.transformers import STYLES, Transformer, ViT

__all__ = [
    "CNN",
    "MLP",
    "NAMES",
    "SEQUENCES",
    "STYLES",
    "VGG11",
    "CharacterLSTM",
    "FemnistCNN",
    "LeNet",
    "McMahanCNN",
    "MobileNetV2",
    "Model",
    "PflResearchCNN",
    "ResNet18",
    "Transformer",
    "ViT",
    "adapters",
    "build",
    "make",
    "module_of",
    "weights",
]
