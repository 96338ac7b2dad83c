"""Train on your own loss: the focal loss, which gives examples that a model is sure of less weight.

    python examples/own_loss.py
    pfljax train --method=fedavg --loss=examples/own_loss.py:focal

Lin, Goyal, Girshick, He, Dollar, "Focal loss for dense object detection" (2017): -(1 - p_y)^gamma log p_y.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

import pfljax as pfl

GAMMA = 2.0


def focal(outputs: jax.Array, y: jax.Array) -> jax.Array:
    """Losses (B,) of logits (B, C) and classes (B,)."""
    log_p = jnp.take_along_axis(jax.nn.log_softmax(outputs), y[:, None], axis=-1)[:, 0]
    return -((1 - jnp.exp(log_p)) ** GAMMA) * log_p


def main() -> pfl.Result:
    """Trains FedAvg on digits with the focal loss and prints the result."""
    clients = pfl.data.digits(num_clients=8, train_examples=15)
    local = pfl.LocalTraining(optax.adam(1e-2), loss=focal)
    result = pfl.Run(pfl.FedAvg(), clients, pfl.models.MLP(hidden=(32,)), local).train(rounds=60)
    print(result)
    return result


if __name__ == "__main__":
    main()
