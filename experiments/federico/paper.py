"""Shared by the experiments of FedeRiCo's paper (TMLR version): its values, its settings, its figures of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments.papers import Paper, Row, Study, of_accuracies
from pfljax import report
from pfljax.cli import launch, tables
from pfljax.cli.flags import RUNS
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings
from pfljax.evaluation import collaboration
from pfljax.folder import former

SIZES = {
    "small": "a small network, and CIFAR with fewer rounds and runs than in the paper",
    "reduced": "a small network; data, splits, rounds and runs as in the paper",
    "paper": "as in the paper",
}
LITERAL = "FedeRiCo, literal"
TO_THE_LETTER = {"federico.literal": True}
FRIENDS = "federico_friends"  # ours, unpublished; the paper has no values for it
METHODS = ("local", "fedavg", "fedavg_plus", "clustered", "fedfomo", "fedem", "federico")
LEADERS = {"federico": "FedeRiCo", FRIENDS: "FedeRiCoFriends"}
DISTRIBUTIONS = (2, 3, 4)
# Table 1: accuracy in percent and its deviation, by number of distributions.
_TABLE1 = {
    "cifar10": {
        "local": (40.09, 2.84, 55.27, 3.11, 69.03, 7.05),
        "fedavg": (11.44, 3.28, 11.73, 3.68, 13.93, 5.74),
        "fedavg_plus": (12.45, 8.46, 29.86, 17.85, 45.65, 21.61),
        "clustered": (11.50, 3.65, 15.24, 5.79, 16.43, 5.17),
        "fedfomo": (42.24, 8.32, 59.45, 5.57, 71.05, 6.09),
        "fedem": (41.21, 10.83, 55.08, 6.71, 63.61, 9.93),
        "federico": (56.61, 2.51, 69.76, 2.25, 78.22, 4.80),
    },
    "cifar100": {
        "local": (16.60, 0.64, 25.99, 2.38, 31.05, 1.68),
        "fedavg": (21.28, 5.04, 17.41, 3.27, 18.36, 3.68),
        "fedavg_plus": (29.95, 1.07, 35.33, 1.77, 36.17, 3.27),
        "clustered": (20.93, 3.57, 23.15, 7.04, 15.15, 0.60),
        "fedfomo": (12.15, 0.57, 20.49, 2.90, 24.53, 2.77),
        "fedem": (26.25, 2.40, 24.11, 7.36, 19.23, 2.58),
        "federico": (30.95, 1.62, 39.19, 1.64, 41.41, 1.07),
    },
    "features": {
        "local": (76.76, 0.23, 83.30, 0.32, 88.05, 0.44),
        "fedavg": (66.58, 1.88, 53.36, 4.21, 51.25, 4.37),
        "fedavg_plus": (80.21, 0.68, 81.88, 0.91, 84.50, 1.37),
        "clustered": (66.58, 1.88, 53.36, 4.21, 51.25, 4.37),
        "fedfomo": (78.61, 0.78, 82.57, 0.24, 87.86, 0.77),
        "fedem": (22.59, 1.95, 28.72, 1.83, 22.46, 3.99),
        "federico": (83.56, 0.49, 90.28, 0.75, 93.76, 0.12),
    },
}
TABLE1 = {
    data: {
        name: dict(zip(DISTRIBUTIONS, zip(v[::2], v[1::2], strict=True), strict=True))
        for name, v in rows.items()
    }
    for data, rows in _TABLE1.items()
}
# Table 4: Office-Home, 4 clusters of labels, Dirichlet 0.4, one run; the deviation is over clients.
TABLE4 = {
    "features": {
        "local": (68.32, 19.43),
        "fedavg": (69.73, 11.02),
        "fedavg_plus": (71.20, 24.41),
        "clustered": (69.73, 11.02),
        "fedfomo": (75.78, 6.20),
        "fedem": (47.15, 25.43),
        "federico": (83.90, 4.11),
    }
}
PAPER = Paper(
    Path(__file__).parent / "presets",
    ("digits", "cifar10", "cifar100", "features"),
    {"npz": "cifar10", "digits": "digits", "tfds:cifar10": "cifar10", "tfds:cifar100": "cifar100"},
    "CIFAR: 8 clients, 10 % of CIFAR-10 with a CNN of 3 x 128 channels, 15 % of CIFAR-100 with ResNet-18, batches of "
    "50, 150 rounds; Office-Home: 10 clients, features of a ResNet-18, an MLP of 1000 and 200, batches of 100, 400 "
    "rounds; adam at rate 0.01; 5 splits x 3 seeds (CIFAR-100 and Office-Home: 3 splits)",
)


class Line(NamedTuple):
    """A run whose weights over rounds are drawn: its title and folder, its method, and the flags that it sets."""

    title: str
    method: str
    flags: Mapping[str, Any]


def define(registry: flags.FlagValues, methods: Sequence[str], out: str, **defaults: Any) -> None:
    """Registers the flags of these experiments, with the paper's defaults."""
    PAPER.define(registry, methods, ["0"], out, rounds=150, **defaults)
    said = "; ".join(f"{name}: {text}" for name, text in SIZES.items())
    Group(RUNS, registry).add("size", str, "small", said, choices=list(SIZES))


