"""pFedMB's Figure 3: the clients' branch weights over rounds, with the averages of Eq. 5 and Eq. 6.

    python -m experiments.pfedmb.figure3

Ten clients in five pairs with the same two classes, one alpha for all layers. Writes figure3.png, and, for each seed,
the number of pairs that found each other as table.md, .csv and .json: by the cosine of their two alphas and by their
heaviest branch.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments.papers import Row, Study
from experiments.pfedmb import paper
from pfljax import report
from pfljax.cli import launch, tables
from pfljax.cli.settings import Settings
from pfljax.folder import former
from pfljax.report import pictures
from pfljax.report.draw import draw
from pfljax.report.picture import Axis, colors

VARIANTS = {"alpha": "average by alpha (Eq. 5)", "plain": "plain average (Eq. 6)"}
ALIKE = 0.95  # two alphas with at least this cosine are nearly the same


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, ["pfedmb"], ["0", "1", "2"], "runs/pfedmb-figure3")
    registry.set_default("pfedmb.per_layer", False)


def branch_weights(
    panels: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]], shown: int = 5
) -> Figure:
    """Plots clients' weights of shared branches over rounds: one row per title, clients ordered by group.

    Args:
        panels: By title: rounds (T,), weights (T, K, B), group (K,).
        shown: Number of rounds to show, including the first and the last.
    """
    found = []
    height = 0.0
    for title, (rounds, weights, group) in panels.items():
        order = np.argsort(group, kind="stable")
        shades = colors(group)
        for t in np.unique(np.linspace(0, len(rounds) - 1, shown).round().astype(int)):
            panel = pictures.matrix(
                "weights",
                order,
                shades,
                np.arange(len(order)),
                weights.shape[2],
                values=weights[t][order],
                blocks=group,
            )
            found.append(
                dataclasses.replace(panel, x=Axis("branch"), title=f"{title}, round {rounds[t]}")
            )
        height = max(height, 0.8 + 0.18 * len(order))
    columns = len(found) // len(panels)
    return draw(found, (3.2 * columns, height * len(panels)), columns)


def run(settings: Settings) -> None:
    """The command."""
    if settings.methods != ["pfedmb"]:
        raise settings.error("methods", "accepted: pfedmb")
    if settings.partition != "pairs":
        raise settings.error("partition", "accepted: pairs")
    settings.refuse("pfedmb.averaging", "both are compared")
    study = Study.start(paper.PAPER, settings)
    study.check()
    rows = []
    body = []
    panels = {}
    cell = {}
    for averaging, title in VARIANTS.items():
        cell = study.accuracies(
            Row(title, "pfedmb", {"pfedmb.averaging": averaging}), study.out / averaging
        )
        for trial, accuracy in zip(study.trials, cell["accuracies"], strict=True):
            found = former.read_collaboration(
                study.out / averaging / trial.folder / "collaboration.npz"
            )
            cosines, branches = paper.pairs_of(found["weights"][-1], found["group"])
            panels.setdefault(title, (found["round"], found["weights"], found["group"]))
            entry = {
                "averaging": averaging,
                "seed": trial.seed,
                "cosines": cosines,
                "branches": branches,
            }
            rows.append(entry | {"accuracy": accuracy, "paper": None})
            alike = f"{sum(cosine > ALIKE for cosine in cosines)} of {len(cosines)}"
            body.append(
                [
                    title,
                    trial.folder.removeprefix("seed-"),
                    alike,
                    f"{len(set(branches))}",
                    f"{100 * accuracy:.1f}",
                ]
            )
    report.save(branch_weights(panels), study.out / "figure3.png")
    heads = [
        *(
            "averaging",
            "seed",
            f"pairs with a cosine over {ALIKE}",
            "different branches of most weight",
        ),
        "accuracy, %",
    ]
    title = f"{study.settings.dataset}, {study.settings.num_clients} clients in pairs, after the last round"
    tables.write(title, heads, body, rows, study.out, "figure3.png")
    study.print_differences(Row("pfedmb", "pfedmb", {}), cell)


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
