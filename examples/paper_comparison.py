"""Compare methods for a paper: intervals, paired tests, who is helped and hurt, LaTeX, and figures as PDF.

    python examples/paper_comparison.py

Each seed draws its own clients. Everything is written to runs/paper: the table, a page, and figures in figures/.
"""

from __future__ import annotations

import optax

import pfljax as pfl


def clients(seed: int) -> pfl.Federation:
    """Sixteen clients in two label groups of digits."""
    return pfl.data.digits(16, pfl.partitions.LabelGroups(groups=2), seed=seed, train_examples=15)


def main(out: str = "runs/paper", rounds: int = 100, seeds: int = 6) -> pfl.Table:
    """Compares five methods with Local and writes the table and the figures."""
    methods = [
        pfl.Local(),
        pfl.FedAvg(),
        pfl.Ditto(),
        pfl.FedEM(components=2),
        pfl.FedeRiCoFriends(),
    ]
    model = pfl.models.MLP(hidden=(64,))
    local = pfl.LocalTraining(optax.adam(1e-2))
    options = {
        "rounds": rounds,
        "seeds": range(seeds),
        "eval_every": 5,
        "reference": "local",
        "out": out,
    }
    table = pfl.compare(methods, clients, model, local, **options)
    print(table)
    print(table.to_latex())
    print(*table.save_figures(f"{out}/figures"), sep="\n")
    return table


if __name__ == "__main__":
    main()
