"""FedEM's Table 2: test accuracy of several methods, average over clients and bottom decile, beside the paper's.

    python -m experiments.fedem.table2 --dataset=synthetic

Averages are weighted by the clients' test examples. --synthetic.labels=published is the very data that the paper was
measured on, with the authors' model; the title says which labels there are, and how many parameters.
--tune=0.01,0.03,0.1 finds each method's rate on a validation split first; without it, rates come from
experiments/fedem/presets. --time_constrained adds FedEM with a third of the rounds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from absl import flags

from experiments.fedem.paper import METHODS, PAPER, SEEDS, TABLE2, beside, data_and_model, published, start
from experiments.papers import Study
from pfljax import report
from pfljax.cli import launch, sweep
from pfljax.cli.flags import RUNS, Group
from pfljax.cli.settings import Settings
from pfljax.training import files


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    PAPER.define(registry, METHODS, SEEDS, "runs/fedem-table2", rounds=200, dataset="synthetic")
    Group(RUNS, registry).switch(
        "time_constrained", False, "also FedEM with 1 / M of the rounds, which is the others' work and traffic"
    )


def row_of(study: Study, settings: Settings, title: str, method: str, out: Path) -> dict:
    """A row of the table; the curve is for the figure."""
    summaries = sweep.cells(settings, method, study.trials, out)
    curves = [files.read_jsonl(out / trial.folder / "metrics.jsonl") for trial in study.trials]
    read = lambda name: [summary["last"][name] for summary in summaries]
    return {
        "algorithm": title,
        "accuracy_mean": float(np.mean(read("accuracy"))),
        "accuracy_std": float(np.std(read("accuracy"))),
        "bottom_decile_mean": float(np.mean(read("accuracy_bottom_decile"))),
        "paper": published(TABLE2, study, title),
        "parameters": summaries[0]["parameters"],
        "learning_rate": sweep.rate_of(out / study.trials[0].folder),
        "rounds": [row["round"] for row in curves[0]],
        "curve_mean": np.mean([[row["accuracy"] for row in rows] for rows in curves], axis=0).tolist(),
        "curve_std": np.std([[row["accuracy"] for row in rows] for rows in curves], axis=0).tolist(),
        "seconds_per_round": sweep.mean_over(summaries, lambda summary: summary["seconds_per_round"]),
    }


def run(settings: Settings) -> None:
    """The command."""
    study = start(settings)
    rows = [
        row_of(study, PAPER.settings_of(study.settings, name), name, name, study.out / name) for name in study.methods
    ]
    if settings.time_constrained:
        fedem = PAPER.settings_of(study.settings, "fedem")
        fedem = fedem.replace(rounds=max(1, fedem.rounds // fedem["fedem.components"]))
        rows.append(
            row_of(study, fedem, f"fedem, {fedem.rounds} rounds", "fedem", study.out / "fedem-time-constrained")
        )
    heads = ["method", "average / bottom decile, %", "std over seeds", "paper", "rate", "s per round"]
    body = [
        [
            row["algorithm"],
            f"{100 * row['accuracy_mean']:.1f} / {100 * row['bottom_decile_mean']:.1f}",
            f"{100 * row['accuracy_std']:.1f}",
            beside(row["paper"], "{:.1f} / {:.1f}"),
            f"{row['learning_rate']:g}",
            f"{row['seconds_per_round']:.3g}",
        ]
        for row in rows
    ]
    report.save(report.comparison_figure(rows), study.out / "curves.png")
    title = f"{data_and_model(study, rows[0]['parameters'])}, test accuracy after the last round"
    title += f", {sweep.named(study.trials)}"
    sweep.write_table(title, heads, body, rows, study.out, "curves.png")


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
