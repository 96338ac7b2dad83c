"""The table of a comparison: a row per method, its columns, and the files that it is written to."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from pfljax import report
from pfljax.api import tabular
from pfljax.api.by_client import ClientTable, client_rows
from pfljax.api.run import Folder
from pfljax.api.study import Cell
from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError, warn_former
from pfljax.evaluation import gains, rounding, statistics
from pfljax.evaluation.metrics import is_percent
from pfljax.evaluation.statistics import RunSummary, Trial, compared, deviation
from pfljax.folder import files
from pfljax.report import escaping, terms
from pfljax.report.run_data import (
    BYTES,
    evenly,
    label_of,
    measures,
    number_of,
    over_rounds,
    score_of,
    score_sign,
    validated,
)
from pfljax.settings.fields import checked, hyperparameter, nearest

# Files of a comparison, whose folder also has one of each method.
FILES = (
    "by_client.csv",
    "by_client.json",
    "by_client.tex",
    "planned.json",
    "report.html",
    "table.csv",
    "table.json",
    "table.md",
    "table.png",
    "table.tex",
    "workers",
)
MAX_GAINS = 500  # of single clients, in a row
# heading of the only column that is measured, and differs when a study is repeated
SECONDS = "s per round"
OWN_SPLITS = ", each on a split of its own"  # end of a title
FAILED = "failed"  # in place of a failed method's score


def method_row(
    title: str, cells: Sequence[Cell], trials: Sequence[Trial], target: float | None = None
) -> dict:
    """Returns a method's row: mean and sample deviation over runs of the final scores, and curves over rounds.

    With a `target`, also the simulated seconds after which each run has reached this score; None if it never does.
    """
    summaries = [cell.summary for cell in cells]
    histories = [cell.rows for cell in cells]
    score = score_of(summaries[0])
    sign = score_sign(summaries[0])
    means = {name: RunSummary.from_values(values) for name, values in measures(summaries).items()}

    # Curves over rounds: scores, megabytes and, with a clock, simulated seconds.
    rounds, curves = over_rounds(histories, score)
    sent = [np.nan_to_num(over_rounds(histories, name)[1]) for name in BYTES]
    traffic = np.sum(sent, axis=0) / 1e6
    late = gains.trend(rounds, curves)
    clock = None
    seconds_to_target = None
    if np.isfinite(means["simulated"].mean):
        _, clock = over_rounds(histories, "simulated_seconds")
        if target is not None:
            seconds_to_target = times_to(target, curves, clock, sign)

    # The last round of each run.
    seeds = []
    for summary, (_, split) in zip(summaries, trials, strict=True):
        numbers = {"seed": summary["seed"]}
        if split is not None:
            numbers["split"] = split
        seeds.append(numbers | summary["last"])
    return {
        "method": title,
        "score": score,
        "higher_is_better": sign > 0,
        "score_mean": means["score"].mean,
        "score_std": means["score"].std,
        "runs": means["score"].runs,
        "seeds": seeds,
        "best_mean": means["best"].mean,
        "bottom_decile_mean": means["decile"].mean,
        **undefined(summaries, score),
        "best_unknown": any(map(lacks_best, cells)),
        "metrics": further_metrics(summaries, score),
        "unseen_mean": means["unseen"].mean,
        **terms.entries(summaries),
        **never_trained(summaries),
        "megabytes_per_round": means["megabytes"].mean,
        "seconds_per_round": means["seconds"].mean,
        "simulated_mean": means["simulated"].mean,
        "seconds_to_target": seconds_to_target,
        **epsilons([summary["privacy"] or {} for summary in summaries]),
        **drifts(summaries),
        "trend": late.verdict(sign),
        "late_change": late.change,
        "rounds": rounds,
        "megabytes_curve": traffic.mean(axis=0).tolist(),
        "clock_mean": None if clock is None else clock.mean(axis=0).tolist(),
        "curve_mean": curves.mean(axis=0).tolist(),
        "curve_std": deviation(curves).tolist(),
    }


def never_trained(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a row's entries on clients that never trained, means over the runs; {} if all clients of all runs did."""
    entries = [summary.get("never_trained") for summary in summaries]
    known = [entry for entry in entries if entry and entry["count"]]
    if not known:
        return {}
    counts = [entry["count"] if entry else 0 for entry in entries]
    return {
        "never_trained": float(np.mean(counts)),
        "never_trained_score": RunSummary.from_values([entry["score"] for entry in known]).mean,
        "trained_score": RunSummary.from_values([entry["others"] for entry in known]).mean,
        "never_trained_served": known[0]["served"],
    }


