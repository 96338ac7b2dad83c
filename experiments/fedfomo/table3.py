"""FedFomo's Table 3: out-of-local-distribution targets, next to the paper's values.

    python -m experiments.fedfomo.table3
    python -m experiments.fedfomo.table3 --data_file=CIFAR10.npz --seeds=0,1,2,3,4

The clients' (validation, test) pairs are permuted among them, separately for each seed.
"""

from __future__ import annotations

from absl import flags

from experiments.fedfomo import paper
from experiments.papers import Column, Study
from pfljax.cli import launch
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    methods = [*paper.BASELINES, "fedfomo"]
    paper.define(registry, methods, ["0", "1", "2"], "runs/fedfomo-table3", targets="shuffled")


def run(settings: Settings) -> None:
    """The command."""
    study = Study.start(paper.PAPER, settings)
    own = study.settings
    theirs = paper.values(own, paper.TABLE3, partition_groups=5, targets="shuffled")
    column = Column("test accuracy, %", own.targets, {}, theirs)
    title = (
        f"{own.dataset}, {own.partition_groups} groups, {own.targets} targets, after the last round"
    )
    study.write_table(title, paper.rows_of(study), [column])


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
