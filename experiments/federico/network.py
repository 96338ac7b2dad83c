"""The small network of FedeRiCo's experiments where the paper's takes too long."""

from __future__ import annotations

import flax.linen as nn

from pfljax.core.types import Array
from pfljax.models.layers import patches


class SmallCNN(nn.Module):
    """A 5 x 5 convolution of 16 channels at stride 3, a 3 x 3 one of 32 at stride 2, and a dense layer.

    13,866 parameters for 32 x 32 color images and 10 classes. The strides in place of pooling make it some 200 times
    cheaper than the paper's CNN.
    """

    num_classes: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.relu(nn.Dense(16)(patches(x, size=5, stride=3, margin=1)))
        x = nn.relu(nn.Dense(32)(patches(x, size=3, stride=2)))
        return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))
