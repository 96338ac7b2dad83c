"""Robust servers: attackers flip signs, and the server takes the mean, the median or the geometric median.

python examples/robust_servers.py
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import optax

import pfljax as pfl

RULES = ("mean", "median", "geometric_median")
SHARES = (0.0, 0.15, 0.3)


def main(rounds: int = 60, figure: str = "robust_servers.png") -> dict[str, list[float]]:
    """Trains FedAvg with each rule and share of attackers; draws the honest clients' accuracy."""
    clients = pfl.data.digits(20, pfl.partitions.IID(), train_examples=40)
    model = pfl.models.MLP(hidden=(32,))
    local = pfl.LocalTraining(optax.sgd(0.5))
    found: dict[str, list[float]] = {}
    for rule in RULES:
        for share in SHARES:
            attack = pfl.Attack("sign_flip", attackers=share, strength=3) if share else None
            run = pfl.Run(
                pfl.FedAvg(),
                clients,
                model,
                local,
                server=pfl.Server(aggregator=rule),
                attack=attack,
            )
            found.setdefault(rule, []).append(run.train(rounds=rounds, eval_every=rounds).accuracy)
        print(rule, [f"{100 * accuracy:.1f} %" for accuracy in found[rule]])
        plt.plot(SHARES, found[rule], marker="o", label=rule)
    plt.xlabel("share of attackers")
    plt.ylabel("accuracy of honest clients")
    plt.legend()
    plt.savefig(figure, dpi=110)
    plt.close()
    return found


if __name__ == "__main__":
    main()
