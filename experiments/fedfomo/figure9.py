"""FedFomo's Figure 9: accuracy over local epochs and at the end, by share of examples for validation.

    python -m experiments.fedfomo.figure9
    python -m experiments.fedfomo.figure9 --data_file=CIFAR10.npz --seeds=0,1,2,3,4

Writes figure9.png, and the last points as table.md, .csv and .json. The paper draws its curves and points, from five
runs on CIFAR-10, without numbers. Its first share, 0.01, is less than one example on digits.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags
from matplotlib.figure import Figure

from experiments.fedfomo import paper
from experiments.figures import curves_panel, with_band
from experiments.papers import Row, Study
from pfljax import report
from pfljax.cli import launch, tables
from pfljax.cli.flags import RUNS
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings
from pfljax.report.draw import draw
from pfljax.report.picture import PALETTE, Axis, Panel


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, ["fedfomo"], ["0", "1", "2"], "runs/fedfomo-figure9")
    Group(RUNS, registry).several(
        "shares",
        ["0.05", "0.1", "0.2", "0.4", "0.6", "0.8", "0.9"],
        "shares of examples for validation",
        float,
        above=0,
        below=1,
    )


def curves_and_last(lines: Sequence[dict], label: str) -> Figure:
    """Plots accuracy over local epochs for each value of a hyperparameter, and final accuracy against it.

    Args:
        lines: For each line "title", "value", "epochs", "curve", and the final "accuracy_mean" and "accuracy_std".
        label: Name of the hyperparameter.
    """
    values, mean, std = (
        [line[name] for line in lines] for name in ("value", "accuracy_mean", "accuracy_std")
    )
    last = with_band(values, mean, std, "", {"color": PALETTE[0], "symbol": "circle"})
    ticks = [(value, f"{value:g}") for value in values]
    right = Panel(Axis(label, ticks), Axis("test accuracy, last round", percent=True), last)
    return draw([curves_panel(lines, "epochs"), right], (10.4, 4))


def run(settings: Settings) -> None:
    """The command."""
    paper.refuse_others(settings)
    shares = settings.numbers("shares", float, sets="validation_fraction")
    study = Study.start(paper.PAPER, settings)
    lines = []
    study.check()
    for share in shares:
        row = Row(f"{share:g} for validation", "fedfomo", {"validation_fraction": share})
        line = study.curve(row, study.out / f"validation-{share:g}")
        lines.append(line | {"panel": "validation_fraction", "value": share, "paper": None})
        print(f"share {share:g} done")
    report.save(
        curves_and_last(lines, "share of the examples for validation"), study.out / "figure9.png"
    )
    body = [[f"{line['value']:g}", study.shown(line)] for line in lines]
    heads = ["validation share", "test accuracy, %"]
    tables.write(paper.last_round(study), heads, body, lines, study.out, "figure9.png")
    study.print_differences(Row("fedfomo", "fedfomo", {}), lines[0])


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