def refuse_methods(settings: Settings, method: str) -> None:
    """Raises an error for --methods in figures of one method."""
    if settings.methods != [method]:
        raise settings.error("methods", f"accepted: {method}")


def start(settings: Settings, **usual: Any) -> Study:
    """The study from the command line, with the settings of its size; `usual` overrides them."""
    usual = {"partition_groups": 4} | usual
    settings = settings.pinned(
        **{name: value for name, value in usual.items() if not settings.present(name)}
    )
    if settings.data_file and not settings.present("dataset"):
        settings = settings.replace(dataset="npz")
    paper = PAPER._replace(presets=PAPER.presets / settings.size)
    of_digits = paper.name(settings) == "digits"
    print(
        f"--size={settings.size}: {'digits are of one size' if of_digits else SIZES[settings.size]}"
    )
    return Study.start(paper, settings)


def rows_of(study: Study, **flags: Any) -> list[Row]:
    """A row for each method that sets these flags; below FedeRiCo's, one of Algorithm 1 to the letter."""
    found = [Row(name, name, flags) for name in study.methods]
    if "federico" in study.methods and not study.settings["federico.literal"]:
        found.insert(
            study.methods.index("federico") + 1, Row(LITERAL, "federico", flags | TO_THE_LETTER)
        )
    return found


def accuracies(study: Study, row: Row, out: Path) -> dict:
    """Like `Study.accuracies`, but weighted by the clients' test examples, as in the paper (Section 4.2)."""
    cell = study.accuracies(row, out)
    return cell | of_accuracies(cell["weighted"])


def used(study: Study, out: Path) -> list[dict[str, np.ndarray]]:
    """The arrays of collaboration.npz for each trial of a finished row; without true groups, all clients are in one."""
    found = [
        former.read_collaboration(out / trial.folder / "collaboration.npz")
        for trial in study.trials
    ]
    return [{"group": np.zeros(kept["index"].shape[1], int), **kept} for kept in found]


def sharing(study: Study, out: Path) -> collaboration.Sharing:
    """The cosines of the clients' weights after the last round of a finished row, averaged over trials."""
    found = [
        collaboration.sharing(kept["index"][-1], kept["weights"][-1], kept["group"])
        for kept in used(study, out)
    ]

    def mean(values):
        return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")

    return collaboration.Sharing(*(mean(np.array(values)) for values in zip(*found, strict=True)))


def write_weights(study: Study, name: str, lines: Sequence[Line], about: str) -> None:
    """Draws the weights over rounds for every line and trial, and writes a table of who shares models.

    Args:
        study: The study.
        name: Name of the figure, such as "figure3".
        lines: The runs.
        about: The comparison, for the table's title.
    """
    rows = []
    body = []
    cell = {}

    def row_of(line):
        return Row(line.title, line.method, line.flags)

    study.check((row_of(line), {}, study.out / line.title) for line in lines)
    for line in lines:
        out = study.out / line.title
        cell = accuracies(study, row_of(line), out)
        for trial in study.trials:
            figure = report.Plots.read(out / trial.folder).weights()
            report.save(figure, study.out / f"{name}-{line.title}-{trial.folder}.png")
        found = sharing(study, out)
        rows.append({"line": line.title, **cell, **found._asdict(), "paper": None})
        body.append([line.title, study.shown(cell), f"{found.within:.2f}", f"{found.across:.2f}"])
    heads = ["", "test accuracy, %", "cosine of weights within a group", "across groups"]
    title = f"{study.data}, {study.settings.partition_groups} groups: {about}"
    tables.write(title, heads, body, rows, study.out, f"{name}-*.png")
    study.print_differences(row_of(lines[-1]), cell)


def weights_command(
    doc: str | None,
    name: str,
    lines: Sequence[Line],
    about: str,
    *,
    varied: Sequence[str] = (),
    partition_groups: int = 4,
) -> launch.Command:
    """A command that draws the weights of one method's runs, by default for a single split and seed.

    Args:
        doc: The command's description and usage.
        name: Name of the figure, such as "figure3".
        lines: The runs.
        about: The comparison, for the table's title.
        varied: Flags that the lines set.
        partition_groups: Default number of label groups.
    """
    method = lines[0].method

    def run(settings: Settings) -> None:
        refuse_methods(settings, method)
        for flag in varied:
            settings.refuse(flag, "the figure varies it")
        study = start(settings, splits=["0"], seeds=["0"], partition_groups=partition_groups)
        write_weights(study, name, lines, about)

    return launch.Command(
        doc, lambda registry: define(registry, [method], f"runs/federico-{name}"), run
    )
