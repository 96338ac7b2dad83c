"""FedFomo's Figure 1: accuracy of 100 clients against the number of latent distributions, one line per method.

    python -m experiments.fedfomo.figure1
    python -m experiments.fedfomo.figure1 --data_file=CIFAR10.npz --methods=all --seeds=0,1,2

A tenth of the clients takes part in each round, for five times as many rounds as with 15 clients. Writes figure1.png,
and the points as table.md, .csv and .json. The paper draws its lines without numbers.
"""

from __future__ import annotations

from absl import flags

from experiments.fedfomo import paper
from experiments.papers import Study
from pfljax.cli import launch
from pfljax.cli.flags import RUNS
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings

METHODS = ("local", "fedavg", "lg_fedavg", "clustered", "per_fedavg", "fedfomo")


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(
        registry, METHODS, ["0"], "runs/fedfomo-figure1", num_clients=100, participation=0.1
    )
    Group(RUNS, registry).several(
        "distributions",
        [str(number) for number in paper.DISTRIBUTIONS],
        "numbers of distributions",
        int,
    )


def run(settings: Settings) -> None:
    """The command."""
    numbers = settings.numbers("distributions", int, sets="partition_groups")
    study = Study.start(paper.PAPER, settings)
    rows = paper.rows_of(study)
    if not settings.present("rounds"):
        more = {"rounds": 5 * study.settings_of(rows[0]).rounds}
        rows = [row._replace(flags={**row.flags, **more}) for row in rows]
    own = study.settings
    title = f"{own.dataset}, {own.num_clients} clients, {own.participation:.0%} of them a round"
    panels = {"partition_groups": ("number of latent distributions D", numbers)}
    study.write_figure("figure1.png", panels, rows, title)


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
