"""FedeRiCo's Table 1: methods on 2, 3 and 4 label groups, beside the paper's values.

    python -m experiments.federico.table1
    python -m experiments.federico.table1 --data_file=CIFAR10.npz --size=reduced
    python -m experiments.federico.table1 --data_file=CIFAR100.npz --preset=cifar100 --size=paper
    python -m experiments.federico.table1 --data_file=FEATURES.npz --preset=features

The last column of each number of groups says by how much FedeRiCo is above a method, a mean over the runs, and in how
many of them. FedFomo alone gives up 20 % of its training data, as in the paper.
"""

from __future__ import annotations

import numpy as np
from absl import flags

from experiments.federico import paper
from experiments.papers import Row, Study, percent
from pfljax.cli import launch, sweep
from pfljax.cli.settings import Settings


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    paper.define(registry, paper.METHODS, "runs/federico-table1", partition="label_groups")


def lead(cell: dict, best: dict) -> str:
    """By how much FedeRiCo is above a method, and in how many of the runs."""
    gains = 100 * (np.array(best["accuracies"]) - np.array(cell["accuracies"]))
    return f"{gains.mean():+.1f} ({(gains > 0).sum()} of {len(gains)})"


def groups_of(settings: Settings) -> tuple[int, ...]:
    """The numbers of label groups: the paper's, or the one on the command line."""
    return (settings.num_distributions,) if settings.present("num_distributions") else paper.DISTRIBUTIONS


def run(settings: Settings) -> None:
    """The command."""
    study = paper.start(settings)
    values = study.paper.values(study.settings, paper.TABLE1)
    cells: dict[int, dict[str, dict]] = {}
    for groups in groups_of(settings):
        cells[groups] = {}
        for name in study.methods:
            out = study.out / f"D{groups}" / name
            row = Row(name, name, {"num_distributions": groups})
            cells[groups][name] = study.accuracies(row, out)
            if name == "federico":
                cells[groups][name] |= paper.sharing(study, out)._asdict()
            print(f"D={groups}: {name} done")
        write(study, values, cells)
    last = study.methods[-1]
    study.print_differences(Row(last, last, {}), cells[groups_of(settings)[-1]][last])


def write(study: Study, values, cells: dict[int, dict[str, dict]]) -> None:
    """The table of the numbers of groups that are done."""
    heads = ["method"]
    for groups in cells:
        heads += [f"D={groups}", values.head] + ["FedeRiCo above"] * ("federico" in study.methods)
    body, rows = [], []
    for name in study.methods:
        line, entry = [name], {"algorithm": name}
        for groups, column in cells.items():
            published = values.by_row.get(name, {}).get(groups)
            line += [study.shown(column[name]), percent(*published) if published else "-"]
            if "federico" in column:
                line.append("" if name == "federico" else lead(column[name], column["federico"]))
            entry[f"D{groups}"] = column[name] | {"paper": published and [value / 100 for value in published]}
        body.append(line)
        rows.append(entry)
    title = f"{study.data}, after {study.settings.rounds} rounds, test accuracy in %, mean ± std over "
    sweep.write_table(title + sweep.named(study.trials), heads, body, rows, study.out)
    for groups, column in cells.items():
        if "federico" in column:
            within, across = column["federico"]["within"], column["federico"]["across"]
            print(f"D={groups}: cosine of FedeRiCo's weights {within:.2f} within a distribution, {across:.2f} across")


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