def drifts(summaries: Sequence[Mapping[str, Any]]) -> dict[str, list[dict]]:
    """Returns a row's entry on changes of the clients' data, with means over the runs; {} if there are none.

    Scores are those of the clients that change; of all others, if those that change have none before or afterwards.
    """
    if not summaries[0].get("drift"):
        return {}
    entries = []
    for runs in zip(*(summary["drift"] for summary in summaries), strict=True):
        has_scores = all(run["changed"]["clients"] for run in runs)
        group = "changed" if has_scores else "others"
        scores = [run[group] for run in runs]
        after = {}
        for later in scores[0]["after"]:
            after[later] = RunSummary.from_values([run["after"].get(later) for run in scores]).mean
        entry = {
            "round": runs[0]["round"],
            "change": runs[0]["change"],
            "clients": group,
            "before": RunSummary.from_values([run["before"] for run in scores]).mean,
            "after": after,
            "rounds": [run["rounds"] for run in scores],
        }
        entries.append(entry)
    return {"drift": entries}


def further_metrics(summaries: Sequence[Mapping[str, Any]], score: str) -> dict[str, dict]:
    """Returns mean, deviation and number of runs of the metrics besides the score, accuracy among them, by name."""
    names = dict.fromkeys(["accuracy", *summaries[0].get("metrics", [])])
    lasts = [summary["last"] for summary in summaries]
    metrics = {}
    for name in names:
        is_known = name != "accuracy" or all(name in last for last in lasts)
        if name != score and is_known:
            values = RunSummary.from_values([last.get(name) for last in lasts])
            metrics[name] = values._asdict()
    return metrics


def lacks_best(cell: Cell) -> bool:
    """Whether a run has validation examples, but not the score on them in all evaluated rounds."""
    return "validation_loss" in cell.rows[-1] and not validated(cell.summary)


def undefined(summaries: Sequence[Mapping[str, Any]], score: str) -> dict[str, float]:
    """Returns numbers of clients with test examples, and of those for which a score is undefined, means over runs."""
    tested = []
    without = []
    for summary in summaries:
        clients = summary.get("per_client") or []
        scores = [row.get(score) for row in clients if row["n_test"]]
        tested.append(len(scores))
        without.append(int(np.isnan(np.array(scores, float)).sum()))
    return {
        "clients_tested": float(np.mean(tested)),
        "clients_undefined": float(np.mean(without)),
    }


def failed_row(title: str, reason: str, about: Mapping[str, Any]) -> dict:
    """Returns the row of a method that failed, which says why and has no scores."""
    unknown = RunSummary.from_values([])
    numbers = (
        "best_mean",
        "bottom_decile_mean",
        "unseen_mean",
        "gradients_per_round",
        "megabytes_per_round",
        "seconds_per_round",
        "simulated_mean",
        "late_change",
    )
    return {
        "method": title,
        "failed": reason,
        "score": score_of(about),
        "higher_is_better": score_sign(about) > 0,
        "score_mean": unknown.mean,
        "score_std": unknown.std,
        "runs": unknown.runs,
        "seeds": [],
        "metrics": {},
        "knows": "",
        "trend": "",
        "rounds": [],
        "curve_mean": [],
        "curve_std": [],
        **dict.fromkeys(numbers, np.nan),
        **dict.fromkeys([*terms.EPSILONS, *terms.EPSILONS.values()]),
    }


