"""Use your own NNX module, passed as a function of its random streams so that initial models can differ.

python examples/own_nnx_model.py
pfljax train --model=examples/own_nnx_model.py:Network --method=fedem
"""

from __future__ import annotations

import jax
import optax
from flax import nnx

import pfljax as pfl


class Network(nnx.Module):
    """Two dense layers with dropout between them."""

    def __init__(self, num_classes: int, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(64, num_classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.hidden(x.reshape(x.shape[0], -1)))
        return self.head(self.dropout(x))


def main() -> pfl.Result:
    """Trains FedEM with components that start from different parameters, and prints the result."""
    clients = pfl.data.digits(num_clients=8, train_examples=60)
    local = pfl.LocalTraining(optax.sgd(0.1), batch_size=20)
    result = pfl.Run(pfl.FedEM(components=2), clients, Network, local).train(rounds=30)
    print(result)
    return result


if __name__ == "__main__":
    main()
