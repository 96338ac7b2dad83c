"""FedEM's Figure 1: accuracy against client sampling, of FedEM and FedAvg+ (left), and against M, of FedEM (right).

    python -m experiments.fedem.figure1 --dataset=synthetic

Writes figure1.png, and the points as table.md, .csv and .json. The paper draws its curves, for CIFAR-10, without
numbers; of the points here its Table 2 has full participation and M = 3.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from experiments.fedem.paper import PAPER, SEEDS, TABLE2, data_and_model, published, start
from experiments.papers import Row, Study
from pfljax import report
from pfljax.cli import launch, sweep
from pfljax.cli.flags import RUNS, Group
from pfljax.cli.settings import FlagError, Settings

PANELS = {"participation": "share of clients in a round", "components": "components M"}


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    PAPER.define(registry, ["fedem", "fedavg_plus"], SEEDS, "runs/fedem-figure1", rounds=200, dataset="synthetic")
    add = Group(RUNS, registry)
    add.several("participations", ["0.1", "0.2", "0.4", "0.6", "0.8", "1.0"], "sampling rates, left; or none")
    add.several("components", ["1", "2", "3", "4", "5"], "values of M, right; or none")


def point(study: Study, row: Row, panel: str, value: float, out: Path) -> dict:
    """One point of a panel, a mean over seeds."""
    summaries = sweep.cells(study.settings_of(row), row.method, study.trials, out)
    in_paper = value == {"participation": 1.0, "components": 3}[panel]
    paper = published(TABLE2, study, row.method) if in_paper else None
    return {
        "panel": panel,
        "algorithm": row.method,
        "value": value,
        "accuracy": sweep.mean_over(summaries, lambda summary: summary["last"]["accuracy"]),
        "parameters": summaries[0]["parameters"],
        "paper": paper[0] / 100 if paper else None,
    }


def run(settings: Settings) -> None:
    """The command."""
    participations = settings.numbers("participations", float, sets="participation")
    components = settings.numbers("components", int, sets="fedem.components")
    if not participations and not components:
        raise FlagError("--participations= and --components=: nothing to draw; accepted: numbers in one of them")
    study = start(settings)
    points = []
    for name in study.methods:
        for value in participations:
            row = Row(name, name, {"participation": value})
            points.append(point(study, row, "participation", value, study.out / f"{name}-participation-{value:g}"))
    for value in components:
        row = Row("fedem", "fedem", {"fedem.components": value})
        points.append(point(study, row, "components", value, study.out / f"fedem-components-{value}"))
    heads = ["panel", "method", "value", "test accuracy, %", "paper"]
    body = [
        [
            point["panel"],
            point["algorithm"],
            f"{point['value']:g}",
            f"{100 * point['accuracy']:.1f}",
            f"{100 * point['paper']:.1f}" if point["paper"] else "-",
        ]
        for point in points
    ]
    report.save(report.sweep_figure(points, PANELS), study.out / "figure1.png")
    title = f"{data_and_model(study, points[0]['parameters'])}, test accuracy after the last round"
    title += f", {sweep.named(study.trials)}"
    sweep.write_table(title, heads, body, points, study.out, "figure1.png")


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