def times_to(target: float, curves: np.ndarray, clock: np.ndarray, sign: int) -> list[float | None]:
    """Returns when each run was first evaluated at or beyond a score; None if it never was.

    Args:
        target: The score.
        curves: (n, T) scores.
        clock: (n, T) times of the evaluations.
        sign: 1 if high scores are good, -1 if low ones are.
    """
    # An accuracy of 0.9 in float32 is slightly less than the target 0.9.
    is_reached = (sign * curves > sign * target) | rounding.is_equal(curves, target)
    times: list[float | None] = []
    for is_reached_by_run, run_clock in zip(is_reached, clock, strict=True):
        first = np.argmax(is_reached_by_run)
        times.append(float(run_clock[first]) if is_reached_by_run.any() else None)
    return times


def times_text(times: Sequence[float | None]) -> str:
    """Formats the times of runs that reached a score, and how many did not."""
    known = [time for time in times if time is not None]
    text = RunSummary.from_values(known).text("{:.4g}".format)
    never = len(times) - len(known)
    return f"{text}, never in {never}" if never else text


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        head: Its heading.
        cell: (row of a method that did not fail) -> text.
    """

    head: str
    cell: Callable[[Mapping[str, Any]], str]


def shown_columns(rows: Sequence[Mapping[str, Any]], target: float | None) -> list[Column]:
    """Returns the columns for which at least one row has a value; see `Table`."""
    score_name = rows[0]["score"]
    number = number_of(is_percent(score_name))
    percent = ", %" if is_percent(score_name) else ""

    def known(name: str) -> bool:
        return bool(np.isfinite([_number(row.get(name)) for row in rows]).any())

    def entry(name: str) -> Callable[[Mapping[str, Any]], str]:
        def text(row: Mapping[str, Any]) -> str:
            return number(row[name])

        return text

    def method(row: Mapping[str, Any]) -> str:
        return row["method"]

    def score(row: Mapping[str, Any]) -> str:
        return RunSummary(row["score_mean"], row["score_std"], row["runs"]).text(number)

    columns = [
        Column("method", method),
        Column(f"{label_of(score_name)}{percent}", score),
    ]

    # Intervals, ranks and differences, and the clients that are helped.
    heads, standings = statistics.columns(rows, number)
    standing_by_method = {}
    for row, standing in zip(rows, standings, strict=True):
        standing_by_method[row["method"]] = standing
    for position, head in enumerate(heads):
        cell = functools.partial(standing_cell, standings=standing_by_method, position=position)
        columns.append(Column(head, cell))
    if any(row.get("clients_compared") for row in rows):
        for position, head in enumerate(terms.EFFECTS):
            cell = functools.partial(effect_cell, number=number, position=position)
            columns.append(Column(head, cell))

    # Other scores.
    if known("best_mean"):
        columns.append(Column(f"best round by validation{percent}", entry("best_mean")))
    if score_name != "loss":
        columns.append(Column(f"bottom decile{percent}", entry("bottom_decile_mean")))
    for name in dict.fromkeys(name for row in rows for name in row["metrics"]):
        head = "accuracy, %" if name == "accuracy" else name.replace("_", " ")
        columns.append(Column(head, functools.partial(metric_text, name=name)))
    if known("unseen_mean"):
        columns.append(Column("unseen clients", entry("unseen_mean")))

    # Privacy and time.
    for name, omitted in terms.EPSILONS.items():
        if any(row.get(name) for row in rows):
            cell = functools.partial(epsilon_cell, name=name, omitted=omitted)
            columns.append(Column(name.replace("_", " "), cell))
    if known("simulated_mean"):
        columns.append(Column("simulated s", simulated_cell))
        if target is not None:
            head = f"simulated s to {number(target)}{percent.removeprefix(',')}"
            columns.append(Column(head, target_cell))

    # Changes of the clients' data.
    known_drifts = [row["drift"] for row in rows if row.get("drift")]
    for position, drift in enumerate(known_drifts[0] if known_drifts else []):
        for later in ("0", *drift["after"]):
            cell = functools.partial(drift_cell, number=number, position=position, later=later)
            when = f"{later} after" if later != "0" else "before"
            columns.append(Column(f"{when} {drift['change']} at {drift['round']}{percent}", cell))
        cell = functools.partial(recovery_cell, position=position)
        columns.append(Column(f"rounds to recover from {drift['round']}", cell))

    # Terms of the comparison.
    if any(row.get("tuned") for row in rows):
        columns.append(Column("tuned", tuned_cell))
    for position, head in enumerate(terms.HEADS):
        columns.append(Column(head, functools.partial(term_cell, position=position)))
    columns.append(Column(SECONDS, seconds_cell))
    return columns


def standing_cell(
    row: Mapping[str, Any], standings: Mapping[str, Sequence[str]], position: int
) -> str:
    """A cell of the columns of intervals, ranks and differences."""
    return standings[row["method"]][position]


def effect_cell(row: Mapping[str, Any], number: Callable[[float], str], position: int) -> str:
    """A cell of the columns of single clients' gains."""
    return terms.effects(row, number)[position]


