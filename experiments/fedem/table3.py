"""FedEM's Table 3: test accuracy (training accuracy) of clients unseen in training, next to the paper's.

    python -m experiments.fedem.table3 --dataset=synthetic

A fifth of the clients (--unseen) is held out; afterwards each computes its predictor from only its training
part. In FedEM it takes one E-step, as in the paper. The authors' code takes one at every evaluation, which is
--fedem.newcomer_steps=40 in total.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from absl import flags

from experiments.fedem.paper import PAPER, SEEDS, TABLE3, beside, data_and_model, published, start
from experiments.papers import Study, mean_over, rate_of
from pfljax.api import table
from pfljax.cli import build, launch, tables
from pfljax.cli.settings import Settings
from pfljax.folder import files


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    methods = ["fedavg", "fedavg_plus", "fedem"]
    options = {"rounds": 200, "dataset": "synthetic", "unseen": 0.2}
    PAPER.define(registry, methods, SEEDS, "runs/fedem-table3", **options)


def row_of(study: Study, method: str, out: Path) -> dict:
    """A method's row, means over seeds."""
    summaries = build.train_cells(PAPER.settings_of(study.settings, method), method, out).summaries
    results = [
        files.read_npz(out / trial.folder / "results.npz")["accuracy_train"][-1]
        for trial in study.trials
    ]
    seen = [
        np.average(train, weights=[client["n_train"] for client in summary["per_client"]])
        for train, summary in zip(results, summaries, strict=True)
    ]
    return {
        "method": method,
        "unseen_test": mean_over(summaries, lambda s: s["unseen"]["accuracy"]),
        "unseen_train": mean_over(summaries, lambda s: s["unseen"]["train_accuracy"]),
        "unseen_bottom_decile": mean_over(
            summaries, lambda s: s["unseen"]["accuracy_bottom_decile"]
        ),
        "seen_test": mean_over(summaries, lambda s: s["last"]["accuracy"]),
        "seen_train": float(np.mean(seen)),
        "paper": published(TABLE3, study, method),
        "parameters": summaries[0]["parameters"],
        "learning_rate": rate_of(out / study.trials[0].folder),
    }


def run(settings: Settings) -> None:
    """The command."""
    if not settings.unseen:
        raise settings.error(
            "unseen", "this table is about clients kept out of training; accepted: above 0"
        )
    study = start(settings)
    rows = [row_of(study, name, study.out / name) for name in study.methods]
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
            row["method"],
            f"{100 * row['unseen_test']:.1f} ({100 * row['unseen_train']:.1f})",
            f"{100 * row['unseen_bottom_decile']:.1f}",
            beside(row["paper"], "{:.1f} ({:.1f})"),
            f"{100 * row['seen_test']:.1f} ({100 * row['seen_train']:.1f})",
            f"{row['learning_rate']:g}",
        ]
        for row in rows
    ]
    share = f"{settings.unseen:.0%}"
    about = data_and_model(study, rows[0]["parameters"])
    title = f"{about}, average test accuracy of {share} of the clients, unseen in training"
    title += f", {table.named(study.trials)}"
    tables.write(title, heads, body, rows, study.out)


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
