"""FedEM's Table 7 (Appendix J.5): FedEM in 1 / M of the rounds, which is the others' work and traffic, beside them.

    python -m experiments.fedem.table7 --dataset=synthetic

The paper's figures are those of its Table 2. In the shorter run the rate falls earlier, at 1/2 and 3/4 of its rounds.
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
        raise settings.error("algorithms", "accepted: fedem, and what stands beside it")
    fedem = PAPER.settings_of(study.settings, "fedem")
    rounds = max(1, fedem.rounds // fedem["fedem.components"])
    rows = [row_of(study, name) for name in study.methods]
    write_rows(study, [*rows, row_of(study, "fedem", title=f"fedem, {rounds} rounds", rounds=rounds)])


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
