"""Use your own Linen module, with batch normalization and dropout.

    python examples/own_linen_model.py
    pfljax train --model=examples/own_linen_model.py:Network --method=fedavg

The running statistics are part of a model: they travel and are averaged like its parameters. Dropout is active only
in local training.
"""

from __future__ import annotations

import flax.linen as nn
import optax

import pfljax as pfl


class Network(nn.Module):
    """Two dense layers; `train` selects training mode."""

    num_classes: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(64)(x.reshape(x.shape[0], -1))
        # Clients take few steps in a round. With Flax's momentum of 0.99, 30 steps leave 3/4 of the initial statistics.
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)


def main() -> pfl.Result:
    """Trains FedAvg+ on digits with the network and prints the result."""
    clients = pfl.data.digits(num_clients=8, train_examples=60)
    local = pfl.LocalTraining(optax.sgd(0.1), batch_size=20)
    result = pfl.Run(pfl.methods.FedAvgPlus(), clients, Network(num_classes=10), local).train(
        rounds=20
    )
    print(result)
    return result


if __name__ == "__main__":
    main()
