"""Shared by the experiments of FedEM's paper (Marfoq et al., 2021): its values and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.papers import Paper, Study, mean_over, of_accuracies, rate_of
from pfljax import report
from pfljax.api import table
from pfljax.cli import build, tables
from pfljax.cli.settings import Settings
from pfljax.evaluation.statistics import deviation
from pfljax.folder import files
from pfljax.report.run_data import over_rounds

SEEDS = ["0", "1", "2"]  # the draw of the data and the initial components move FedEM by some points

# Table 2: test accuracy, average / bottom decile, in percent, in the paper's order of methods.
METHODS = ("local", "fedavg", "fedprox", "fedavg_plus", "clustered", "pfedme", "fedem")
TABLE2 = {
    data: dict(zip(METHODS, row, strict=True))
    for data, row in {
        "femnist": [
            (71.0, 57.5),
            (78.6, 63.9),
            (78.9, 64.0),
            (75.3, 53.0),
            (73.5, 55.1),
            (74.9, 57.6),
            (79.9, 64.8),
        ],
        "emnist": [
            (71.9, 64.3),
            (82.6, 75.0),
            (83.0, 75.4),
            (83.1, 75.8),
            (82.7, 75.0),
            (83.3, 76.4),
            (83.5, 76.6),
        ],
        "cifar10": [
            (70.2, 48.7),
            (78.2, 72.4),
            (78.0, 70.8),
            (82.3, 70.6),
            (78.6, 71.2),
            (81.7, 73.6),
            (84.3, 78.1),
        ],
        "cifar100": [
            (31.5, 19.9),
            (40.9, 33.2),
            (41.0, 33.2),
            (39.0, 28.3),
            (41.5, 34.1),
            (41.8, 32.5),
            (44.1, 35.0),
        ],
        "shakespeare": [
            (32.0, 16.6),
            (46.7, 42.8),
            (45.7, 41.9),
            (40.0, 25.5),
            (46.6, 42.7),
            (41.2, 36.8),
            (46.7, 43.0),
        ],
        "synthetic": [
            (65.7, 58.4),
            (68.2, 58.9),
            (68.2, 59.0),
            (68.9, 60.2),
            (69.1, 59.0),
            (69.2, 61.2),
            (74.7, 66.7),
        ],
    }.items()
}
# Table 3: clients unseen in training, average test accuracy (training accuracy), in percent.
TABLE3 = {
    "femnist": {"fedavg": (78.3, 80.9), "fedavg_plus": (74.2, 84.2), "fedem": (79.1, 81.5)},
    "emnist": {"fedavg": (83.4, 82.7), "fedavg_plus": (83.7, 92.9), "fedem": (84.0, 83.3)},
    "cifar10": {"fedavg": (77.3, 77.5), "fedavg_plus": (80.4, 80.5), "fedem": (85.9, 90.7)},
    "cifar100": {"fedavg": (41.1, 42.1), "fedavg_plus": (36.5, 55.3), "fedem": (47.5, 46.6)},
    "shakespeare": {"fedavg": (46.7, 47.1), "fedavg_plus": (40.2, 93.0), "fedem": (46.7, 46.6)},
    "synthetic": {"fedavg": (68.6, 70.0), "fedavg_plus": (69.1, 72.1), "fedem": (73.0, 74.1)},
}
PAPER = Paper(
    Path(__file__).parent / "presets",
    ("synthetic", "cifar10", "cifar100", "emnist", "femnist", "shakespeare"),
    {
        "synthetic": "synthetic",
        "text": "shakespeare",
        "tfds:cifar10": "cifar10",
        "tfds:cifar100": "cifar100",
        "tfds:emnist/byclass": "emnist",
    },
)


def start(settings: Settings) -> Study:
    """The study, whose methods can be run.

    Published labels come with the authors' model, of one logit, unless another is given.
    """
    if settings.synthetic_labels == "published" and not settings.present("model"):
        settings = settings.pinned(model="logistic")
    study = Study.start(PAPER, settings)
    study.check()
    return study


def row_of(study: Study, method: str, *, title: str = "", rounds: int = 0) -> dict:
    """A method's accuracies over all trials, next to Table 2's; the curve is for the figure.

    Args:
        study: The study.
        method: The method.
        title: Title of the row, if it is not the method's name.
        rounds: Number of rounds; 0: as in the settings.
    """
    settings = PAPER.settings_of(study.settings, method)
    title = title or method
    out = study.out / title.replace(", ", "-").replace(" ", "-")
    summaries = build.train_cells(
        settings.replace(rounds=rounds or settings.rounds), method, out
    ).summaries
    kept = [files.read_jsonl(out / trial.folder / "metrics.jsonl") for trial in study.trials]
    evaluated, curves = over_rounds(kept, "accuracy")

    def read(name):
        return [summary["last"][name] for summary in summaries]

    return {
        "method": title,
        **of_accuracies(read("accuracy")),
        "seeds": [{"seed": summary["seed"], **summary["last"]} for summary in summaries],
        "bottom_decile_mean": float(np.mean(read("accuracy_bottom_decile"))),
        "paper": published(TABLE2, study, title),
        "parameters": summaries[0]["parameters"],
        "learning_rate": rate_of(out / study.trials[0].folder),
        "rounds": evaluated,
        "curve_mean": curves.mean(axis=0).tolist(),
        "curve_std": deviation(curves).tolist(),
        "seconds_per_round": mean_over(summaries, lambda summary: summary["seconds_per_round"]),
    }


def write_rows(study: Study, rows: Sequence[dict]) -> None:
    """Writes a table of `row_of`'s rows, and the figure of their curves."""
    heads = [
        "method",
        "average / bottom decile, %",
        "deviation over runs",
        "paper",
        "rate",
        "s per round",
    ]
    body = [
        [
            row["method"],
            f"{100 * row['accuracy_mean']:.1f} / {100 * row['bottom_decile_mean']:.1f}",
            f"{100 * row['accuracy_std']:.1f} ({len(row['seeds'])})"
            if len(row["seeds"]) > 1
            else "-",
            beside(row["paper"], "{:.1f} / {:.1f}"),
            f"{row['learning_rate']:g}",
            f"{row['seconds_per_round']:.3g}",
        ]
        for row in rows
    ]
    report.save(report.plot_comparison(rows), study.out / "curves.png")
    title = f"{data_and_model(study, rows[0]['parameters'])}, test accuracy after the last round"
    tables.write(
        f"{title}, {table.named(study.trials)}", heads, body, rows, study.out, "curves.png"
    )


def data_and_model(study: Study, parameters: int) -> str:
    """For titles: the data set, its labels, and the size of a model."""
    labels = (
        f", {study.settings.synthetic_labels} labels"
        if study.settings.dataset == "synthetic"
        else ""
    )
    return f"{study.data}{labels}, {parameters:,} parameters per model"


def published(table: Mapping[str, Mapping], study: Study, row: str) -> tuple[float, float] | None:
    """The paper's values in a row of a table, if it has the study's data set."""
    return table.get(PAPER.name(study.settings) or "", {}).get(row)


def beside(values: tuple[float, float] | None, form: str) -> str:
    """The paper's two values, or a dash."""
    return form.format(*values) if values else "-"
