"""FedeRiCo's Table 4: label groups, each spread over all clients by a Dirichlet draw, next to the paper's values.

    python -m experiments.federico.table4
    python -m experiments.federico.table4 --data_file=FEATURES.npz --preset=features --size=paper

Accuracy is weighted by the clients' test examples, as in the paper; its deviation is over clients, not runs.
"""

from __future__ import annotations

from absl import flags

from experiments.federico import paper
from experiments.papers import Row, percent
from pfljax.cli import launch, sweep
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, paper.METHODS, "runs/federico-table4")


def run(settings: Settings) -> None:
    """The command."""
    settings.refuse("partition", "the table uses label_dirichlet")
    study = paper.start(settings)
    values = study.paper.values(study.settings, paper.TABLE4, standing="features")
    rows, body = [], []
    row_of = lambda name: Row(name, name, {"partition": "label_dirichlet"})
    study.check((row_of(name), {}, study.out / name) for name in study.methods)
    for name in study.methods:
        cell = paper.accuracies(study, row_of(name), study.out / name)
        published = values.by_row.get(name)
        rows.append({"algorithm": name, **cell, "paper": published and [value / 100 for value in published]})
        shown = percent(100 * cell["accuracy_mean"], 100 * cell["std_over_clients"])
        body.append([name, shown, percent(*published) if published else "-"])
        print(f"{name} done")
    own = study.settings
    title = f"{study.data}, {own.num_distributions} groups of labels, Dirichlet {own.dirichlet_alpha:g}, after "
    title += f"{own.rounds} rounds, {sweep.named(study.trials)}"
    sweep.write_table(title, ["method", "test accuracy, % ± std over clients", values.head], body, rows, study.out)
    last = study.methods[-1]
    study.print_differences(Row(last, last, {}), rows[-1])


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
