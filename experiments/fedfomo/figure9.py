"""FedFomo's Figure 9: accuracy against the share of a client's examples that is for validation.

    python -m experiments.fedfomo.figure9

Writes figure9.png, and the points as table.md, .csv and .json. The paper draws its points without numbers. Its
first share, 0.01, is less than an example of digits.
"""

from __future__ import annotations

from absl import flags

from experiments.fedfomo import paper
from experiments.papers import Study
from pfljax.cli import launch
from pfljax.cli.flags import RUNS, Group
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, ["fedfomo"], ["0", "1", "2"], "runs/fedfomo-figure9")
    Group(RUNS, registry).several(
        "shares", ["0.05", "0.1", "0.2", "0.4", "0.6", "0.8", "0.9"], "shares of the examples to validate on"
    )


def run(settings: Settings) -> None:
    """The command."""
    shares = settings.numbers("shares", float, below=1, sets="validation_fraction")
    panels = {"validation_fraction": ("share of a client's examples for validation", shares)}
    Study.start(paper.PAPER, settings).write_figure("figure9.png", panels)


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
