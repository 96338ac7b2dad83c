"""FedFomo's Figure 3: accuracy against epsilon, and against the number of models downloaded, M.

    python -m experiments.fedfomo.figure3

Writes figure3.png, and the points as table.md, .csv and .json. The paper draws its curves without numbers.
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
    paper.define(registry, ["fedfomo"], ["0", "1", "2"], "runs/fedfomo-figure3")
    add = Group(RUNS, registry)
    add.several("epsilons", ["0", "0.1", "0.3", "0.5", "1"], "probabilities of exploring, left; or none")
    add.several("downloads", ["1", "2", "5", "10"], "values of M, right; or none")


def run(settings: Settings) -> None:
    """The command."""
    epsilons = settings.numbers("epsilons", float, 0, sets="fedfomo.epsilon")
    downloads = settings.numbers("downloads", int, sets="fedfomo.neighbors")
    panels = {
        "epsilon": ("probability of a random model, first round", epsilons),
        "neighbors": ("models downloaded, M", downloads),
    }
    Study.start(paper.PAPER, settings).write_figure("figure3.png", panels)


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
