"""FedEM's Table 2: test accuracy of several methods, average over clients and bottom decile, next to the paper's.

    python -m experiments.fedem.table2 --dataset=synthetic

Averages are weighted by the clients' test examples. --synthetic_labels=published is the data that the authors
published, with their model; the title states the labels and the number of parameters. --tune=0.01,0.03,0.1 finds each
method's rate on a validation split first; without it, rates come from experiments/fedem/presets.
"""

from __future__ import annotations

from absl import flags

from experiments.fedem.paper import METHODS, PAPER, SEEDS, row_of, start, write_rows
from pfljax.cli import launch
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    PAPER.define(registry, METHODS, SEEDS, "runs/fedem-table2", rounds=200, dataset="synthetic")


def run(settings: Settings) -> None:
    """The command."""
    study = start(settings)
    write_rows(study, [row_of(study, name) for name in study.methods])


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
