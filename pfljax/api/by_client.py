"""The clients of a comparison: a row per client, with each method's score and what it rests on."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfljax.api.study import Cell
from pfljax.api.tabular import aligned, latex, markdown
from pfljax.contract import optional
from pfljax.evaluation.metrics import few_examples, is_percent, rests_on_few
from pfljax.evaluation.statistics import RunSummary, Trial, signed_text
from pfljax.folder import files
from pfljax.report import escaping, terms
from pfljax.report.run_data import label_of, number_of, score_of

SHOWN = 20  # clients at each end that are printed, if there are more
MOST_COLUMNS = 2  # classes with a column each; with more, a column has the smallest class
MARK = " *"


@dataclasses.dataclass(frozen=True)
class ClientTable:
    """A table with a row per client: its test examples, and each method's mean ± sample deviation over runs.

    Clients of several splits are the same if they have the same name. Numbers of examples are means over the runs in
    which a client appears, and so are differences to the reference.

    Attributes:
        title: The title of the comparison.
        rows: One dict per client, in the order of names: "client", "num_examples", "classes" (number of test examples
            by class; {} if unknown), "scores" ([mean, deviation, runs] by method) and "differences" (by method).
        methods: The titles of the methods.
        score: The name of the score.
        reference: The method of the differences; None: there are none.
        joins_splits: Whether a row has clients of several splits, which have no names.
        higher_is_better: Whether high scores are good.

    Examples:
        >>> import pfljax as pfl
        >>> clients = pfl.data.digits(num_clients=4, train_examples=8)
        >>> model = pfl.models.MLP(hidden=(4,))
        >>> table = pfl.compare([pfl.FedAvg(), pfl.Local()], clients, model, rounds=2, seeds=[0])
        >>> by_client = table.by_client()
        >>> by_client.methods
        ['fedavg', 'local']
        >>> head, *lines = by_client.to_csv().splitlines()
        >>> head.startswith("client,num_examples,class_0"), len(lines)
        (True, 4)
    """

    title: str
    rows: list[dict[str, Any]]
    methods: list[str]
    score: str
    reference: str | None = None
    joins_splits: bool = False
    higher_is_better: bool = True

    @property
    def classes(self) -> list[str]:
        """The names of the classes; empty if no counts are known."""
        return list(self.rows[0]["classes"]) if self.rows else []

    @property
    def compared(self) -> list[str]:
        """The methods that have differences to the reference."""
        differences = self.rows[0]["differences"] if self.rows else {}
        return [name for name in self.methods if name in differences]

    @property
    def notes(self) -> list[str]:
        """Lines that explain the table."""
        notes = [f"Cells: {label_of(self.score)}, mean ± sample deviation (runs)."]
        if not self.higher_is_better:
            notes.append(terms.LOWER)
        if self.reference:
            text = f"the method's score minus that of {self.reference}"
            notes.append(f"Differences are {text}, means over the runs of a client.")
        if self.joins_splits:
            notes.append("Clients have no names; those of different splits share a row by number.")
        num_marked = sum(map(self._is_marked, self.rows))
        if num_marked:
            clients = f"{num_marked} of {len(self.rows)} clients"
            notes.append(
                f"{MARK.strip()} The scores of {clients} rest on {few_examples(self.score)}."
            )
        return notes

    def _is_marked(self, row: Mapping[str, Any]) -> bool:
        """Whether a client's scores rest on few test examples."""
        return rests_on_few(self.score, row["num_examples"], row["classes"])

    def columns(self) -> tuple[list[str], list[list[str]]]:
        """Returns the column headings and the cells as text."""
        heads = ["client", "test examples", *self._class_heads()]
        heads += self.methods
        heads += [f"{name} minus {self.reference}" for name in self.compared]
        return heads, [self._cells(row) for row in self.rows]

    def _class_heads(self) -> list[str]:
        """The headings of the columns of classes."""
        if len(self.classes) > MOST_COLUMNS:
            return ["smallest class"]
        return [f"class {name}" for name in self.classes]

    def _cells(self, row: Mapping[str, Any]) -> list[str]:
        """The cells of a client as text."""
        number = number_of(is_percent(self.score))
        mark = MARK if self._is_marked(row) else ""
        cells = [f"{row['client']}{mark}", f"{row['num_examples']:,}"]
        counts = list(row["classes"].values())
        if len(counts) > MOST_COLUMNS:
            counts = [min((count for count in counts if count), default=0)]
        cells += [f"{count:,}" for count in counts]
        cells += [RunSummary(*row["scores"][name]).text(number) for name in self.methods]
        for name in self.compared:
            difference = row["differences"][name]
            cells.append("-" if np.isnan(difference) else signed_text(difference, number))
        return cells

    def __str__(self) -> str:
        hidden = len(self.rows) - 2 * SHOWN
        if hidden <= 0:
            return "\n".join([self.title, *aligned(*self.columns()), *self.notes])
        ends = dataclasses.replace(self, rows=[*self.rows[:SHOWN], *self.rows[-SHOWN:]])
        heads, body = ends.columns()
        gap = [f"... {hidden:,} clients", *[""] * (len(heads) - 1)]
        body = [*body[:SHOWN], gap, *body[-SHOWN:]]
        return "\n".join([self.title, *aligned(heads, body), *self.notes])

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        notes = map(escaping.markdown, self.notes)
        return "\n\n".join([f"**{escaping.markdown(self.title)}**", self.to_markdown(), *notes])

    def records(self) -> list[dict[str, Any]]:
        """Returns a flat dict per client: numbers by the names of the columns of `to_pandas`."""
        records = []
        for row in self.rows:
            record = {"client": row["client"], "num_examples": row["num_examples"]}
            record |= {f"class_{name}": count for name, count in row["classes"].items()}
            for name in self.methods:
                values = RunSummary(*row["scores"][name])
                record |= {f"{name}_{field}": value for field, value in values._asdict().items()}
            for name in self.compared:
                record[f"{name}_difference"] = row["differences"][name]
            records.append(record)
        return records

    def to_pandas(self) -> Any:
        """Returns the table as a pandas DataFrame with a row per client.

        The columns are "client", "num_examples", "class_NAME" for each class, and for each method "METHOD_mean",
        "METHOD_std" (NaN for a single run), "METHOD_runs" and, with a reference, "METHOD_difference". For example,
        `frame.nsmallest(5, "fedavg_mean")` returns the five clients for which FedAvg is worst.

        Raises:
            ArgumentError: if pandas is not installed.
        """
        return optional.load("pandas", "to_pandas").DataFrame(self.records())

    def to_csv(self) -> str:
        """Returns the columns of `to_pandas` as CSV; unknown numbers are empty."""
        records = files.plain(self.records())
        heads = list(records[0]) if records else ["client", "num_examples"]
        text = io.StringIO()
        lines = [[record[head] for head in heads] for record in records]
        csv.writer(text, lineterminator="\n").writerows([heads, *lines])
        return text.getvalue()

    def to_markdown(self) -> str:
        """Returns the table as Markdown."""
        return markdown(*self.columns())

    def to_latex(self) -> str:
        """Returns the table as LaTeX, for the package booktabs."""
        title = self.title if self.higher_is_better else f"{self.title}; low scores are good"
        return latex(title, *self.columns())

    def write(self, out: Path) -> None:
        """Writes by_client.csv, by_client.tex and by_client.json (the rows) to a folder."""
        files.write_text(out / "by_client.csv", self.to_csv())
        files.write_text(out / "by_client.tex", self.to_latex())
        files.write_json(out / "by_client.json", self.rows)


