"""FedeRiCo's Figures 3 and 9: each client's weights over rounds, by the true distribution of the models' owners.

python -m experiments.federico.figure3
python -m experiments.federico.figure3 --data_file=CIFAR100.npz --preset=cifar100
python -m experiments.federico.figure3 --splits=1,2,3                             (Figure 9: other splits)
"""

from __future__ import annotations

from absl import flags

from experiments.federico import paper
from experiments.federico.paper import Line
from pfljax.cli import launch
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, ["federico"], "runs/federico-figure3")


def run(settings: Settings) -> None:
    """The command."""
    paper.refuse_methods(settings, "federico")
    lines = [Line("federico", "federico", {})]
    paper.write_weights(paper.start(settings, **paper.ONE_RUN), "figure3", lines, "who shares models")


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
