"""Clients' privacy: DP-FedAvg with several noise multipliers, and the epsilon that each client is promised.

pip install -e '.[privacy]'
python examples/private_clients.py
"""

from __future__ import annotations

import optax

import pfljax as pfl


def main(rounds: int = 60, num_clients: int = 80) -> list[tuple[float, float | None]]:
    """Trains with each noise multiplier; returns accuracies and epsilons, None without noise."""
    clients = pfl.data.digits(
        num_clients, pfl.partitions.IID(), train_examples=15, replacement=True
    )
    model = pfl.models.MLP(hidden=(32,))
    local = pfl.LocalTraining(optax.sgd(0.5))
    found = []
    for noise in (0.0, 0.5, 1.0):
        privacy = pfl.ClientPrivacy(noise_multiplier=noise, clip_norm=1.0) if noise else None
        run = pfl.Run(
            pfl.FedAvg(), clients, model, local, participation=0.25, client_privacy=privacy
        )
        result = run.train(rounds=rounds, eval_every=rounds)
        epsilon = result.summary["privacy"]["of_clients"]["epsilon"] if privacy else None
        found.append((result.accuracy, epsilon))
        print(
            f"noise multiplier {noise}: accuracy {100 * result.accuracy:.1f} %, epsilon {epsilon}"
        )
    return found


if __name__ == "__main__":
    main()
