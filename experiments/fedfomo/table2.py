"""FedFomo's Tables 2 (CIFAR-10) and 5 (CIFAR-100): 15 clients, by number of latent distributions.

    python -m experiments.fedfomo.table2
    python -m experiments.fedfomo.table2 --data_file=CIFAR10.npz --seeds=0,1,2

EMD is the clients' mean distance from the global distribution, sum_c |p_k(c) - p(c)|: 2 (1 - 1/D) for D clusters of
whole classes. The authors' code counts a client's classes twice, which gives 3 (1 - 1/D). The paper's values are shown
only for runs with 15 clients; for 100 clients, see figure1.
"""

from __future__ import annotations

from absl import flags

from experiments.fedfomo import paper
from experiments.papers import Column, Study
from pfljax.cli import launch
from pfljax.cli.flags import RUNS
from pfljax.cli.parsing import Group
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, [*paper.BASELINES, "fedfomo"], ["0"], "runs/fedfomo-table2")
    Group(RUNS, registry).several(
        "distributions",
        [str(number) for number in paper.DISTRIBUTIONS],
        "numbers of distributions, one per column",
        int,
    )


def run(settings: Settings) -> None:
    """The command."""
    numbers = settings.numbers("distributions", int, sets="partition_groups")
    study = Study.start(paper.PAPER, settings)
    theirs = paper.values(study.settings, paper.TABLE2, targets="own")

    def of_column(number):
        return {title: row[number] for title, row in theirs.by_row.items() if number in row}

    columns = [
        Column(
            f"D={number}, %",
            f"distributions-{number}",
            {"partition_groups": number},
            theirs._replace(by_row=of_column(number)),
        )
        for number in numbers
    ]
    title = f"{study.settings.dataset}, {study.settings.num_clients} clients, test accuracy after the last round"
    study.write_table(title, paper.rows_of(study), columns)
    if theirs.data and theirs.by_row:
        distances = ", ".join(
            f"{value:g} (D={number})" for number, value in paper.EMD[theirs.data].items()
        )
        print(f"The paper's EMD, which counts a client's classes twice: {distances}.")


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
