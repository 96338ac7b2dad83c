"""FedEM's Table 2: test accuracy of several methods, average over clients and bottom decile, beside the paper's.

    python -m experiments.fedem_table2 --dataset=synthetic

Averages are weighted by the clients' test examples. --tune=0.01,0.03,0.1 finds each method's rate on a validation split
first; without it, rates come from experiments/presets/fedem. --time_constrained adds FedEM with a third of the rounds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from absl import flags

from experiments import common, fedem, sweeps
from pfljax import report
from pfljax.training import files

FLAGS = flags.FLAGS

common.define_data_flags("synthetic")
common.define_training_flags(200)
common.define_device_flags()
fedem.PAPER.define_flag()
sweeps.define_sweep_flags(["local", "fedavg", "fedavg_plus", "fedem"], ["0"], "runs/fedem-table2")
flags.DEFINE_bool(
    "time_constrained", False, "also FedEM with 1 / M of the rounds, which is the others' work and traffic"
)


def row_of(title: str, method: str, seeds: list[int], out: Path) -> dict:
    """A row of the table; the curve is for the figure."""
    summaries = sweeps.cells(method, seeds, out)
    curves = [files.read_jsonl(out / f"seed-{seed}" / "metrics.jsonl") for seed in seeds]
    read = lambda name: [summary["last"][name] for summary in summaries]
    return {
        "algorithm": title,
        "accuracy_mean": float(np.mean(read("accuracy"))),
        "accuracy_std": float(np.std(read("accuracy"))),
        "bottom_decile_mean": float(np.mean(read("accuracy_bottom_decile"))),
        "paper": fedem.TABLE2.get(fedem.PAPER.name(), {}).get(title),
        "learning_rate": sweeps.rate_of(out / f"seed-{seeds[0]}"),
        "rounds": [row["round"] for row in curves[0]],
        "curve_mean": np.mean([[row["accuracy"] for row in rows] for rows in curves], axis=0).tolist(),
        "curve_std": np.std([[row["accuracy"] for row in rows] for rows in curves], axis=0).tolist(),
        "seconds_per_round": sweeps.mean_over(summaries, lambda summary: summary["seconds_per_round"]),
    }


def run() -> None:
    """The command."""
    names, seeds, out = sweeps.method_names(), sweeps.seed_numbers(), Path(FLAGS.out)
    common.set_defaults(names)
    rows = []
    for name in names:
        with fedem.PAPER.settings_of(name):
            rows.append(row_of(name, name, seeds, out / name))
    if FLAGS.time_constrained:
        with fedem.PAPER.settings_of("fedem"):
            rounds = max(1, FLAGS.rounds // FLAGS["fedem.components"].value)
            with sweeps.settings(rounds=rounds):
                rows.append(row_of(f"fedem, {rounds} rounds", "fedem", seeds, out / "fedem-time-constrained"))
    heads = ["method", "average / bottom decile, %", "std over seeds", "paper", "rate", "s per round"]
    body = [
        [
            row["algorithm"],
            f"{100 * row['accuracy_mean']:.1f} / {100 * row['bottom_decile_mean']:.1f}",
            f"{100 * row['accuracy_std']:.1f}",
            fedem.beside(row["paper"], "{:.1f} / {:.1f}"),
            f"{row['learning_rate']:g}",
            f"{row['seconds_per_round']:.3g}",
        ]
        for row in rows
    ]
    report.save(report.comparison_figure(rows), out / "curves.png")
    data = fedem.PAPER.name() or FLAGS.dataset
    title = f"{data}, test accuracy after the last round, seeds {', '.join(FLAGS.seeds)}"
    sweeps.write_table(title, heads, body, rows, out, "curves.png")


if __name__ == "__main__":
    common.main(run)