def simulated_cell(row: Mapping[str, Any]) -> str:
    """The simulated seconds of a row."""
    return f"{_number(row.get('simulated_mean')):.4g}"


def target_cell(row: Mapping[str, Any]) -> str:
    """The simulated seconds until the target is reached."""
    return times_text(row["seconds_to_target"])


def drift_cell(
    row: Mapping[str, Any], number: Callable[[float], str], position: int, later: str
) -> str:
    """The score before a change of the clients' data, or some rounds `later`."""
    entry = row["drift"][position]
    return number(_number(entry["before"] if later == "0" else entry["after"].get(later)))


def recovery_cell(row: Mapping[str, Any], position: int) -> str:
    """The number of rounds until the score before a change is back."""
    return times_text(row["drift"][position]["rounds"])


def tuned_cell(row: Mapping[str, Any]) -> str:
    """The values that were chosen by tuning."""
    return row.get("tuned") or "-"


def term_cell(row: Mapping[str, Any], position: int) -> str:
    """A cell of the columns of the comparison's terms."""
    return terms.cells(row)[position]


def seconds_cell(row: Mapping[str, Any]) -> str:
    """The measured seconds of a round."""
    return f"{row['seconds_per_round']:.3g}"


def _number(value: float | None) -> float:
    """The value; NaN for None."""
    return float("nan") if value is None else float(value)


def metric_text(row: Mapping[str, Any], name: str) -> str:
    """Formats a further metric of a row, which it may lack."""
    entries = row["metrics"].get(name)
    values = RunSummary.from_values([]) if entries is None else RunSummary(**entries)
    number = number_of(True) if name == "accuracy" else "{:.3f}".format
    return values.text(number)


