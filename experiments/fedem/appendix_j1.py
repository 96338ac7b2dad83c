"""FedEM's Appendix J.1: D-FedEM, without a server, compared with FedEM and FedAvg.

    python -m experiments.fedem.appendix_j1 --dataset=synthetic

Clients communicate over a random graph with edge probability 0.5, as in the paper. The paper mixes with the fastest
matrix, which is --dfedem.mixing=fastest here (a minute or more for 300 clients; needs pip install 'pfljax[mixing]').
D-FedEM runs with FedEM's settings. The paper's values are those in its Table 2.
"""

from __future__ import annotations

from absl import flags

from experiments.fedem.paper import PAPER, SEEDS, row_of, start, write_rows
from pfljax.cli import launch
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    methods = ["fedavg", "fedem", "dfedem"]
    PAPER.define(
        registry, methods, SEEDS, "runs/fedem-appendix-j1", rounds=200, dataset="synthetic"
    )


def run(settings: Settings) -> None:
    """The command."""
    study = start(settings)
    write_rows(study, [row_of(study, name) for name in study.methods])


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
