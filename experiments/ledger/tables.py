"""The tables of docs/results, from the entries of the ledger.

A page says where a table stands:

    <!-- ledger: NAME -->
    <!-- /ledger -->
"""

from __future__ import annotations

import difflib
import importlib
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.ledger.entries import (
    DATA,
    ROOT,
    SPREAD,
    Column,
    Entry,
    Row,
    percent,
    sample,
    summary,
)
from experiments.papers import NAMES
from pfljax.report.rendering import markdown_table

PAGES = Path("docs/results")
LAST_DIGIT = (
    1e-5  # relative; figures of runs have six digits, the last of which rounding may change
)
SIDES = {"-": "the page has", "+": "the ledger gives"}
MARKED = re.compile(r"(?<=<!-- ledger: )([\w.-]+)( -->\n)(.*?)(?=<!-- /ledger -->)", re.DOTALL)


def papers_value(path: str | None, row: str) -> float | None:
    """A paper's value, from the constants of experiments.

    Args:
        path: A column's `paper`: the folder, the constant, and the keys below it. A key is found by its letters and
            digits ("fedfomo-n5" finds "fedfomo, n=5"), and a number by its digits ("D2" finds 2).
        row: What stands for {row}.
    """
    if path is None:
        return None
    try:
        folder, constant, *keys = path.format(row=row).split(".")
        found: Any = getattr(importlib.import_module(f"experiments.{folder}.paper"), constant)
        for key in keys:
            found = found[int(key)] if isinstance(found, tuple) else named(found, key)
    except (ImportError, AttributeError, TypeError, ValueError, LookupError):
        raise ValueError(
            f"paper {path}; accepted: such as federico.TABLE1.cifar10.{{row}}.2"
        ) from None
    return found[0] if isinstance(found, tuple) else found  # a mean and its deviation


def named(values: Mapping[Any, Any] | None, key: str) -> Any:
    """The value of a key that is written like a folder's name; None if there is none."""

    def plain(name):
        return re.sub(r"\W", "", str(name))

    found = {plain(name): value for name, value in values.items()} if values is not None else {}
    return found.get(plain(key), found.get(re.sub(r"\D", "", key)))


def shown(entry: Entry, row: Row, column: Column) -> str:
    """A cell: as in the row, with ± as a sample deviation; or the mean ± sample deviation of runs."""
    if column.figure is None:
        cell = row.cells[entry.given.index(column)]

        def sampled(found):
            return f"{found[1]} ± {converted(found[2], column.n)}"

        return SPREAD.sub(sampled, cell) if column.population else cell
    value = entry.value(row, column)
    if value is None:
        return "-"
    number = "{:.1f}".format if percent(column) else "{:.3g}".format
    if value.deviation is None or (not percent(column) and not value.deviation):
        return number(value.mean)
    few = f" (n = {value.n})" if value.n != runs_of(entry, column) else ""
    return f"{number(value.mean)} ± {number(value.deviation)}{few}"


def converted(population: str, n: int) -> str:
    """A published population deviation as a sample deviation, with the same number of decimals."""
    return f"{sample(float(population), n):.{len(population.partition('.')[2])}f}"


def runs_of(entry: Entry, column: Column) -> int:
    """The number of runs behind a column's ±."""
    values = [entry.value(row, column) for row in entry.rows] if column.figure else []
    return max((value.n for value in values if value), default=column.n)


def lead(entry: Entry, row: Row, column: Column) -> str:
    """The mean lead of the column's leader over a row, over the runs that both have, and in how many it leads."""
    leader = next(each for each in entry.rows if each.name == column.lead)
    best = entry.value(leader, column)
    own = entry.value(row, column)
    if row is leader or best is None or own is None or best.runs is None or own.runs is None:
        return ""
    gains = {trial: best.runs[trial] - own.runs[trial] for trial in best.runs if trial in own.runs}
    number = sum(gain > LAST_DIGIT * best.runs[trial] for trial, gain in gains.items())
    return f"{summary(gains).mean:+.1f} ({number} of {len(gains)})" if gains else ""


