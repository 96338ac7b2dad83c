"""FedeRiCo's Figure 7: each client's weights over rounds by beta, the weight of the newest loss.

python -m experiments.federico.figure7
python -m experiments.federico.figure7 --data_file=FEATURES.npz --preset=features
"""

from __future__ import annotations

from absl import flags

from experiments.federico import paper
from experiments.federico.paper import Line
from pfljax.cli import launch
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, ["federico"], "runs/federico-figure7")


def run(settings: Settings) -> None:
    """The command."""
    paper.refuse_methods(settings, "federico")
    settings.refuse("federico.beta", "it is what the figure varies")
    lines = [Line(f"beta-{beta:g}", "federico", {"federico.beta": beta}) for beta in (0.1, 0.3, 0.6, 0.9)]
    paper.write_weights(paper.start(settings, **paper.ONE_RUN), "figure7", lines, "weights by beta")


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
