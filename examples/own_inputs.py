"""Train on inputs of several arrays: images of digits, and measurements beside them.

    python examples/own_inputs.py

Each example is the image of a digit and a noisy measurement, which tells whether the digit is even. Neither alone
tells everything. The images stay uint8 in memory, a quarter of what floats would take.
"""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import pfljax as pfl


def examples(num: int = 600, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns x, with images (n, 8, 8, 1) of 0 to 16 and measurements (n, 2), and y (n,)."""
    digits, y = load_digits(return_X_y=True)
    digits = digits[:num]
    y = y[:num]
    measured = np.random.default_rng(seed).normal(
        loc=np.stack([y % 2, -(y % 2)], axis=1), scale=0.3
    )
    images = digits.astype(np.uint8).reshape(-1, 8, 8, 1)
    return {"image": images, "measured": measured.astype(np.float32)}, y


class TwoInputs(nn.Module):
    """Reads a dict of arrays (B, ...), as the federation was given it."""

    num_classes: int

    @nn.compact
    def __call__(self, x):
        image = x["image"] / 16  # float32, although the data are uint8
        image = nn.relu(nn.Dense(32)(image.reshape(image.shape[0], -1)))
        return nn.Dense(self.num_classes)(jnp.concatenate([image, x["measured"]], axis=1))


def main() -> pfl.Result:
    """Trains FedAvg with a personal last layer on five clients and prints the result."""
    x, y = examples()
    clients = pfl.Federation.from_arrays(x, y, client=np.arange(len(y)) % 5, standardize=False)
    local = pfl.LocalTraining(optax.adam(1e-2))
    result = pfl.Run(pfl.FedPer(), clients, TwoInputs(num_classes=10), local).train(rounds=60)
    print(result)
    first = {name: array[:5] for name, array in x.items()}
    print("the first digits, by client 0's model:", result.predict(first, client=0).argmax(axis=1))
    return result


if __name__ == "__main__":
    main()
