"""Tables and figures that repeat a paper's: our values beside its own, and in which ways the two differ."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import flags

from experiments import common, sweeps
from pfljax import report
from pfljax.core.types import UsageError

FLAGS = flags.FLAGS
NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}


class Row(NamedTuple):
    """A row of a table: its title, its method, and flags that it sets."""

    title: str
    method: str
    flags: dict


class Values(NamedTuple):
    """A paper's values by row, and on which data."""

    data: str
    by_row: dict

    @property
    def head(self) -> str:
        """The heading of their column."""
        return f"paper, {NAMES[self.data]}" if self.by_row else "paper"


class Column(NamedTuple):
    """A column of a table: its title, its folder, flags that it sets, and the paper's values."""

    title: str
    folder: str
    flags: dict
    paper: Values


class Study(NamedTuple):
    """A paper's experiments.

    Attributes:
        paper: Its data sets, and where its settings are.
        said: What its setting was, in a sentence, for the end of a table.
    """

    paper: sweeps.Paper
    said: str

    def values(self, table: dict, standing: str = "cifar10") -> Values:
        """The part of a table for this data set; for digits another's, to compare with; for others nothing."""
        name = standing if self.paper.name() == "digits" else self.paper.name()
        return Values(name, table.get(name, {}))

    def define_flags(self, methods: Sequence[str], seeds: Sequence[str], out: str, rounds: int, **defaults) -> None:
        """The flags of these experiments, on digits by default, with the paper's `rounds` and other defaults."""
        common.define_data_flags("digits")
        common.define_training_flags(rounds)
        common.define_device_flags()
        self.paper.define_flag()
        sweeps.define_sweep_flags(methods, seeds, out)
        for name, value in defaults.items():
            FLAGS.set_default(name, value)

    def set_up(self) -> tuple[list[str], list[int], Path]:
        """The methods that --algorithms names, the seeds, and the folder."""
        if FLAGS.data_file and not FLAGS["dataset"].present:
            FLAGS.dataset = "npz"
        names, seeds = sweeps.method_names(), sweeps.seed_numbers()
        common.set_defaults(names)
        self.paper.name()  # complains of one that there is not
        return names, seeds, Path(FLAGS.out)

    @contextlib.contextmanager
    def settings_of(self, row: Row, **values):
        """The preset's settings for a row's method, the row's own and `values`."""
        with self.paper.settings_of(row.method), sweeps.settings(**row.flags, **values):
            yield

    def accuracies(self, row: Row, seeds: Sequence[int], out: Path, **values) -> dict:
        """A row's runs on all seeds under its settings and `values`: accuracy, and what else a table shows."""
        with self.settings_of(row, **values):
            summaries = sweeps.cells(row.method, seeds, out)
        accuracy = [summary["last"]["accuracy_mean"] for summary in summaries]
        privacy = [summary["privacy"] or {} for summary in summaries]
        return {
            "accuracy_mean": float(np.mean(accuracy)),
            "accuracy_std": float(np.std(accuracy)),
            "accuracies": accuracy,
            "earth_movers_distance": summaries[0]["earth_movers_distance"],
            "learning_rate": sweeps.rate_of(out / f"seed-{seeds[0]}"),
            "parameters": summaries[0]["parameters"],
            "epsilon": [ledger.get("epsilon") for ledger in privacy],
            "unaccounted": privacy[0].get("unaccounted"),
        }

    def write_table(self, title: str, rows: list[Row], columns: list[Column], seeds: list[int], out: Path) -> None:
        """Runs all cells of a table and writes it, the paper's values beside ours."""
        entries, body, distances = [], [], {}
        for number, row in enumerate(rows, 1):
            entry, line = {"algorithm": row.title}, [row.title]
            for column in columns:
                cell = self.accuracies(row, seeds, out / column.folder / folder(row), **column.flags)
                distances[column.title] = cell["earth_movers_distance"]
                paper = as_pair(column.paper.by_row.get(row.title))
                entry[column.folder] = cell | {"paper": None if paper is None else [v and v / 100 for v in paper]}
                line += [shown(cell, seeds), "-" if paper is None else percent(*paper)]
            entries.append(entry)
            body.append(line)
            print(f"{number} of {len(rows)} rows done: {row.title}")
        heads = ["method"]
        for column in columns:
            distance = distances[column.title]
            heads += [column.title + ("" if distance is None else f" (EMD {distance:.2f})"), column.paper.head]
        sweeps.write_table(title, heads, body, entries, out)
        self.print_differences(rows[0], entries[0][columns[0].folder])

    def write_figure(self, name: str, panels: dict[str, tuple[str, list]]) -> None:
        """Draws accuracy against knobs and writes the points.

        Args:
            name: The figure's file.
            panels: By flag (of a method's own without its prefix): the axis' label, and the values.
        """
        if not any(values for _, values in panels.values()):
            raise UsageError("nothing to draw: accepted: values in one of the lists")
        names, seeds, out = self.set_up()
        points, body = [], []
        for method in names:
            for knob, (_, values) in panels.items():
                for value in values:
                    own = f"{method}__{knob}" if f"{method}.{knob}" in FLAGS else knob
                    row = Row(method, method, {own: value})
                    cell = self.accuracies(row, seeds, out / f"{method}-{knob}-{value:g}")
                    points.append({"panel": knob, "algorithm": method, "value": value, "paper": None, **cell})
                    points[-1]["accuracy"] = cell["accuracy_mean"]
                    body.append([knob, method, f"{value:g}", shown(cell, seeds)])
        report.save(report.sweep_figure(points, {knob: label for knob, (label, _) in panels.items()}), out / name)
        title = f"{FLAGS.dataset}, {FLAGS.num_distributions} distributions, test accuracy after the last round"
        sweeps.write_table(title, ["knob", "method", "value", "test accuracy, %"], body, points, out, name)
        self.print_differences(Row(names[0], names[0], {}), points[0])

    def print_differences(self, row: Row, cell: dict) -> None:
        """In which ways this differs from the paper, for the end of a table."""
        with self.settings_of(row):
            sizes = f"at most {FLAGS.train_examples} examples a client" if FLAGS.train_examples else "all examples"
            here = f"{FLAGS.dataset}, {sizes}, --model={FLAGS.model} of {cell['parameters']:,} parameters"
            here += f", {FLAGS.rounds} rounds, {FLAGS.optimizer} at rate {FLAGS.learning_rate:g}"
            here += f", batches of {FLAGS.batch_size}" if FLAGS.batch_size else ", full batches"
        end = "Initial models, batches and splits are our own."
        if self.paper.name() == "digits":
            end = "Its values stand here for orientation, not to be met."
        elif self.paper.name() is None:
            end = "It has no values for this data set."
        print(f"Here: {here}. The paper: {self.said}. {end}")


def folder(row: Row) -> str:
    """The row's folder."""
    return row.title.replace(", n=", "-n").replace(", ", "-").replace(" ", "-")


def as_pair(value: float | tuple | None) -> tuple[float, float | None] | None:
    """A paper's value as (mean, deviation), None for a deviation that it does not give."""
    return value if value is None or isinstance(value, tuple) else (value, None)


def percent(mean: float, deviation: float | None) -> str:
    """Percents, such as 85.1 ± 0.1; without a deviation (a single seed) 85.1."""
    return f"{mean:.1f}" if deviation is None else f"{mean:.1f} ± {deviation:.1f}"


def shown(cell: dict, seeds: Sequence[int]) -> str:
    """A cell of a table."""
    return percent(100 * cell["accuracy_mean"], 100 * cell["accuracy_std"] if len(seeds) > 1 else None)
