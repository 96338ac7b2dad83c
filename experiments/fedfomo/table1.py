"""FedFomo's Table 1: two classes per client, with 15 and 100 clients, next to the paper's values.

    python -m experiments.fedfomo.table1
    python -m experiments.fedfomo.table1 --data_file=CIFAR10.npz --seeds=0,1,2

With 100 clients, a tenth takes part in each round, for five times as many rounds. Digits, with only 1,797 images for
so many clients, is shown next to the paper's values for MNIST.
"""

from __future__ import annotations

from absl import flags

from experiments.fedfomo import paper
from experiments.papers import Column, Study
from pfljax.cli import launch
from pfljax.cli.flags import RUNS
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    methods = [*paper.BASELINES, "fedfomo"]
    paper.define(registry, methods, ["0"], "runs/fedfomo-table1", partition="pathological")
    Group(RUNS, registry).several(
        "clients",
        ["15", "100"],
        "numbers of clients, one column each; above 15, a tenth takes part in each round",
        int,
    )


def run(settings: Settings) -> None:
    """The command."""
    settings.refuse("participation", "the table's columns set it")
    numbers = settings.numbers("clients", int, sets="num_clients")
    study = Study.start(paper.PAPER, settings)
    rows = paper.rows_of(study)
    setting = {"partition": "pathological", "partition_classes": 2, "targets": "own"}
    theirs = paper.values(study.settings, paper.TABLE1, "mnist", **setting)
    rounds = study.settings_of(rows[0]).rounds
    columns = []
    for number in numbers:
        many = number > 15
        own = {
            "num_clients": number,
            "participation": 0.1 if many else 1.0,
            "rounds": rounds * (5 if many else 1),
        }
        place = {15: 0, 100: 1}.get(number)
        values = (
            {} if place is None else {title: both[place] for title, both in theirs.by_row.items()}
        )
        columns.append(
            Column(f"{number} clients, %", f"clients-{number}", own, theirs._replace(by_row=values))
        )
    study.write_table(
        f"{study.settings.dataset}, two classes a client, test accuracy after the last round",
        rows,
        columns,
    )


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
