"""pFedMB's Table 2: two classes per client, or Dirichlet shares of each class, with 15 and 50 clients.

    python -m experiments.pfedmb.table2
    python -m experiments.pfedmb.table2 --tune --tune_hyperparameters
    python -m experiments.pfedmb.table2 --data_file=CIFAR10.npz

With 50 clients, a fifth takes part in each round. The paper does not state its Dirichlet concentration; 0.5 is that of
the studies it follows. Every method is fine-tuned for five epochs before it is scored.
"""

from __future__ import annotations

from absl import flags

from experiments.papers import Column, Row, Study
from experiments.pfedmb import paper
from pfljax.cli import launch
from pfljax.cli.flags import RUNS
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings

METHODS = ("local", "fedavg", "fedprox", "fedper", "pfedme", "ifca", "fedfomo", "fedamp", "pfedmb")
PARTITIONS = {"pathological": "two classes", "dirichlet": "Dirichlet"}


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, METHODS, ["0", "1", "2"], "runs/pfedmb-table2")
    Group(RUNS, registry).several(
        "clients",
        ["15", "50"],
        "numbers of clients, for both partitions; above 15, a fifth takes part per round",
        int,
    )


def run(settings: Settings) -> None:
    """The command."""
    for flag in ("partition", "participation"):
        settings.refuse(flag, "the table's columns set it")
    numbers = settings.numbers("clients", int, sets="num_clients")
    study = Study.start(paper.PAPER, settings)
    theirs = paper.PAPER.values(study.settings, paper.TABLE2)
    columns = []
    for first, (partition, label) in zip((0, 2), PARTITIONS.items(), strict=True):
        for number in numbers:
            place = {15: first, 50: first + 1}.get(number)
            values = (
                {} if place is None else {name: row[place] for name, row in theirs.by_row.items()}
            )
            own = {
                "partition": partition,
                "num_clients": number,
                "participation": 0.2 if number > 15 else 1.0,
            }
            title = f"{label}, {number}, %"
            folder = f"{partition}-{number}"
            columns.append(Column(title, folder, own, theirs._replace(by_row=values)))
    title = f"{study.settings.dataset}, test accuracy after the last round and fine-tuning"
    study.write_table(title, [Row(name, name, {}) for name in study.methods], columns)


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
