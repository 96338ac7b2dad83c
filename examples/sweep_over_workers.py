"""Spread a sweep over processes: each takes runs that no other one is training, and all write the same table.

    python examples/sweep_over_workers.py

Start it twice, in two terminals or on two machines with a common file system, to share the work. On the command line,
`pfljax compare --workers=2` starts the processes.
"""

from __future__ import annotations

import optax

import pfljax as pfl

RATES = (0.03, 0.1, 0.3)


def main(out: str = "runs/sweep", rounds: int = 60) -> dict[float, pfl.Table]:
    """Compares two methods at three learning rates; finished runs are read, not repeated."""

    def clients(seed):
        return pfl.data.digits(16, pfl.partitions.Dirichlet(0.3), seed=seed, train_examples=15)

    model = pfl.models.MLP(hidden=(32,))
    tables = {}
    for rate in RATES:
        local = pfl.LocalTraining(optax.sgd, rate)
        options = {"rounds": rounds, "seeds": (0, 1), "out": f"{out}/rate-{rate}"}
        tables[rate] = pfl.compare([pfl.Local(), pfl.FedAvg()], clients, model, local, **options)
        print(tables[rate])
    return tables


if __name__ == "__main__":
    main()
