"""pFedMB's Table 1: ten clients in five pairs with the same two classes, next to the paper's values.

    python -m experiments.pfedmb.table1
    python -m experiments.pfedmb.table1 --data_file=CIFAR10.npz

One alpha for all layers and five branches, as in Section 5.2; every method is fine-tuned for five epochs before it is
scored.
"""

from __future__ import annotations

from absl import flags

from experiments.papers import Column, Row, Study
from experiments.pfedmb import paper
from pfljax.cli import launch
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, ["local", "fedavg", "pfedmb"], ["0", "1", "2"], "runs/pfedmb-table1")
    registry.set_default("pfedmb.per_layer", False)


def run(settings: Settings) -> None:
    """The command."""
    study = Study.start(paper.PAPER, settings)
    rows = []
    for name in study.methods:
        if name == "pfedmb" and not settings.present("pfedmb.averaging"):
            rows.append(Row(paper.WITHOUT, name, {"pfedmb.averaging": "plain"}))
        rows.append(Row(name, name, {}))
    own = study.settings
    column = Column("test accuracy, %", own.partition, {}, paper.PAPER.values(own, paper.TABLE1))
    title = (
        f"{own.dataset}, {own.num_clients} clients in pairs, after the last round and fine-tuning"
    )
    study.write_table(title, rows, [column])


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
