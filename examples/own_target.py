"""Predict targets of another shape: a class for every pixel, from images in which a bright square is to be found.

    python examples/own_target.py

Pixels at the border have no class: targets below 0 are ignored in training and in all scores.
"""

from __future__ import annotations

import flax.linen as nn
import numpy as np
import optax

import pfljax as pfl

SIDE = 10


def squares(num: int = 120, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns noisy images x (n, H, W, 1), and y (n, H, W): 1 inside of a square, 0 outside, -1 at the border."""
    rng = np.random.default_rng(seed)
    y = np.zeros((num, SIDE, SIDE), int)
    for mask, (row, column) in zip(y, rng.integers(1, SIDE - 5, size=(num, 2)), strict=True):
        mask[row : row + 4, column : column + 4] = 1
    x = y + rng.normal(scale=0.5, size=y.shape)
    y[:, [0, -1]] = y[:, :, [0, -1]] = -1
    return x[..., None], y


class Segmenter(nn.Module):
    """Returns logits (B, H, W, C) for images (B, H, W, 1)."""

    num_classes: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        return nn.Conv(self.num_classes, (3, 3))(x)


def main() -> pfl.Result:
    """Trains FedAvg on the images of six clients and prints the result."""
    x, y = squares()
    clients = pfl.Federation.from_arrays(x, y, client=np.arange(len(x)) % 6)
    local = pfl.LocalTraining(optax.adam(1e-2))
    run = pfl.Run(pfl.FedAvg(), clients, Segmenter(num_classes=2), local, metrics=["f1"])
    result = run.train(rounds=60)
    print(result, f"macro F1 {result.history[-1]['f1']:.3f}")
    return result


if __name__ == "__main__":
    main()
