"""FedEM's Figure 1: accuracy against client sampling, of FedEM and FedAvg+ (left), and against M, of FedEM (right).

    python -m experiments.fedem_figure1 --dataset=synthetic

Writes figure1.png, and the points as table.md, .csv and .json. The paper draws its curves, for CIFAR-10, without
numbers; of the points here its Table 2 has full participation and M = 3.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from experiments import common, fedem, sweeps
from pfljax import report
from pfljax.core.types import UsageError

FLAGS = flags.FLAGS

common.define_data_flags("synthetic")
common.define_training_flags(200)
common.define_device_flags()
fedem.PAPER.define_flag()
sweeps.define_sweep_flags(["fedem", "fedavg_plus"], ["0"], "runs/fedem-figure1")
flags.DEFINE_list("participations", ["0.1", "0.2", "0.4", "0.6", "0.8", "1.0"], "sampling rates, left; or none")
flags.DEFINE_list("components", ["1", "2", "3", "4", "5"], "values of M, right; or none")


def point(panel: str, method: str, value: float, seeds: list[int], out: Path) -> dict:
    """One point of a panel, a mean over seeds."""
    accuracies = [summary["last"]["accuracy"] for summary in sweeps.cells(method, seeds, out)]
    in_paper = value == {"participation": 1.0, "components": 3}[panel]
    paper = fedem.TABLE2.get(fedem.PAPER.name(), {}).get(method) if in_paper else None
    return {
        "panel": panel,
        "algorithm": method,
        "value": value,
        "accuracy": sum(accuracies) / len(accuracies),
        "paper": paper[0] / 100 if paper else None,
    }


def run() -> None:
    """The command."""
    names, seeds, out = sweeps.method_names(), sweeps.seed_numbers(), Path(FLAGS.out)
    participations, components = (
        sweeps.numbers("participations", float, sets="participation"),
        sweeps.numbers("components", int, sets="fedem.components"),
    )
    if not participations and not components:
        raise UsageError("--participations= and --components=: nothing to draw; accepted: numbers in one of them")
    common.set_defaults(names)
    points = []
    for name in names:
        for value in participations:
            with fedem.PAPER.settings_of(name), sweeps.settings(participation=value):
                points.append(point("participation", name, value, seeds, out / f"{name}-participation-{value:g}"))
    for value in components:
        with fedem.PAPER.settings_of("fedem"), sweeps.settings(fedem__components=value):
            points.append(point("components", "fedem", value, seeds, out / f"fedem-components-{value}"))
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
    panels = {"participation": "share of clients in a round", "components": "components M"}
    report.save(report.sweep_figure(points, panels), out / "figure1.png")
    title = f"{fedem.PAPER.name() or FLAGS.dataset}, test accuracy after the last round"
    sweeps.write_table(title, heads, body, points, out, "figure1.png")


if __name__ == "__main__":
    common.main(run)
