"""FedeRiCo's Figure 10: test accuracy against the number of local epochs.

    python -m experiments.federico.figure10
    python -m experiments.federico.figure10 --data_file=CIFAR10.npz

Clients send back the change after their local epochs (--federico.update=delta), not a gradient per step.
"""

from __future__ import annotations

from absl import flags

from experiments.federico import paper
from pfljax.cli import launch
from pfljax.cli.settings import Settings

EPOCHS = (1, 2, 5, 10)


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, ["federico"], "runs/federico-figure10", **{"federico.update": "delta"})


def run(settings: Settings) -> None:
    """The command."""
    paper.refuse_methods(settings, "federico")
    settings.refuse("epochs", "the figure varies it")
    paper.start(settings).write_figure("figure10.png", {"epochs": ("local epochs", list(EPOCHS))})


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