def epsilon_cell(row: Mapping[str, Any], name: str, omitted: str) -> str:
    """Formats a row's epsilon, with a star if it does not cover everything."""
    text = epsilon_text(row.get(name) or [0.0])
    return f"{text}*" if row.get(omitted) else text


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of methods: one row per method, with means and sample deviations over runs.

    Attributes:
        title: Data set, rounds and seeds.
        rows: One dict per method, made by `method_row`; "seeds" contains the last row of each run's history. With
            several runs, also intervals, ranks and differences (`pfljax.evaluation.statistics.standings`).
        task: "classification" or "regression".
        target: The score of the column of simulated seconds until it is reached; None: there is no such column.
        clients: The rows of `by_client`.

    Examples:
        >>> import pfljax as pfl
        >>> clients = pfl.data.digits(num_clients=4, train_examples=8)
        >>> model = pfl.models.MLP(hidden=(4,))
        >>> table = pfl.compare([pfl.FedAvg(), pfl.Local()], clients, model, rounds=2, seeds=[0, 1])
        >>> heads, body = table.columns()
        >>> heads[:2], len(body)
        (['method', 'test accuracy, %'], 2)
        >>> [row["client"] for row in table.by_client().rows]
        [0, 1, 2, 3]
    """

    title: str
    rows: list[dict]
    task: str
    target: float | None = None
    clients: list[dict[str, Any]] = dataclasses.field(default_factory=list, repr=False)

    def columns(self) -> tuple[list[str], list[list[str]]]:
        """Returns the column headings and the cells as text."""
        shown = shown_columns(self.rows, self.target)
        body = []
        for row in self.rows:
            if row.get("failed"):
                body.append([row["method"], FAILED, *["-"] * (len(shown) - 2)])
            else:
                body.append([column.cell(row) for column in shown])
        return [column.head for column in shown], body

    @property
    def score(self) -> str:
        """The score that methods are compared by: "accuracy", "loss" or the name of a metric."""
        return self.rows[0]["score"]

    @property
    def higher_is_better(self) -> bool:
        """Whether high values of `score` are good."""
        return self.rows[0]["higher_is_better"]

    @property
    def failures(self) -> dict[str, str]:
        """Why methods failed, by title; {} if none did."""
        return {row["method"]: row["failed"] for row in self.rows if row.get("failed")}

    @property
    def notes(self) -> list[str]:
        """Lines that explain the table."""
        return terms.notes(self.rows)

    def __str__(self) -> str:
        return "\n".join([self.title, *tabular.aligned(*self.columns()), *self.notes])

    __repr__ = __str__

    def to_markdown(self) -> str:
        """Returns the table as Markdown."""
        return tabular.markdown(*self.columns())

    def by_client(self) -> ClientTable:
        """Returns a table with a row per client: test examples, also of each class, and each method's scores.

        With a reference, it has differences to it. Clients whose scores rest on few examples of a class are marked.
        `print(table.by_client())` shows the table; see `ClientTable` for its conversions.

        Examples:
            >>> import pfljax as pfl
            >>> clients = pfl.data.digits(num_clients=4, train_examples=8)
            >>> model = pfl.models.MLP(hidden=(4,))
            >>> methods = [pfl.FedAvg(), pfl.Local()]
            >>> table = pfl.compare(methods, clients, model, rounds=2, seeds=[0], reference="fedavg")
            >>> by_client = table.by_client()
            >>> len(by_client.rows), by_client.compared
            (4, ['local'])
        """
        methods = [row["method"] for row in self.rows if not row.get("failed")]
        splits = {seed.get("split") for row in self.rows for seed in row["seeds"]}
        has_splits = len(splits) > 1 or self.title.endswith(OWN_SPLITS)
        has_names = any(isinstance(row["client"], str) for row in self.clients)
        return ClientTable(
            self.title,
            self.clients,
            methods,
            self.score,
            reference_of(self.rows),
            joins_splits=has_splits and not has_names,
            higher_is_better=all(row.get("higher_is_better", True) for row in self.rows),
        )

    def _repr_markdown_(self) -> str:
        notes = map(escaping.markdown, self.notes)
        return "\n\n".join([f"**{escaping.markdown(self.title)}**", self.to_markdown(), *notes])

    @checked()
    def to_pandas(self, by: Literal["run", "method"] = "run") -> Any:
        """Returns the scores as a pandas DataFrame.

        By run, the columns are "method", "seed" (and "split", if the runs have splits besides their seeds) and the last
        round's entries of metrics.jsonl: "accuracy", "accuracy_bottom_decile", "loss", "bytes_down" and "bytes_up"
        (bytes per client, summed over the rounds), "seconds" (time in rounds, without compiling and evaluating) and so
        on. For example, `frame.groupby("method").accuracy.mean()` returns the means in the table's first column, and
        `.std()` the deviations. "accuracy_std" is the deviation over the clients of a run (ddof = 0).

        By method, they are the table's: "score_mean" and "score_std" over "runs" of the "score", which is the name of
        it, "higher_is_better", "interval_low" and "interval_high" over "units" and so on, as
        `pfljax.evaluation.statistics.standings` describes them.

        Raises:
            ArgumentError: if pandas is not installed.
        """
        records = []
        for row in self.rows:
            if by == "method":
                numbers = {
                    name: value for name, value in row.items() if not isinstance(value, list | dict)
                }
                records.append(numbers)
            else:
                records += [{"method": row["method"], **last} for last in row["seeds"]]
        return optional.load("pandas", "to_pandas").DataFrame(records)

    def plot_comparison(self) -> Any:
        """Plots final scores, scores over rounds and, with a reference, differences side by side.

        Returns:
            A matplotlib Figure, which notebooks show inline. So do the other methods that plot.
        """
        return report.plot_comparison(self.rows)

    def plot_scores(self) -> Any:
        """Plots methods' scores in the last round: one point per run, and a line at the mean."""
        from pfljax.report import table_plots  # imports matplotlib

        return table_plots.plot_scores(self.rows)

    def plot_rounds(self) -> Any:
        """Plots methods' scores over rounds: means over runs, with bands of one sample deviation."""
        from pfljax.report import table_plots

        return table_plots.plot_rounds(self.rows)

    def plot_traffic(self) -> Any:
        """Plots methods' scores over the megabytes that a client has received and sent.

        Raises:
            ArgumentError: if no method sends models.
        """
        from pfljax.report import table_plots

        return table_plots.plot_traffic(self.rows)

    def plot_duration(self) -> Any:
        """Plots methods' scores over simulated seconds.

        Raises:
            ArgumentError: if the runs have no clock.
        """
        from pfljax.report import table_plots

        return table_plots.plot_duration(self.rows)

    def plot_differences(self) -> Any:
        """Plots methods' paired differences to the reference, with 95 % intervals.

        Raises:
            ArgumentError: if the table has no reference, or a single seed.
        """
        from pfljax.report import table_plots

        return table_plots.plot_differences(self.rows)

    def plot_clients(self, method: str) -> Any:
        """Plots the gains of single clients over the reference with a method, from the largest to the smallest.

        Args:
            method: The method's title in the table.

        Raises:
            ArgumentError: if the table has no gains of this method.
        """
        from pfljax.report import table_plots

        return table_plots.plot_clients(self.rows, method)

    def plot(self) -> Any:
        """Is now `plot_comparison`."""
        warn_former("Table.plot", "Table.plot_comparison")
        return self.plot_comparison()

    @checked()
    def to_latex(self, columns: Sequence[str] | None = None) -> str:
        """Returns the table as LaTeX, for the package booktabs.

        Args:
            columns: Headings of the columns, in this order, such as ["method", "test accuracy, %", "rank"];
                `table.columns()[0]` has all. Default: the method, its score, the interval, the difference to the
                reference, clients helped and hurt, metrics, scores of unseen clients and epsilons.

        Raises:
            ArgumentError: for a heading that the table does not have.
        """
        heads, body = self.columns()
        if columns is not None and not len(columns):
            raise ArgumentError("columns", f"has none; accepted: some of {', '.join(heads)}")
        for name in columns or ():
            if name not in heads:
                raise ArgumentError("columns", f"unknown; {nearest(name, heads)}", name)
        title = self.title if self.higher_is_better else f"{self.title}; low scores are good"
        return latex(title, heads, body, columns)

    @checked()
    def save_figures(
        self, folder: Folder, width: Annotated[float, hyperparameter(above=0)] = 3.3
    ) -> list[Path]:
        """Writes the table's figures for a paper, each as PDF and PNG, and returns their paths.

        The figures are scores.pdf, and scores over rounds, megabytes and, with a clock, simulated seconds. With a
        reference, also differences.pdf and, for each other method, clients-METHOD.pdf: what single clients gain.

        Args:
            folder: The folder.
            width: Width in inches, 3.3 for a column and 6.8 for a page of two columns.
        """
        files.check_writable(Path(folder))
        return report.save_figures(self.rows, Path(folder), width)

    def figures(self, folder: Any, width: float = 3.3) -> list[Path]:
        """Is now `save_figures`."""
        warn_former("Table.figures", "Table.save_figures")
        return self.save_figures(folder, width)

    def write(self, out: Path) -> None:
        """Writes table.md, .csv, .json, .tex and .png to a folder, and report.html, which links to each run's page.

        table.csv has the columns that are the same whenever the study is repeated: all but the measured seconds.
        by_client.csv, .tex and .json have the rows of `by_client`.
        """
        self.by_client().write(out)
        if len(self.failures) < len(self.rows):
            report.save(self.plot_comparison(), out / "table.png")
        write_table(self.title, *self.columns(), self.rows, out)


