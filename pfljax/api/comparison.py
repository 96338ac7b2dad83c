"""Comparing methods on the same clients and seeds."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from pfljax import report
from pfljax.api.run import ClientsOfSeed, Folder, Run, Say, check_method, of_each_seed
from pfljax.api.study import Cell, Replicate, Rerun, Study, over_rounds, share_programs
from pfljax.contract import optional
from pfljax.contract.errors import ArgumentError
from pfljax.contract.fields import Seeds, checked, knob
from pfljax.exchange import processes
from pfljax.folder import files
from pfljax.local.training import LocalTraining
from pfljax.training import tracking
from pfljax.training.loop import Rounds, Schedule
from pfljax.training.tracking import Tracker


def method_row(title: str, cells: Sequence[Cell]) -> dict:
    """Returns a method's row: mean and standard deviation over seeds of the final scores, and curves over rounds."""
    score = "accuracy" if cells[0].summary["task"] == "classification" else "loss"
    last = [cell.summary["last"] for cell in cells]
    mean = lambda values: float(np.mean(list(values)))
    rounds, curves = over_rounds([cell.rows for cell in cells], score)
    privacy = [cell.summary["privacy"] for cell in cells]
    return {
        "algorithm": title,
        "accuracy_mean": mean(row[score] for row in last),
        "accuracy_std": float(np.std([row[score] for row in last])),
        "seeds": [{"seed": cell.summary["seed"], **cell.summary["last"]} for cell in cells],
        "best_mean": mean(cell.summary["best"][score] for cell in cells),
        "bottom_decile_mean": mean(row.get("accuracy_bottom_decile", np.nan) for row in last),
        "metrics": {name: of_seeds([row.get(name) for row in last]) for name in cells[0].summary.get("metrics", [])},
        "unseen_mean": mean((cell.summary["unseen"] or {}).get(score, np.nan) for cell in cells),
        "mini_batches_per_round": cells[0].summary["mini_batches_per_round"],
        "megabytes_per_round": mean((row["bytes_down"] + row["bytes_up"]) / row["round"] / 1e6 for row in last),
        "seconds_per_round": mean(cell.summary["seconds_per_round"] for cell in cells),
        "epsilon": [each["epsilon"] for each in privacy] if privacy[0] else None,
        "unaccounted": (privacy[0] or {}).get("unaccounted"),
        "rounds": rounds,
        "curve_mean": curves.mean(axis=0).tolist(),
        "curve_std": curves.std(axis=0).tolist(),
    }


