"""FedeRiCo's Figures 5 and 8: weights over rounds by accumulated losses and by their moving average.

    python -m experiments.federico.figure5
    python -m experiments.federico.figure5 --data_file=CIFAR10.npz

Accumulated losses come with uniform sampling, as in the paper (its footnote 5), and both with two label groups.
"""

from __future__ import annotations

from absl import flags

from experiments.federico import paper
from experiments.federico.paper import Line
from pfljax.cli import launch
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, ["federico"], "runs/federico-figure5")


def run(settings: Settings) -> None:
    """The command."""
    paper.refuse_methods(settings, "federico")
    for knob in ("tracking", "epsilon"):
        settings.refuse(f"federico.{knob}", "it is what the figure varies")
    lines = [
        Line("accumulated", "federico", {"federico.tracking": "accumulated", "federico.epsilon": 1.0}),
        Line("moving-average", "federico", {}),
    ]
    study = paper.start(settings, **paper.ONE_RUN, num_distributions=2)
    paper.write_weights(study, "figure5", lines, "accumulated losses and their moving average")


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