def columns_of(entry: Entry) -> Iterator[tuple[str, list[str]]]:
    """The heads of the table's columns and their cells."""
    for column in entry.columns:
        cells = [shown(entry, row, column) for row in entry.rows]
        number = f", n = {runs_of(entry, column)}" if any("±" in cell for cell in cells) else ""
        yield column.head + number, cells
        if column.paper is not None:
            values = [papers_value(column.paper, row.name) for row in entry.rows]
            data = NAMES.get(column.paper.split(".")[2])
            yield (
                f"paper, {data}" if data else "paper",
                ["" if value is None else f"{value:.1f}" for value in values],
            )
        if column.lead is not None:
            title = next(row.title for row in entry.rows if row.name == column.lead)
            yield f"{title} above", [lead(entry, row, column) for row in entry.rows]


def table(entry: Entry) -> str:
    """The table in Markdown."""
    heads, columns = zip(*columns_of(entry), strict=True)
    body = [[row.title, *cells] for row, *cells in zip(entry.rows, *columns, strict=True)]
    return markdown_table(["", *heads], body)


def caption(name: str, entry: Entry) -> str:
    """Where the figures come from."""
    commit = f"commit {entry.commit}" if entry.commit else f"published in {entry.published_in}"
    versions = ", ".join(f"{package} {version}" for package, version in entry.versions.items())
    command = f"`{entry.command}`" if entry.command else "command not recorded"
    parts = [command, commit, entry.date, entry.machine, versions]
    said = (
        f"{entry.title}. Ledger entry [{name}](data/{name}.json): {'; '.join(filter(None, parts))}."
    )
    said += "" if entry.runs else " Figures as published; runs were not kept."
    said += f" Repeated: {entry.repeated}." if entry.repeated else ""
    return textwrap.fill(said, 120, break_long_words=False, break_on_hyphens=False)


def block(name: str, entry: Entry) -> str:
    """What stands between the marks of an entry: an anchor, the table and its caption."""
    return f'<a id="{name}"></a>\n\n{table(entry)}\n\n{caption(name, entry)}\n\n'


def marked(root: Path = ROOT) -> dict[str, str]:
    """The page of every table, by the table's name."""
    pages = sorted((root / PAGES).glob("*.md"))
    return {
        found[1]: page.name
        for page in pages
        for found in MARKED.finditer(page.read_text(encoding="utf-8"))
    }


def regenerated(page: str, blocks: Mapping[str, str]) -> str:
    """A page with its tables made anew."""
    return MARKED.sub(lambda found: f"{found[1]}{found[2]}{blocks.get(found[1], found[3])}", page)


def problems(blocks: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """A line for each difference between the pages and the ledger."""
    found = []
    pages = marked(root)
    found += [
        f"{page}: no entry is called {name}" for name, page in pages.items() if name not in blocks
    ]
    found += [f"{DATA / name}.json: no page shows it" for name in blocks if name not in pages]
    for path in sorted((root / PAGES).glob("*.md")):
        there = path.read_text(encoding="utf-8")
        place = path.relative_to(root)
        lines = difflib.unified_diff(
            there.split("\n"), regenerated(there, blocks).split("\n"), lineterm="", n=0
        )
        found += [
            f"{place}: {SIDES[line[0]]}: {line[1:]}" for line in [*lines][2:] if line[0] in SIDES
        ]
    return found


def write(blocks: Mapping[str, str], root: Path = ROOT) -> list[Path]:
    """Writes the tables of all pages; returns the pages that changed."""
    changed = []
    for path in sorted((root / PAGES).glob("*.md")):
        there = path.read_text(encoding="utf-8")
        if (new := regenerated(there, blocks)) != there:
            path.write_text(new, encoding="utf-8")
            changed.append(path)
    return changed
