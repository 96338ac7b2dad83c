"""FedeRiCo's Table 4: label groups, each spread over all clients by a Dirichlet draw, next to the paper's values.

    python -m experiments.federico.table4
    python -m experiments.federico.table4 --data_file=FEATURES.npz --preset=features --size=paper

Accuracy is weighted by the clients' test examples, as in the paper. The deviation is over the clients of a run, whose
population it describes (ddof = 0), not over runs. The row "federico" is Algorithm 1, "FedeRiCo, literal" is its listing
to the letter, and "federico_friends" weighs models by a rule of ours, for which the paper has no values.
"""

from __future__ import annotations

from absl import flags

from experiments.federico import paper
from experiments.papers import Row
from pfljax.api import table
from pfljax.cli import launch, tables
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, [*paper.METHODS, paper.FRIENDS], "runs/federico-table4")


def run(settings: Settings) -> None:
    """The command."""
    settings.refuse("partition", "the table uses label_dirichlet")
    study = paper.start(settings)
    values = study.paper.values(study.settings, paper.TABLE4, standing="features")
    rows = []
    body = []
    asked = paper.rows_of(study, partition="label_dirichlet")
    study.check((row, {}, study.out / row.folder) for row in asked)
    for row in asked:
        name = row.title
        cell = paper.accuracies(study, row, study.out / row.folder)
        published = values.by_row.get(row.method)
        rows.append(
            {"method": name, **cell, "paper": published and [value / 100 for value in published]}
        )
        ours = [f"{100 * cell[key]:.1f}" for key in ("accuracy_mean", "std_over_clients")]
        body.append(
            [name, *ours, *([f"{value:.1f}" for value in published] if published else ["-", "-"])]
        )
        print(f"{name} done")
    own = study.settings
    title = f"{study.data}, {own.partition_groups} groups of labels, Dirichlet {own.partition_alpha:g}, after "
    title += f"{own.rounds} rounds, {table.named(study.trials)}"
    heads = [
        "method",
        "test accuracy, %",
        "deviation over clients",
        values.head,
        "deviation over clients",
    ]
    tables.write(title, heads, body, rows, study.out)
    last = study.methods[-1]
    study.print_differences(Row(last, last, {}), rows[-1])


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
