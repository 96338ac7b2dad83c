"""FedEM's Appendix J.6: accuracy against client sampling for FedEM, FedAvg+ and APFL.

    python -m experiments.fedem.appendix_j6 --dataset=synthetic

This is the left panel of Figure 1 with one more method. APFL runs with FedAvg's settings.
"""

from __future__ import annotations

from absl import flags

from experiments.fedem.figure1 import point, write_points
from experiments.fedem.paper import PAPER, SEEDS, start
from pfljax.cli import launch
from pfljax.cli.flags import RUNS
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    methods = ["fedem", "fedavg_plus", "apfl"]
    options = {"rounds": 200, "dataset": "synthetic", "test_examples": 1000}
    PAPER.define(registry, methods, SEEDS, "runs/fedem-appendix-j6", **options)
    Group(RUNS, registry).several(
        "participations", ["0.1", "0.2", "0.5", "1.0"], "sampling rates", float, above=0, at_most=1
    )


def run(settings: Settings) -> None:
    """The command."""
    participations = settings.numbers("participations", float, sets="participation")
    study = start(settings)
    points = [
        point(study, name, "participation", value)
        for name in study.methods
        for value in participations
    ]
    write_points(study, points, "sampling.png")


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
