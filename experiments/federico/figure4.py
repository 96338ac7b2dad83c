"""FedeRiCo's Figure 4: each client's weights of FedEM's four components over rounds, on the data of Figure 3.

python -m experiments.federico.figure4
python -m experiments.federico.figure4 --data_file=CIFAR100.npz --preset=cifar100
"""

from __future__ import annotations

from absl import flags

from experiments.federico import paper
from experiments.federico.paper import Line
from pfljax.cli import launch
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, ["fedem"], "runs/federico-figure4")


def run(settings: Settings) -> None:
    """The command."""
    paper.refuse_methods(settings, "fedem")
    lines = [Line("fedem", "fedem", {})]
    paper.write_weights(paper.start(settings, **paper.ONE_RUN), "figure4", lines, "who shares FedEM's components")


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
