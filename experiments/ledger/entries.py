"""What an entry of the ledger holds, how it is checked, and its file docs/results/data/NAME.json.

Superseded tables are in docs/results/data/archive. No page shows them, and the ledger's commands leave them out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
DATA = Path("docs/results/data")  # from the repository's root
ARCHIVE = DATA / "archive"
# Of an entry; its file leaves them out if they are None or False.
OPTIONAL = ("programs", "programs_jax", "repeated", "timing")
PARTITION = "partition:"  # before a partition's name among programs
SPREAD = re.compile(r"(-?[\d.]+) ± ([\d.]+)")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
DATE = re.compile(r"20\d\d-\d\d(-\d\d)?")


class Value(NamedTuple):
    """A mean with its sample deviation over n runs, and the runs by (split, seed) if they were kept."""

    mean: float
    deviation: float | None = None
    n: int = 1
    runs: Mapping[tuple[int | None, int], float] | None = None


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: Its heading.
        n: The number of runs behind cells with ±.
        population: Whether that ± is a population deviation (ddof = 0), as in tables published before the ledger.
        of: The column's name in the runs.
        figure: The figure of the runs that it shows, such as "accuracy"; None: its cells are in the rows.
        lead: A row whose mean lead over each of the others is shown beside the column.
        paper: Where experiments has the paper's value, such as "federico.TABLE1.cifar10.{row}.2".
    """

    head: str
    n: int = 0
    population: bool = False
    of: str = ""
    figure: str | None = None
    lead: str | None = None
    paper: str | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table: its name in the runs and in the paper's values, its title, and its cells as published."""

    name: str
    title: str
    cells: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A table of results.

    Attributes:
        title: What the table shows.
        command: The command that measured it, or nothing if it was not recorded.
        commit: The commit that was measured; None if it was not recorded.
        published_in: Without a commit, the one that published the figures.
        date: When it was measured.
        machine: Where it was measured.
        versions: Versions by package.
        methods: Registered names of the methods.
        columns: The columns after the first, which holds the rows' titles.
        rows: The rows.
        runs: For each run "row", "column", "split", "seed" and figures; None if the runs were not kept.
        programs: Digests of what its methods computed when it was measured, by name, and of its partition, as
            "partition:NAME" (see `experiments.ledger.programs`); None if they were not recorded.
        programs_jax: The version of jax of these digests.
        repeated: How a part of the runs was repeated at a later commit, whose programs these are; None: it was not.
        timing: Whether it shows times, memory or bytes of programs on a machine. They depend on the whole engine, so
            they are those of the commit, and no digest of a method tells whether they still hold.
    """

    title: str
    command: str
    commit: str | None
    published_in: str | None
    date: str
    machine: str
    versions: dict[str, str]
    methods: list[str]
    columns: list[Column]
    rows: list[Row]
    runs: list[dict[str, Any]] | None = None
    programs: dict[str, str] | None = None
    programs_jax: str | None = None
    repeated: str | None = None
    timing: bool = False

    def value(self, row: Row, column: Column) -> Value | None:
        """The value in a cell, in percent if it is an accuracy; None if the cell has no number."""
        if column.figure is None:
            return published(row.cells[self.given.index(column)], column)
        scale = 100 if percent(column) else 1
        runs = {
            (run["split"], run["seed"]): scale * run[column.figure]
            for run in self.runs or []
            if (run["row"], run["column"]) == (row.name, column.of)
            and run.get(column.figure) is not None
        }
        return summary(runs) if runs else None

    @property
    def given(self) -> list[Column]:
        """The columns whose cells are in the rows."""
        return [column for column in self.columns if column.figure is None]


def percent(column: Column) -> bool:
    """Whether a column of runs is shown in percent."""
    return "accuracy" in (column.figure or "")


def summary(runs: Mapping[tuple[int | None, int], float]) -> Value:
    """Mean and sample deviation of runs."""
    values = list(runs.values())
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Value(statistics.fmean(values), deviation, len(values), runs)


def published(cell: str, column: Column) -> Value | None:
    """The value of a cell that is in a row."""
    if found := SPREAD.search(cell):
        deviation = float(found[2])
        return Value(
            float(found[1]),
            sample(deviation, column.n) if column.population else deviation,
            column.n,
        )
    number = NUMBER.match(cell.replace(",", ""))
    return Value(float(number[0]), None, column.n) if number else None


def sample(population: float, n: int) -> float:
    """The sample deviation (ddof = 1) for a population deviation (ddof = 0) over n runs."""
    return population * math.sqrt(n / (n - 1))


def made(raw: Mapping[str, Any]) -> Entry:
    """The entry of a parsed JSON file.

    Raises:
        ValueError: for anything else than an entry; the text says what is accepted.
    """
    entry = built(Entry, raw)
    columns = [built(Column, column) for column in entry.columns]
    entry = dataclasses.replace(
        entry, columns=columns, rows=[built(Row, row) for row in entry.rows]
    )
    if problem := wrong(entry):
        raise ValueError(problem)
    return entry


def built(kind: type, raw: Any) -> Any:
    """A dataclass of a JSON object, whose keys must be its fields."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    keys = set(raw) if isinstance(raw, dict) else {str(raw)}
    missing = dataclasses.MISSING
    needed = {
        name
        for name, field in fields.items()
        if field.default is missing and field.default_factory is missing
    }
    if keys - set(fields) or needed - keys:
        odd = ", ".join(sorted(keys - set(fields) | needed - keys))
        raise ValueError(
            f"{kind.__name__} with unknown or missing keys: {odd}; accepted: {', '.join(fields)}"
        )
    return kind(**raw)


