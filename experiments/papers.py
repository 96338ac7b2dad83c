"""Reproduces tables and figures of papers: our values next to the paper's, and how the setups differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments.figures import sweep_figure
from pfljax import report
from pfljax.cli import build, tables
from pfljax.cli.flags import (
    RUNS,
    define_data,
    define_devices,
    define_evaluation,
    define_sweep,
    define_training,
)
from pfljax.cli.parsing import Group
from pfljax.cli.settings import FlagError, Settings
from pfljax.evaluation import statistics
from pfljax.folder import files
from pfljax.report import terms
from pfljax.report.run_data import over_rounds

NAMES = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "features": "Office-Home",
}


def rate_of(out: Path) -> float:
    """Returns the learning rate of a finished cell."""
    return files.read_json(out / "config.json")["flags"]["learning_rate"]


def mean_over(summaries: Sequence[dict], read: Callable[[dict], float]) -> float:
    """Returns the mean of a number over runs."""
    return float(np.mean([read(summary) for summary in summaries]))


class Row(NamedTuple):
    """A row of a table: its title, its method, and the flags that it sets."""

    title: str
    method: str
    flags: Mapping[str, Any]

    @property
    def folder(self) -> str:
        """The row's folder."""
        return self.title.replace(", n=", "-n").replace(", ", "-").replace(" ", "-")


class Values(NamedTuple):
    """A paper's values by row, and their data set."""

    data: str | None
    by_row: Mapping[str, Any]

    @property
    def head(self) -> str:
        """The heading of their column."""
        return f"paper, {NAMES[self.data]}" if self.data and self.by_row else "paper"


class Column(NamedTuple):
    """A column of a table: its title, its folder, the flags that it sets, and the paper's values."""

    title: str
    folder: str
    flags: Mapping[str, Any]
    paper: Values


class Paper(NamedTuple):
    """A paper to reproduce, with settings for each of its data sets.

    Attributes:
        presets: Folder of its settings: NAME.flags for a data set, NAME-METHOD.flags for a method on it.
        names: Its data sets.
        of_dataset: --dataset -> name of the paper's data set.
        said: Its setup in a sentence, for the end of a table.
    """

    presets: Path
    names: tuple[str, ...]
    of_dataset: Mapping[str, str]
    said: str = ""

    def define(
        self,
        registry: flags.FlagValues,
        methods: Sequence[str],
        seeds: Sequence[str],
        out: str,
        *,
        rounds: int,
        dataset: str = "digits",
        **defaults: Any,
    ) -> None:
        """Registers the flags of these experiments, with the paper's `rounds` and other defaults."""
        define_sweep(registry, methods, seeds, out)
        define_training(registry, rounds)
        define_data(registry, dataset)
        define_devices(registry)
        define_evaluation(registry)
        known = f"settings for one of the paper's data sets: {', '.join(self.names)}; by --dataset if not given"
        Group(RUNS, registry).add("preset", str, None, known)
        for name, value in defaults.items():
            registry.set_default(name, value)

    def name(self, settings: Settings) -> str | None:
        """The paper's name for the data set, or None for the user's own data.

        Raises:
            FlagError: for an unknown preset.
        """
        if settings.preset is not None and settings.preset not in self.names:
            raise settings.error("preset", f"accepted: {', '.join(self.names)}")
        return settings.preset or self.of_dataset.get(settings.dataset)

    def settings_of(self, settings: Settings, method: str) -> Settings:
        """Settings for a method; flags on the command line override them."""
        return self.common(settings).with_preset(
            self.presets / f"{self.name(settings)}-{method}.flags"
        )

    def common(self, settings: Settings) -> Settings:
        """Settings shared by all methods; flags on the command line override them."""
        return settings.with_preset(self.presets / f"{self.name(settings)}.flags")

    def values(
        self, settings: Settings, table: Mapping[str, Mapping], standing: str = "cifar10"
    ) -> Values:
        """The part of a table for this data set; for digits, that of `standing`, for comparison; otherwise empty."""
        own = self.name(settings)
        name = standing if own == "digits" else own
        return Values(name, table.get(name, {}) if name else {})


