"""FedeRiCo's Table 4: label groups, each spread over all clients by a Dirichlet draw, beside the paper's values.

    python -m experiments.federico.table4
    python -m experiments.federico.table4 --data_file=FEATURES.npz --preset=features --size=paper

Accuracy is weighted by the clients' test examples, as in the paper; its deviation is over clients and not over runs.
"""

from __future__ import annotations

from absl import flags

from experiments.federico import paper
from experiments.papers import Column, Row
from pfljax.cli import launch
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, paper.METHODS, "runs/federico-table4")


def run(settings: Settings) -> None:
    """The command."""
    settings.refuse("partition", "the table is of label_dirichlet")
    study = paper.start(settings)
    values = study.paper.values(study.settings, paper.TABLE4, standing="features")
    own = study.settings
    title = f"{study.data}, {own.num_distributions} groups of labels, Dirichlet {own.dirichlet_alpha:g}"
    column = Column("test accuracy, %", "dirichlet", {"partition": "label_dirichlet"}, values)
    study.write_table(f"{title}, after {own.rounds} rounds", [Row(name, name, {}) for name in study.methods], [column])


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