def wrong(entry: Entry) -> str:
    """What is wrong with an entry, or nothing."""
    if (entry.commit is None) == (entry.published_in is None):
        return "accepted: either commit or published_in, and the other null"
    if not DATE.fullmatch(entry.date):
        return f"date {entry.date!r}; accepted: YYYY-MM-DD or YYYY-MM"
    if (entry.programs is None) != (entry.programs_jax is None):
        return "accepted: programs with programs_jax, or neither"
    for name in entry.programs or {}:
        if name not in entry.methods and not name.startswith(PARTITION):
            return f"programs: {name} is no method of the entry"
    names = {row.name for row in entry.rows}
    if len(names) < len(entry.rows):
        return "two rows have one name"
    if len({column.head for column in entry.columns}) < len(entry.columns):
        return "two columns have one head"
    for row in entry.rows:
        if len(row.cells) != len(entry.given):
            return f"row {row.name}: {len(row.cells)} cells for {len(entry.given)} columns without a figure"
        for cell, column in zip(row.cells, entry.given, strict=True):
            if "±" in cell and (column.n < 2 or not SPREAD.search(cell)):
                return f"row {row.name}, column {column.head}: accepted: MEAN ± DEVIATION in a column with n above 1"
    for column in entry.columns:
        if column.figure and not any(
            run["column"] == column.of and column.figure in run for run in entry.runs or []
        ):
            return f"column {column.head}: no run has {column.figure} in column {column.of!r}"
        if column.lead is not None and column.lead not in names:
            return f"column {column.head}: no row is called {column.lead}"
    keys = [(run["row"], run["column"], run["split"], run["seed"]) for run in entry.runs or []]
    return "two runs have one row, column, split and seed" if len(set(keys)) < len(keys) else ""


def text(entry: Entry) -> str:
    """The entry's file: a line for each column, row and run."""
    lines = []
    for key, value in dataclasses.asdict(entry).items():
        if key in OPTIONAL and value in (None, False):
            continue
        if key in ("columns", "rows", "runs") and value:
            items = [{name: item[name] for name in item if kept(key, name, item)} for item in value]
            shown = ",\n".join(f"    {json.dumps(item, ensure_ascii=False)}" for item in items)
            lines.append(f'  "{key}": [\n{shown}\n  ]')
        else:
            lines.append(f'  "{key}": {json.dumps(value, ensure_ascii=False)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def kept(key: str, name: str, item: dict) -> bool:
    """Whether a file names an item's value: all of a run, and what a column or row does not leave at its default."""
    return key == "runs" or name == "title" or bool(item[name])


def read(root: Path = ROOT, folder: Path = DATA) -> dict[str, Entry]:
    """All entries by name, oldest first; those of the archive with `folder=ARCHIVE`.

    Raises:
        ValueError: if a file is no entry; the text names it.
    """
    found = {}
    for path in sorted((root / folder).glob("*.json")):
        try:
            found[path.stem] = made(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path.relative_to(root)}: {error}") from None
    return dict(sorted(found.items(), key=lambda pair: pair[1].date))


def write(name: str, entry: Entry, root: Path = ROOT) -> Path:
    """Writes an entry's file; returns its path."""
    made(json.loads(text(entry)))
    path = root / DATA / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(entry), encoding="utf-8")
    return path