@dataclasses.dataclass(frozen=True)
class Study:
    """One table or figure of a paper, as requested on the command line.

    Attributes:
        paper: The paper.
        settings: Settings, with defaults for the data set.
        methods: The methods in --methods.
        trials: The seeds, or splits and seeds.
        out: The output folder.
    """

    paper: Paper
    settings: Settings
    methods: list[str]
    trials: list[build.Trial]
    out: Path

    @classmethod
    def start(cls, paper: Paper, settings: Settings) -> Study:
        """Reads and checks the settings."""
        if settings.data_file and not settings.present("dataset"):
            settings = settings.replace(dataset="npz")
        methods = build.read_methods(settings)
        settings = settings.with_defaults(methods)
        build.print_defaults(settings)
        settings = paper.common(settings)
        trials = build.trials_of(settings)
        return cls(paper, settings, methods, trials, Path(settings.out))

    @property
    def data(self) -> str:
        """Name of the data set, for titles."""
        return self.paper.name(self.settings) or self.settings.dataset

    def settings_of(self, row: Row, values: Mapping[str, Any] | None = None) -> Settings:
        """The preset's settings for a row's method, updated with the row's own settings and `values`."""
        return self.paper.settings_of(self.settings, row.method).pinned(
            **{**row.flags, **(values or {})}
        )

    def check(self, asked: Iterable[tuple[Row, Mapping[str, Any], Path]] = ()) -> None:
        """Checks that all rows can run before any of them runs.

        Args:
            asked: The rows, further settings, and their folders; by default, a row per method.
        """
        asked = list(asked) or [(Row(name, name, {}), {}, self.out / name) for name in self.methods]
        cells = [(self.settings_of(row, values), row.method, out) for row, values, out in asked]
        build.check_cells(self.settings, cells)

    def accuracies(self, row: Row, out: Path, values: Mapping[str, Any] | None = None) -> dict:
        """Runs a row's trials with its settings and `values`; returns accuracy and the table's other entries."""
        settings = self.settings_of(row, values)
        trained = build.train_cells(settings, row.method, out)
        summaries = trained.summaries
        accuracy = [summary["last"]["accuracy_mean"] for summary in summaries]
        privacy = [summary["privacy"] or {} for summary in summaries]
        return {
            **of_accuracies(accuracy),
            "weighted": [summary["last"]["accuracy"] for summary in summaries],
            "std_over_clients": float(
                np.mean([summary["last"]["accuracy_std"] for summary in summaries])
            ),
            "earth_movers_distance": summaries[0]["earth_movers_distance"],
            "learning_rate": rate_of(out / self.trials[0].folder),
            **trained.entries,
            "parameters": summaries[0]["parameters"],
            "epsilon": [ledger.get("epsilon") for ledger in privacy],
            "unaccounted": privacy[0].get("unaccounted"),
        }

    def standings(self, cells: Mapping[str, dict]) -> dict[str, dict]:
        """Returns intervals and ranks of cells that differ only in their method."""
        return statistics.standings({name: self.scores(cell) for name, cell in cells.items()})

    def difference(self, cell: dict, other: dict) -> statistics.Difference:
        """Returns the paired difference of a cell from another."""
        return statistics.difference(self.scores(cell), self.scores(other))

    def scores(self, cell: dict) -> dict[statistics.Trial, float]:
        """A cell's accuracies by trial."""
        return dict(zip(self.trials, cell["accuracies"], strict=True))

    def shown(self, cell: dict) -> str:
        """A cell of a table (see `over_runs`)."""
        return over_runs(cell["accuracies"])

    def write_table(self, title: str, rows: Sequence[Row], columns: Sequence[Column]) -> None:
        """Runs all cells of a table and writes it with the paper's values next to ours."""

        def folder(column, row):
            return self.out / column.folder / row.folder

        self.check((row, column.flags, folder(column, row)) for row in rows for column in columns)
        entries = []
        body = []
        distances = {}
        tuned = []
        for number, row in enumerate(rows, 1):
            entry: dict[str, Any] = {"method": row.title}
            line = [row.title]
            for column in columns:
                cell = self.accuracies(row, folder(column, row), column.flags)
                distances[column.title] = cell["earth_movers_distance"]
                if cell.get("tuned"):
                    tuned.append(f"{row.title}, {column.title}: {cell['tuned']}")
                paper = as_pair(column.paper.by_row.get(row.title))
                entry[column.folder] = cell | {
                    "paper": None if paper is None else [v and v / 100 for v in paper]
                }
                line += [self.shown(cell), "-" if paper is None else percent(*paper)]
            entries.append(entry)
            body.append(line)
            print(f"{number} of {len(rows)} rows done: {row.title}")
        heads = ["method"]
        for column in columns:
            distance = distances[column.title]
            heads += [
                column.title + ("" if distance is None else f" (EMD {distance:.2f})"),
                column.paper.head,
            ]
        for column in columns:
            standing = self.standings({entry["method"]: entry[column.folder] for entry in entries})
            for entry in entries:
                entry[column.folder] |= standing[entry["method"]]
        tables.write(title, heads, body, entries, self.out)
        self.print_differences(rows[0], entries[0][columns[0].folder], tuned)

    def curve(self, row: Row, out: Path) -> dict:
        """Like `accuracies`, with "title", "rounds", "epochs" (local epochs so far) and "curve", accuracy over them."""
        cell = self.accuracies(row, out)
        read = [files.read_jsonl(out / trial.folder / "metrics.jsonl") for trial in self.trials]
        rounds, curves = over_rounds(read, "accuracy_mean")
        epochs = [number * self.settings_of(row).epochs for number in rounds]
        return {
            "title": row.title,
            "rounds": rounds,
            "epochs": epochs,
            "curve": curves.mean(axis=0).tolist(),
            **cell,
        }

    def write_figure(
        self,
        name: str,
        panels: Mapping[str, tuple[str, list]],
        rows: Sequence[Row] = (),
        title: str = "",
    ) -> None:
        """Draws accuracy against hyperparameters and writes the points.

        Args:
            name: File name of the figure.
            panels: Axis label and values by flag (a method's own flags without their prefix).
            rows: The lines; by default, one per method.
            title: Title of the table, without the description of its values.
        """
        if not any(values for _, values in panels.values()):
            raise FlagError("nothing to draw; accepted: values in at least one of the lists")
        points = []
        body = []
        settings = self.settings
        rows = rows or [Row(method, method, {}) for method in self.methods]
        drawn = [
            (row, hyperparameter, value)
            for row in rows
            for hyperparameter, (_, values) in panels.items()
            for value in values
        ]

        def flag(row, hyperparameter):
            return (
                f"{row.method}.{hyperparameter}"
                if f"{row.method}.{hyperparameter}" in settings
                else hyperparameter
            )

        def folder(row, hyperparameter, value):
            return self.out / f"{row.folder}-{hyperparameter}-{value:g}"

        self.check(
            (row, {flag(row, hyperparameter): value}, folder(row, hyperparameter, value))
            for row, hyperparameter, value in drawn
        )
        for row, hyperparameter, value in drawn:
            cell = self.accuracies(
                row, folder(row, hyperparameter, value), {flag(row, hyperparameter): value}
            )
            points.append(
                {
                    "panel": hyperparameter,
                    "method": row.title,
                    "value": value,
                    "paper": None,
                    **cell,
                }
            )
            points[-1]["accuracy"] = cell["accuracy_mean"]
            body.append([hyperparameter, row.title, f"{value:g}", self.shown(cell)])
            print(f"{row.title}, {hyperparameter}={value:g} done")
        labels = {hyperparameter: label for hyperparameter, (label, _) in panels.items()}
        report.save(sweep_figure(points, labels), self.out / name)
        title = title or f"{settings.dataset}, {settings.partition_groups} groups"
        title += ", test accuracy after the last round"
        tables.write(
            title,
            ["hyperparameter", "method", "value", "test accuracy, %"],
            body,
            points,
            self.out,
            name,
        )
        self.print_differences(rows[0], points[0])

    def print_differences(self, row: Row, cell: dict, tuned: Sequence[str] = ()) -> None:
        """Prints how the setup differs from the paper's, and adds it below the table in table.md.

        Args:
            row: A row of the table.
            cell: One of its cells.
            tuned: The tuned values for each cell.
        """
        own = self.settings_of(row).for_method(row.method)
        name = self.paper.name(self.settings)
        sizes = (
            f"at most {own.train_examples} examples per client"
            if own.train_examples
            else "all examples"
        )
        here = f"{own.dataset}, {sizes}, --model={own.model} of {cell['parameters']:,} parameters"
        rate = (
            f"rates tuned among {', '.join(own.tune)}"
            if own.tune
            else f"rate {own.learning_rate:g}"
        )
        here += f", {own.rounds} rounds, {own.optimizer} at {rate}"
        here += f", batches of {own.batch_size}" if own.batch_size else ", full batches"
        end = "Initial models, batches and splits are our own."
        if name == "digits":
            end = "Its values are for orientation only."
        elif name is None:
            end = "The paper has no values for this data set."
        said = f"Here: {here}. The paper: {self.paper.said}. {end}"
        said += " Our ± is the sample deviation over runs, whose number is in brackets." * (
            len(self.trials) > 1
        )
        said += f"\n\nTuned: {'; '.join(tuned)}." if tuned else ""
        said += f"\n\n{terms.AT_EDGE}" if any(terms.EDGE in each for each in tuned) else ""
        print(said)
        table = self.out / "table.md"
        files.write_text(table, f"{table.read_text()}\n{said}\n")


def as_pair(value: float | tuple | None) -> tuple[float, float | None] | None:
    """A paper's value as (mean, deviation), with None for a missing deviation."""
    return value if value is None or isinstance(value, tuple) else (value, None)


def percent(mean: float, deviation: float | None) -> str:
    """Formats a paper's percents as 85.1 ± 0.1, or as 85.1 without a deviation."""
    return f"{mean:.1f}" if deviation is None else f"{mean:.1f} ± {deviation:.1f}"


def of_accuracies(accuracies: Sequence[float]) -> dict:
    """Returns the accuracies of a cell's runs, their mean, and their sample deviation."""
    of_runs = statistics.RunSummary.from_values(accuracies)
    return {
        "accuracy_mean": of_runs.mean,
        "accuracy_std": of_runs.std,
        "accuracies": list(accuracies),
    }


def over_runs(accuracies: Sequence[float]) -> str:
    """Formats runs' accuracies in percent as 85.1 ± 0.1 (3), or as 85.1 for one: see `statistics.RunSummary.text`."""
    return statistics.RunSummary.from_values(accuracies).text(lambda accuracy: f"{100 * accuracy:.1f}")