def of_seeds(values: Sequence[float | None]) -> dict[str, float]:
    """Returns mean and standard deviation over seeds of a metric, without seeds where it is NaN."""
    found = np.array([value for value in values if value is not None and not np.isnan(value)])
    return {"mean": float(found.mean()), "std": float(found.std())} if found.size else {"mean": np.nan, "std": np.nan}


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of methods: one row per method, with means and standard deviations over seeds.

    Attributes:
        title: Data set, rounds and seeds.
        rows: One dict per method, made by `method_row`; "seeds" contains the last row of each seed's history.
        task: "classification" or "regression".
    """

    title: str
    rows: list[dict]
    task: str

    def columns(self) -> tuple[list[str], list[list[str]]]:
        """Returns the column headings and the cells as text."""
        classification = self.task == "classification"
        number = (lambda value: f"{100 * value:.1f}") if classification else (lambda value: f"{value:.4f}")
        unseen = any(np.isfinite(row["unseen_mean"]) for row in self.rows)
        private = any(row["epsilon"] for row in self.rows)
        heads = ["method", *(("test accuracy, %", "best round, %") if classification else ("test loss", "best round"))]
        own = list(dict.fromkeys(name for row in self.rows for name in row["metrics"]))
        heads += ["bottom decile, %"] * classification + [name.replace("_", " ") for name in own]
        heads += ["unseen clients"] * unseen + ["epsilon"] * private
        uneven = len({row["mini_batches_per_round"] for row in self.rows}) > 1  # some methods train for longer
        tuned = any(row.get("tuned") for row in self.rows)
        heads += ["tuned"] * tuned + ["mini-batches per round"] * uneven + ["MB per client and round", "s per round"]
        body = []
        for row in self.rows:
            many = len(row["seeds"]) > 1
            spread = lambda mean, std, number, many=many: number(mean) + (f" ± {number(std)}" if many else "")
            cells = [row["algorithm"], spread(row["accuracy_mean"], row["accuracy_std"], number)]
            cells += [number(row["best_mean"])] + [number(row["bottom_decile_mean"])] * classification
            found = [row["metrics"].get(name, {"mean": np.nan, "std": np.nan}) for name in own]
            cells += [spread(each["mean"], each["std"], "{:.3f}".format) for each in found]
            cells += [number(row["unseen_mean"])] * unseen
            cells += [epsilon_text(row["epsilon"] or [0.0]) + "*" * bool(row["unaccounted"])] * private
            cells += [row.get("tuned", "") or "-"] * tuned
            cells += [f"{row['mini_batches_per_round']:,}"] * uneven
            body.append([*cells, f"{row['megabytes_per_round']:.3g}", f"{row['seconds_per_round']:.3g}"])
        return heads, body

    def __str__(self) -> str:
        heads, body = self.columns()
        widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
        line = lambda cells: "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "\n".join([self.title, line(heads), *map(line, body)])

    __repr__ = __str__

    def to_markdown(self) -> str:
        """Returns the table as Markdown."""
        return markdown(*self.columns())

    def _repr_markdown_(self) -> str:
        return f"**{self.title}**\n\n{self.to_markdown()}"

    def to_pandas(self) -> Any:
        """Returns the scores as a pandas DataFrame with one row per method and seed.

        The columns are "method", "seed" and the last round's entries of metrics.jsonl: "accuracy",
        "accuracy_bottom_decile", "loss", "bytes_down" and "bytes_up" (bytes per client, summed over the rounds),
        "seconds" (time in rounds, without compiling and evaluating) and so on. For example,
        `frame.groupby("method").accuracy.mean()` returns the means in the table's first column.

        Raises:
            ArgumentError: if pandas is not installed.
        """
        cells = [{"method": row["algorithm"], **cell} for row in self.rows for cell in row["seeds"]]
        return optional.load("pandas", "to_pandas").DataFrame(cells)

    def plot(self) -> Any:
        """Plots all methods' scores over rounds and final scores. Returns a matplotlib Figure."""
        return report.comparison_figure(self.rows)

    def write(self, out: Path) -> None:
        """Writes table.md, .csv, .json, .tex and .png to a folder, and report.html, which links to each run's page."""
        report.save(self.plot(), out / "table.png")
        write_table(self.title, *self.columns(), self.rows, out)


