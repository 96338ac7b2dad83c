"""FedEM's Table 3: clients that were not there in training, test accuracy (training accuracy), beside the paper's.

    python -m experiments.fedem_table3 --dataset=synthetic

A fifth of the clients (--unseen_clients) is kept out; afterwards each gets its predictor from its training part alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from absl import flags

from experiments import common, fedem, sweeps
from pfljax.core.types import UsageError

FLAGS = flags.FLAGS

common.define_data_flags("synthetic")
common.define_training_flags(200)
common.define_device_flags()
fedem.PAPER.define_flag()
sweeps.define_sweep_flags(["fedavg", "fedavg_plus", "fedem"], ["0"], "runs/fedem-table3")
FLAGS.set_default("unseen_clients", 0.2)


def row_of(method: str, seeds: list[int], out: Path) -> dict:
    """A method's row, means over seeds."""
    summaries = sweeps.cells(method, seeds, out)
    results = [np.load(out / f"seed-{seed}" / "results.npz")["accuracy_train"][-1] for seed in seeds]
    return {
        "algorithm": method,
        "unseen_test": sweeps.mean_over(summaries, lambda s: s["unseen"]["accuracy"]),
        "unseen_train": sweeps.mean_over(summaries, lambda s: s["unseen"]["train_accuracy"]),
        "unseen_bottom_decile": sweeps.mean_over(summaries, lambda s: s["unseen"]["accuracy_bottom_decile"]),
        "seen_test": sweeps.mean_over(summaries, lambda s: s["last"]["accuracy"]),
        "seen_train": float(
            np.mean(
                [
                    np.average(train, weights=[client["n_train"] for client in summary["per_client"]])
                    for train, summary in zip(results, summaries, strict=True)
                ]
            )
        ),
        "paper": fedem.TABLE3.get(fedem.PAPER.name(), {}).get(method),
        "learning_rate": sweeps.rate_of(out / f"seed-{seeds[0]}"),
    }


def run() -> None:
    """The command."""
    names, seeds, out = sweeps.method_names(), sweeps.seed_numbers(), Path(FLAGS.out)
    if not FLAGS.unseen_clients:
        raise UsageError("--unseen_clients=0: this table is about clients kept out of training; accepted: above 0")
    common.set_defaults(names)
    rows = []
    for name in names:
        with fedem.PAPER.settings_of(name):
            rows.append(row_of(name, seeds, out / name))
    heads = [
        "method",
        "unseen, % (train)",
        "bottom decile",
        "paper",
        "of the training, % (train)",
        "rate",
    ]
    body = [
        [
            row["algorithm"],
            f"{100 * row['unseen_test']:.1f} ({100 * row['unseen_train']:.1f})",
            f"{100 * row['unseen_bottom_decile']:.1f}",
            fedem.beside(row["paper"], "{:.1f} ({:.1f})"),
            f"{100 * row['seen_test']:.1f} ({100 * row['seen_train']:.1f})",
            f"{row['learning_rate']:g}",
        ]
        for row in rows
    ]
    data = fedem.PAPER.name() or FLAGS.dataset
    title = f"{data}, average test accuracy of {FLAGS.unseen_clients:.0%} of the clients, unseen in training"
    sweeps.write_table(title, heads, body, rows, out)


if __name__ == "__main__":
    common.main(run)
