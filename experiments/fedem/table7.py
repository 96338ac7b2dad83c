"""FedEM's Table 7 (Appendix J.5): FedEM with 1 / M of the rounds, so that its work and traffic match the others'.

    python -m experiments.fedem.table7 --dataset=synthetic

The paper's values are those in its Table 2. The shorter run lowers the rate earlier, at 1/2 and 3/4 of its rounds.
"""

from __future__ import annotations

from absl import flags

from experiments.fedem.paper import METHODS, PAPER, SEEDS, row_of, start, write_rows
from pfljax.cli import launch
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    PAPER.define(registry, METHODS, SEEDS, "runs/fedem-table7", rounds=200, dataset="synthetic")


def run(settings: Settings) -> None:
    """The command."""
    study = start(settings)
    if "fedem" not in study.methods:
        raise settings.error("methods", "accepted: fedem and the methods to compare it with")
    fedem = PAPER.settings_of(study.settings, "fedem")
    rounds = max(1, fedem.rounds // fedem["fedem.components"])
    rows = [row_of(study, name) for name in study.methods]
    write_rows(
        study, [*rows, row_of(study, "fedem", title=f"fedem, {rounds} rounds", rounds=rounds)]
    )


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
