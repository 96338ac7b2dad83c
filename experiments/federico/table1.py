"""FedeRiCo's Table 1: methods on 2, 3 and 4 label groups, next to the paper's values.

    python -m experiments.federico.table1
    python -m experiments.federico.table1 --data_file=CIFAR10.npz --size=reduced
    python -m experiments.federico.table1 --data_file=CIFAR100.npz --preset=cifar100 --size=paper
    python -m experiments.federico.table1 --data_file=FEATURES.npz --preset=features

The row "federico" is Algorithm 1, "FedeRiCo, literal" is its listing to the letter, and "federico_friends" weighs
models by a rule of ours, for which the paper has no values. The last columns for each number of groups show the mean
lead of FedeRiCo and of FedeRiCoFriends over a method with its 95 % interval over splits, and the number of splits in
which they lead (of seeds, if there is one split). Only FedFomo gives up 20 % of its training data, as in the paper.
"""

from __future__ import annotations

from absl import flags

from experiments.federico import paper
from experiments.papers import Row, Study, Values, percent
from pfljax.api.table import over
from pfljax.cli import launch, tables
from pfljax.cli.settings import Settings
from pfljax.contract.errors import RunError


def define(registry: flags.FlagValues) -> None:
    """Registers the command's flags."""
    methods = [*paper.METHODS, paper.FRIENDS]
    paper.define(registry, methods, "runs/federico-table1", partition="label_groups")


def lead(study: Study, cell: dict, best: dict) -> str:
    """A row's mean lead over a method, with its 95 % interval, and in how many splits (or seeds) it leads."""
    found = study.difference(best, cell)
    units = found.wins + found.ties + found.losses
    return f"{found.text(lambda gain: f'{100 * gain:.1f}')} ({found.wins} of {units})"


def groups_of(settings: Settings) -> tuple[int, ...]:
    """The numbers of label groups: the paper's, or the number on the command line."""
    return (
        (settings.partition_groups,)
        if settings.present("partition_groups")
        else paper.DISTRIBUTIONS
    )


def run(settings: Settings) -> None:
    """The command."""
    study = paper.start(settings)
    values = study.paper.values(study.settings, paper.TABLE1)
    cells: dict[int, dict[str, dict]] = {}
    failed: dict[str, RunError] = {}
    rows = {groups: paper.rows_of(study, partition_groups=groups) for groups in groups_of(settings)}

    def folder(groups, row):
        return study.out / f"D{groups}" / row.folder

    study.check(
        (row, {}, folder(groups, row)) for groups, of_groups in rows.items() for row in of_groups
    )
    for groups, of_groups in rows.items():
        cells[groups] = {}
        for row in of_groups:
            name = row.title
            out = folder(groups, row)
            try:
                cells[groups][name] = paper.accuracies(study, row, out)
            except RunError as error:  # keep the other methods' results
                failed[f"D={groups}, {name}"] = error
                continue
            if name in paper.LEADERS:
                cells[groups][name] |= paper.sharing(study, out)._asdict()
            print(f"D={groups}: {name} done")
        standing = study.standings(cells[groups])
        cells[groups] = {name: cell | standing[name] for name, cell in cells[groups].items()}
        if cells[groups]:
            write(study, values, cells)
    last = study.methods[-1]
    done = [cell for column in cells.values() for cell in column.values()]
    if done:
        study.print_differences(Row(last, last, {}), done[-1])
    if failed:
        raise RunError(
            "not in the table: " + "; ".join(f"{what}: {error}" for what, error in failed.items())
        )


def write(study: Study, values: Values, cells: dict[int, dict[str, dict]]) -> None:
    """Writes the table for the numbers of groups that are done."""
    leaders = [name for name in paper.LEADERS if name in study.methods]
    heads = ["method"]
    for groups in cells:
        heads += [
            f"D={groups}",
            values.head,
            *(f"{paper.LEADERS[leader]} above" for leader in leaders),
        ]
    body = []
    rows = []
    for name, method, _ in paper.rows_of(study):
        line = [name]
        entry = {"method": name}
        for groups, column in cells.items():
            published = values.by_row.get(method, {}).get(groups)
            cell = column.get(name)
            line += [study.shown(cell) if cell else "-", percent(*published) if published else "-"]
            for leader in leaders:
                compared = cell and name != leader and leader in column
                line.append(lead(study, cell, column[leader]) if compared else "")
            entry[f"D{groups}"] = (cell or {}) | {
                "paper": published and [value / 100 for value in published]
            }
        body.append(line)
        rows.append(entry)
    title = f"{study.data}, after {study.settings.rounds} rounds, test accuracy in %, "
    tables.write(title + over(study.trials), heads, body, rows, study.out)
    for groups, column in cells.items():
        for leader in leaders:
            if leader in column:
                within = column[leader]["within"]
                across = column[leader]["across"]
                title = paper.LEADERS[leader]
                print(
                    f"D={groups}: cosine of weights, {title}: {within:.2f} within a group, {across:.2f} across"
                )


COMMAND = launch.Command(__doc__, define, run)

if __name__ == "__main__":
    launch.main(COMMAND)
