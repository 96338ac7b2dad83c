"""The networks, as Flax Linen modules."""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn

from pfljax.models.layers import PatchConv
from pfljax.types import Array


class MLP(nn.Module):
    """Dense layers with ReLU between them; no hidden width makes it linear."""

    hidden: Sequence[int]
    outputs: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x.reshape(x.shape[0], -1)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.outputs)(x)


class CNN(nn.Module):
    """3 x 3 convolutions, each with 2 x 2 max pooling and ReLU, and one dense layer.

    With channels (128, 128, 128) it is the CIFAR-10 network of FedeRiCo (Appendix C; "CNN2" of Shen et al., 2020).
    """

    channels: Sequence[int]
    outputs: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in self.channels:
            x = nn.relu(PatchConv(width, pool=True)(x))
        return nn.Dense(self.outputs)(x.reshape(x.shape[0], -1))
