"""FedeRiCo's Figure 1: a sine curve on successive intervals, personal models and one global model.

    python -m experiments.federico.figure1

It is `python -m experiments.train --dataset=sine`: curve.npz and the page in the run's folder hold the figure.
"""

from __future__ import annotations

from absl import flags

from pfljax.cli import launch, train


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    train.define(registry)
    registry.set_default("dataset", "sine")


COMMAND = launch.Command(__doc__, define, train.run)

if __name__ == "__main__":
    launch.main(COMMAND)
