"""Networks as pure functions: `Model`, for any Flax module, and networks available by name."""

from pfljax.models.building import NAMES, build, make
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

__all__ = [
    "CNN",
    "MLP",
    "NAMES",
    "VGG11",
    "CharacterLSTM",
    "FemnistCNN",
    "LeNet",
    "McMahanCNN",
    "MobileNetV2",
    "Model",
    "PflResearchCNN",
    "ResNet18",
    "build",
    "make",
    "module_of",
]
