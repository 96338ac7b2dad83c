"""Drift: the labels of a quarter of the clients change after half of the rounds. Who recovers?

python examples/drift.py
"""

from __future__ import annotations

import optax

import pfljax as pfl

METHODS = ("local", "fedavg", "ditto", "fedem", "federico", "federico_friends")


def main(rounds: int = 120, seeds: int = 3, figure: str = "drift.png") -> pfl.Table:
    """Compares methods on clients of which some drift; draws their scores over rounds."""
    drift = pfl.data.Drift(round=rounds // 2, change="labels", share=0.25)
    table = pfl.compare(
        METHODS,
        lambda split: pfl.data.digits(num_clients=12, seed=split),
        pfl.models.MLP(hidden=(64,)),
        pfl.LocalTraining(optax.sgd, learning_rate=0.3),
        rounds=rounds,
        seeds=range(seeds),
        drift=drift,
        eval_every=5,
    )
    print(table)
    table.plot_rounds().savefig(figure, dpi=110)
    return table


if __name__ == "__main__":
    main()
