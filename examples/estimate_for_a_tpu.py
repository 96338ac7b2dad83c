"""Estimate a run on a TPU that you do not have: does it fit, with which plan, and for how long do I need it?

pip install -e '.[tpu-target]'
python examples/estimate_for_a_tpu.py
"""

from __future__ import annotations

import optax

import pfljax as pfl


def main(num_clients: int = 64, target: str = "tpu:v5e:2x2"):
    """Compiles FedeRiCoFriends' rounds for four TPU chips and prints bytes, milliseconds and the recommended flags."""
    clients = pfl.data.digits(num_clients, train_examples=20, replacement=True)
    run = pfl.Run(
        pfl.FedeRiCoFriends(),
        clients,
        pfl.models.CNN((16, 32)),
        pfl.LocalTraining(optax.sgd(0.1), batch_size=10),
    )
    found = pfl.estimate(run, target=target)
    print(found)
    return found


if __name__ == "__main__":
    main()