def reference_of(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The method that the others of a table are compared with; None: there is none."""
    return next((row["reference"] for row in rows if row.get("difference") is not None), None)


def latex(
    title: str,
    heads: Sequence[str],
    body: Sequence[Sequence[str]],
    columns: Sequence[str] | None = None,
) -> str:
    """A table in LaTeX, of these columns; by default, of those of a paper's table."""
    positions = [heads.index(name) for name in columns or terms.for_paper(heads)]
    chosen_heads = [heads[position] for position in positions]
    chosen_body = [[cells[position] for position in positions] for cells in body]
    return tabular.latex(title, chosen_heads, chosen_body)


def write_table(
    title: str, heads: Sequence[str], body: Sequence[Sequence[str]], rows: Sequence[dict], out: Path
) -> Path | None:
    """Writes table.md, .csv, .tex and .json (the rows), and a page of all runs. Returns the page's path or None."""
    texts = map(escaping.markdown, [title, *terms.notes(rows)])
    paragraphs = "\n\n".join([tabular.markdown(heads, body), *texts])
    files.write_text(out / "table.md", f"{paragraphs}\n")

    repeatable = [position for position, head in enumerate(heads) if head != SECONDS]
    lines = [[cells[position] for position in repeatable] for cells in (heads, *body)]
    files.write_csv(out / "table.csv", lines)

    files.write_text(out / "table.tex", latex(title, heads, body))
    files.write_json(out / "table.json", files.plain(rows))
    page = out / "report.html"
    return report.write_comparison(page, [out], title, reference_of(rows))


def epsilons(ledgers: Sequence[dict]) -> dict[str, Any]:
    """Returns a row's epsilons of the runs, by example and by client, and what these do not cover; None: no privacy."""
    entries: dict[str, Any] = {}
    client_ledgers = [ledger.get("of_clients", {}) for ledger in ledgers]
    both = (ledgers, client_ledgers)
    for (name, omitted), run_ledgers in zip(terms.EPSILONS.items(), both, strict=True):
        first = run_ledgers[0]
        entries[name] = None
        if "epsilon" in first:
            entries[name] = [ledger["epsilon"] for ledger in run_ledgers]
        entries[omitted] = first.get("unaccounted")
    return entries


def epsilon_text(values: Sequence[float | None]) -> str:
    """Formats the mean of several epsilons; None means no bound."""
    finite = [value for value in values if value is not None]
    if len(finite) < len(values):
        return "∞"
    return f"{sum(finite) / len(finite):.2f}"


def table_of(
    cells: Mapping[str, Sequence[Cell]],
    about: Mapping[str, Any],
    reference: str | None = None,
    trials: Sequence[Trial] = (),
    target: float | None = None,
    *,
    failures: Mapping[str, str] | None = None,
    chosen: Mapping[str, Mapping[str, Any]] | None = None,
    one_split: bool = False,
) -> Table:
    """Returns the table of methods' cells.

    Args:
        cells: The cells by title; none for a method that failed.
        about: What is known of the study if all methods failed: entries of a summary.
        reference: See `compare`.
        trials: Seeds and splits of the cells; by default their seeds alone.
        target: See `compare`.
        failures: Why methods failed, by title.
        chosen: Entries of rows on what was chosen by tuning, by title.
        one_split: Whether all trials share a split of the data.
    """
    finished = {title: method_cells for title, method_cells in cells.items() if method_cells}
    first = next(iter(finished.values()), [])
    trials = trials or [Trial(cell.summary["seed"]) for cell in first]
    about = first[0].summary if first else about

    # The title.
    scored = about.get("scored_clients")
    sample = ""
    if scored is not None:
        sample = f"a sample of {scored:,} of {about['num_clients']:,} clients, "
    rounds = f"last of {about['rounds']} rounds"
    title = f"{about['dataset']}, {sample}{rounds}, {over(trials, one_split)}"

    # The rows, with what compares them.
    failures = failures or {}
    chosen = chosen or {}
    rows = []
    for name, method_cells in cells.items():
        if failures.get(name):
            row = failed_row(name, failures[name], about)
        else:
            row = method_row(name, method_cells, trials, target)
        rows.append(row | dict(chosen.get(name, {})))
    rows = compared(rows, score_of(about), score_sign(about), reference)
    if reference in finished:
        for row in rows:
            if row["method"] in finished:
                row |= effect_of(finished[row["method"]], finished[reference], trials)
    clients = client_rows(finished, trials, reference)
    return Table(title, rows, about["task"], target, clients)


def effect_of(
    cells: Sequence[Cell], others: Sequence[Cell], trials: Sequence[Trial]
) -> dict[str, Any]:
    """Returns a row's entries on single clients' gains over the reference; {} for the reference itself.

    Args:
        cells: The method's cells.
        others: Those of the reference.
        trials: Their seeds and splits.
    """
    if cells is others:
        return {}
    summary = cells[0].summary
    score = score_of(summary)

    def by_trial(method_cells: Sequence[Cell]) -> dict[Trial, np.ndarray]:
        scores = {}
        for trial, cell in zip(trials, method_cells, strict=True):
            values = [row.get(score) for row in cell.summary["per_client"]]
            scores[trial] = np.array(values, float)
        return scores

    scores = gains.pairs(by_trial(cells), by_trial(others))
    sign = score_sign(summary)
    effect = gains.Effect.from_scores(scores, sign)
    ascending = np.sort(gains.gains_of(scores, sign))
    gained = ascending[::-1]
    shown = gained[evenly(len(gained), MAX_GAINS)].tolist() if len(gained) else []
    return {
        "clients_helped": effect.helped,
        "clients_hurt": effect.hurt,
        "clients_worst": effect.worst,
        "clients_compared": effect.clients,
        "client_gains": shown,
    }


def named(trials: Sequence[Trial], one_split: bool = False) -> str:
    """Describes the trials, for titles; `one_split` says that seeds share a split of the data."""

    def listed(word: str, numbers: Sequence[int | None]) -> str:
        plural = "s" if len(numbers) > 1 else ""
        return f"{word}{plural} {', '.join(map(str, numbers))}"

    seeds = list(dict.fromkeys(trial.seed for trial in trials))
    splits = list(dict.fromkeys(trial.split for trial in trials))
    if splits != [None]:
        return f"{listed('seed', seeds)} on {listed('split', splits)}"
    if len(seeds) == 1:
        return listed("seed", seeds)
    shared = " on one split" if one_split else OWN_SPLITS
    return f"{listed('seed', seeds)}{shared}"


def over(trials: Sequence[Trial], one_split: bool = False) -> str:
    """Returns the last part of a table's title: the trials that its means and deviations are taken over."""
    text = named(trials, one_split)
    return f"mean ± sample deviation (runs) over {text}" if len(trials) > 1 else text