def markdown(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, its numbers right-aligned."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_table(title: str, heads: Sequence[str], body: Sequence[Sequence[str]], rows: Sequence[dict], out: Path):
    """Writes table.md, .csv, .tex and .json (the rows), and a page of all runs. Returns the page's path or None."""
    text, escaped = io.StringIO(), lambda cell: re.sub(r"([%&#_$])", r"\\\1", cell).replace("±", r"$\pm$")
    csv.writer(text, lineterminator="\n").writerows([heads, *body])
    latex = [" & ".join(map(escaped, line)) + r" \\" for line in (heads, *body)]
    latex = [rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\toprule", latex[0], r"\midrule", *latex[1:]]
    files.write_text(out / "table.md", f"{markdown(heads, body)}\n\n{title}\n")
    files.write_text(out / "table.csv", text.getvalue())
    files.write_text(out / "table.tex", "\n".join([f"% {title}", *latex, r"\bottomrule", r"\end{tabular}", ""]))
    files.write_json(out / "table.json", files.plain(rows))
    return report.write_comparison(out / "report.html", [out], title)


def epsilon_text(values: Sequence[float | None]) -> str:
    """Formats the mean of several epsilons; None means no bound."""
    finite = [value for value in values if value is not None]
    return f"{sum(finite) / len(finite):.2f}" if len(finite) == len(values) else "∞"


def titled(methods: Sequence[Any]) -> dict[str, Any]:
    """Returns the methods by title: the registered name, plus the changed knobs if a method occurs more than once.

    Raises:
        ArgumentError: if two methods have the same title.
    """
    pairs: list[tuple[Any, Any]] = [
        each if isinstance(each, tuple) and len(each) == 2 else (None, each) for each in methods
    ]
    for title, method in pairs:
        check_method(method, "methods")
        if title is not None:
            files.check_name("methods", title)
    names = [method.info.name for title, method in pairs if title is None]
    found: dict[str, Any] = {}
    for title, method in pairs:
        name = title or method.info.name
        if title is None and names.count(name) > 1:
            knobs = [field for field in dataclasses.fields(method) if getattr(method, field.name) != field.default]
            name += f"({', '.join(f'{field.name}={getattr(method, field.name)}' for field in knobs)})" * bool(knobs)
        if name in found:
            raise ArgumentError("methods", f"two are called {name}; use (title, method) pairs to tell them apart")
        found[name] = method
    return found


@checked(options=[Run, Schedule], without=["method", "seed"])
def compare(
    methods: Annotated[Sequence[Any], knob(empty=False)],
    clients: ClientsOfSeed,
    model: Any,
    local: LocalTraining | None = None,
    *,
    rounds: Rounds,
    seeds: Seeds = (0,),
    out: Folder | None = None,
    replicate: Replicate = "auto",
    rerun: Rerun = "never",
    say: Say | None = None,
    tracker: Tracker | None = None,
    **options: Any,
) -> Table:
    """Trains several methods on the same clients with the same seeds.

    Args:
        methods: Methods with their knobs, or (title, method) pairs.
        clients: The clients; or a function seed -> clients, to give each seed its own split.
        model: See `Run`.
        local: See `Run`.
        rounds: Number of rounds.
        seeds: Seeds for initial models, cohorts, mini-batches and sampling.
        out: Folder for the table. Each method and seed has its own subfolder. Finished runs are not repeated, and those
            that another process is training are waited for.
        replicate: Whether to train all seeds of a method at once, stacked in one kernel: "auto", if their clients' data
            have the same shapes; "vmap", also if they must be padded; or "no".
        rerun: "changed" repeats finished runs whose settings, data, model, method or optimizer have changed since;
            "never" raises an error that names what has changed.
        say: Called with a line whenever a method is done.
        tracker: See `Run.train`. Runs are named METHOD/seed-SEED. Runs that finished earlier are not tracked again.
        options: Further arguments of `Run`, and `eval_every` and `checkpoint_every` of `Run.train`.

    Returns:
        The table; `table.plot()` draws it.
    """
    found, seeds = titled(methods), list(seeds)
    if out:
        processes.first(functools.partial(files.check_writable, Path(out)))
    schedule = Schedule(**{name: options.pop(name) for name in Schedule._fields if name in options})
    of_seed = of_each_seed(clients, seeds)
    make = lambda method, seed: Run(method, of_seed[seed], model, local, seed=seed, **options)
    runs = {title: [make(method, seed) for seed in seeds] for title, method in found.items()}
    folders = {title: [Path(out) / title / f"seed-{seed}" for seed in seeds] if out else [] for title in found}
    study = Study(rounds, schedule, replicate, rerun, say)
    for title in found:  # find mistakes before training anything
        for run, folder in zip(share_programs(runs[title]), folders[title], strict=bool(out)):
            study.check(run, folder)

    def train(title: str, wait: bool) -> list[Cell | None]:
        trackers = [tracking.named(tracker, f"{title}/seed-{run.experiment.seed}") for run in runs[title]]
        return study.train(runs[title], folders[title], trackers, wait=wait)

    trials = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    table = table_of(trained(list(found), train, say or (lambda line: None)), trials)
    if out:
        table.write(Path(out))
    return table


def trained(titles: Sequence[str], train: Callable[[str, bool], list[Cell | None]], say: Say) -> dict[str, list]:
    """All methods' cells; trains first what no other process is training, then waits for the rest.

    Args:
        titles: The methods.
        train: (title, whether to wait) -> the method's cells. A cell is None if another process trains it.
        say: Called with a line whenever a method is done.
    """
    cells: dict[str, list[Cell | None]] = {}
    for wait, title in itertools.product((False, True), titles):
        if None in cells.get(title, [None]):
            cells[title] = train(title, wait)
            if None not in cells[title]:
                say(f"{sum(None not in each for each in cells.values())} of {len(titles)} methods done: {title}")
    return cells


def table_of(cells: Mapping[str, Sequence[Cell]], trials: str) -> Table:
    """Returns the table of methods' cells; `trials` names the seeds that its means and deviations are taken over."""
    own = next(iter(cells.values()))
    about = own[0].summary
    scored, num_clients = about.get("scored_clients"), about["num_clients"]
    sample = "" if scored is None else f"a sample of {scored:,} of {num_clients:,} clients, "
    title = f"{about['dataset']}, {sample}last of {about['rounds']} rounds, {over(trials, len(own))}"
    return Table(title, [method_row(title, each) for title, each in cells.items()], about["task"])


def over(trials: str, number: int) -> str:
    """Returns the last part of a table's title: the trials that its means and deviations are taken over."""
    return f"mean ± std over {trials}" if number > 1 else trials
