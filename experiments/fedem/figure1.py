"""FedEM's Figure 1: accuracy against client sampling for FedEM and FedAvg+ (left), and against M for FedEM (right).

    python -m experiments.fedem.figure1 --dataset=synthetic

Writes figure1.png, and the points as table.md, .csv and .json. The paper draws its curves, for CIFAR-10, without
numbers; its Table 2 has the point with full participation and M = 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from experiments.fedem.paper import PAPER, SEEDS, TABLE2, data_and_model, published, start
from experiments.figures import sweep_figure
from experiments.papers import Study, mean_over
from pfljax import report
from pfljax.api import table
from pfljax.cli import build, launch, tables
from pfljax.cli.flags import RUNS
from pfljax.cli.parsing import Group
from pfljax.cli.settings import FlagError, Settings

PANELS = {"participation": "share of clients in a round", "components": "components M"}


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    PAPER.define(
        registry,
        ["fedem", "fedavg_plus"],
        SEEDS,
        "runs/fedem-figure1",
        rounds=200,
        dataset="synthetic",
    )
    add = Group(RUNS, registry)
    add.several(
        "participations",
        ["0.1", "0.2", "0.4", "0.6", "0.8", "1.0"],
        "sampling rates, left",
        float,
        empty=True,
        above=0,
        at_most=1,
    )
    add.several("components", ["1", "2", "3", "4", "5"], "values of M, right", int, empty=True)


def point(study: Study, method: str, panel: str, value: float) -> dict:
    """One point of a panel, a mean over all trials."""
    flag = {"participation": "participation", "components": "fedem.components"}[panel]
    settings = PAPER.settings_of(study.settings, method).replace({flag: value})
    summaries = build.train_cells(
        settings, method, study.out / f"{method}-{panel}-{value:g}"
    ).summaries
    paper = (
        published(TABLE2, study, method)
        if value == {"participation": 1.0, "components": 3}[panel]
        else None
    )
    return {
        "panel": panel,
        "method": method,
        "value": value,
        "accuracy": mean_over(summaries, lambda summary: summary["last"]["accuracy"]),
        "parameters": summaries[0]["parameters"],
        "paper": paper[0] / 100 if paper else None,
    }


def write_points(study: Study, points: Sequence[dict], name: str) -> None:
    """Draws the points into the figure of this name, and writes them as a table."""
    heads = ["panel", "method", "value", "test accuracy, %", "paper"]
    body = [
        [
            point["panel"],
            point["method"],
            f"{point['value']:g}",
            f"{100 * point['accuracy']:.1f}",
            f"{100 * point['paper']:.1f}" if point["paper"] else "-",
        ]
        for point in points
    ]
    report.save(sweep_figure(points, PANELS, "the paper's Table 2"), study.out / name)
    title = f"{data_and_model(study, points[0]['parameters'])}, test accuracy after the last round"
    tables.write(f"{title}, {table.named(study.trials)}", heads, body, points, study.out, name)


def run(settings: Settings) -> None:
    """The command."""
    participations = settings.numbers("participations", float, sets="participation")
    components = settings.numbers("components", int, sets="fedem.components")
    if not participations and not components:
        raise FlagError(
            "--participations= and --components=: nothing to draw; accepted: numbers in at least one"
        )
    study = start(settings)
    points = [
        point(study, name, "participation", value)
        for name in study.methods
        for value in participations
    ]
    points += [point(study, "fedem", "components", value) for value in components]
    write_points(study, points, "figure1.png")


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