def client_rows(
    cells: Mapping[str, Sequence[Cell]], trials: Sequence[Trial], reference: str | None = None
) -> list[dict[str, Any]]:
    """Returns the rows of a `ClientTable`, in the order of the clients' names.

    Args:
        cells: The cells of each method that did not fail, by title.
        trials: Seeds and splits of the cells.
        reference: The method of the differences; None: there are none.
    """
    # The summary's rows of clients, by method and run.
    per_client: dict[tuple[str, Trial], list[dict[str, Any]]] = {}
    for method, method_cells in cells.items():
        for trial, cell in zip(trials, method_cells, strict=True):
            per_client[method, trial] = cell.summary["per_client"]
    names = {_name(row): None for rows in per_client.values() for row in rows}
    clients = sorted(names, key=_in_order)
    positions = {client: position for position, client in enumerate(clients)}

    # Scores by method, run and client; NaN where there are none.
    scores = {}
    for method, method_cells in cells.items():
        scores[method] = np.full((len(trials), len(clients)), np.nan)
        for run, cell in enumerate(method_cells):
            score = score_of(cell.summary)
            for row in cell.summary["per_client"]:
                value = row.get(score)
                if value is not None:
                    scores[method][run, positions[_name(row)]] = value

    # Test examples, which are the same with all methods.
    examples: dict[Any, list[Mapping[str, Any]]] = {client: [] for client in clients}
    rows_by_trial = {trial: rows for (_, trial), rows in per_client.items()}
    for rows in rows_by_trial.values():
        for row in rows:
            examples[_name(row)].append(row)
    classes = _class_names(examples)

    # Means over runs, and differences to the reference.
    summaries = {method: _over_runs(values) for method, values in scores.items()}
    differences = {}
    if reference in scores:
        for method in scores:
            if method != reference:
                differences[method], _, _ = _over_runs(scores[method] - scores[reference])

    client_rows = []
    for position, client in enumerate(clients):
        entries = {}
        for method, (mean, std, runs) in summaries.items():
            entries[method] = [float(mean[position]), float(std[position]), int(runs[position])]
        row = {
            "client": client,
            "num_examples": _mean_count([row["n_test"] for row in examples[client]]),
            "classes": _mean_classes(examples[client], classes),
            "scores": entries,
            "differences": {method: float(mean[position]) for method, mean in differences.items()},
        }
        client_rows.append(row)
    return client_rows


