"""Compares readings of details that FedeRiCo's paper leaves open, on splits that the tables do not report.

    python -m experiments.federico.readings
    python -m experiments.federico.readings --data_file=CIFAR10.npz --size=reduced

For 2, 3 and 4 label groups, it shows the accuracy, the gain over Local, the number of runs more than a point below
Local, and the similarity of the clients' weights within and across groups. "default" is Algorithm 1, "literal" its
listing to the letter, and "friends" FedeRiCoFriends, which the other rows vary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from absl import flags

from experiments.federico import paper
from experiments.papers import Row
from pfljax.api import table
from pfljax.cli import launch, tables
from pfljax.cli.settings import Settings
from pfljax.evaluation import rounding

GROUPS = (2, 3, 4)
# not the tables' splits, so that the choice does not depend on them
SPLITS = ["5", "6", "7", "8", "9"]
# by title: the method, and the flags that it sets
READINGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "default": ("federico", {}),
    "literal": ("federico", paper.TO_THE_LETTER),
    "friends": (paper.FRIENDS, {}),
    "without-references": (paper.FRIENDS, {"federico_friends.references": False}),
    "without-classes": (paper.FRIENDS, {"federico_friends.by_class": False}),
    "without-weights": (paper.FRIENDS, {"federico_friends.by_example": False}),
    "without-temperatures": (paper.FRIENDS, {"federico_friends.temperatures": False}),
    "uniform-sampling": (paper.FRIENDS, {"federico_friends.epsilon": 1.0}),
    "all-neighbors": (paper.FRIENDS, {"federico_friends.neighbors": 7}),
    "common-init": (paper.FRIENDS, {"common_init": True}),
}


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, ["federico"], "runs/federico-readings")


def run(settings: Settings) -> None:
    """The command."""
    paper.refuse_methods(settings, "federico")
    settings.refuse("partition_groups", "they are 2, 3 and 4")
    study = paper.start(settings, splits=SPLITS)
    study.check()
    rows = []
    body = []
    for groups in GROUPS:
        varied = {"partition_groups": groups}
        local = paper.accuracies(
            study, Row("local", "local", varied), study.out / f"D{groups}" / "local"
        )
        for title, (method, hyperparameters) in READINGS.items():
            out = study.out / f"D{groups}" / title
            cell = paper.accuracies(study, Row(title, method, {**varied, **hyperparameters}), out)
            gains = 100 * rounding.subtract(cell["accuracies"], local["accuracies"])
            errors = 100 * rounding.error_of(cell["accuracies"], local["accuracies"])
            found = paper.sharing(study, out)
            rows.append(
                {
                    "groups": groups,
                    "reading": title,
                    "gains": gains.tolist(),
                    **cell,
                    **found._asdict(),
                }
            )
            line = [str(groups), title, study.shown(cell), f"{gains.mean():+.1f}"]
            line += [
                f"{(gains < -1 - errors).sum()} of {len(gains)}",
                f"{found.within:.2f}",
                f"{found.across:.2f}",
            ]
            body.append(line)
            print(f"D={groups}: {title} done")
    heads = [
        "groups",
        "reading",
        "test accuracy, %",
        "over Local",
        "runs more than 1 below",
        "cosine within",
        "across",
    ]
    tables.write(f"{study.data}, {table.named(study.trials)}", heads, body, rows, study.out)


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