def _name(row: Mapping[str, Any]) -> Any:
    """The name of a client; its number if it has none."""
    return row.get("name", row["client"])


def _over_runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns means, sample deviations and numbers of runs (K,) of values (runs, K), without those that are NaN."""
    known = ~np.isnan(values)
    runs = known.sum(axis=0)
    total = np.where(known, values, 0).sum(axis=0)
    mean = np.where(runs > 0, total / np.maximum(runs, 1), np.nan)
    squares = np.where(known, (values - mean) ** 2, 0).sum(axis=0)
    std = np.where(runs > 1, np.sqrt(squares / np.maximum(runs - 1, 1)), np.nan)
    return mean, std, runs


def _in_order(client: Any) -> list[tuple[int, int, str]]:
    """The sorting key of a client's name: numbers in it are compared as numbers."""
    pieces = re.split(r"(\d+)", str(client))
    return [(0, int(text), "") if text.isdecimal() else (1, 0, text) for text in pieces if text]


def _class_names(examples: Mapping[Any, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The names of all classes in the clients' test examples; empty if a run has no counts."""
    names: dict[str, None] = {}
    for rows in examples.values():
        for row in rows:
            if "classes" not in row:
                return []
            names |= dict.fromkeys(row["classes"])
    return sorted(names, key=_in_order)


def _mean_count(counts: Sequence[int]) -> int:
    """The mean number of examples over runs, rounded."""
    return round(sum(counts) / len(counts))


def _mean_classes(rows: Sequence[Mapping[str, Any]], classes: Sequence[str]) -> dict[str, int]:
    """The mean number of test examples of each class over the runs of a client, rounded.

    Args:
        rows: The client's rows, one per run.
        classes: The names of the classes.
    """
    counts = {}
    for name in classes:
        counts[name] = _mean_count([row["classes"].get(name, 0) for row in rows])
    return counts
