"""The papers' scoreboard: for how many pairs of methods our order is the paper's."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping

from experiments.ledger.entries import Column, Entry, Value, summary
from experiments.ledger.tables import papers_value
from experiments.papers import NAMES
from pfljax.evaluation import rounding
from pfljax.report.rendering import markdown_table

NAME = "scoreboard"  # of its place in a page
TITLES = {"federico": "FedeRiCo", "fedem": "FedEM", "fedfomo": "FedFomo", "pfedmb": "pFedMB"}
TIE = 0.5  # points
ERRORS = 2  # standard errors
COUNTS = ("hold", "differ", "tie")


def error_of(one: Value, other: Value) -> float:
    """The standard error of the difference of two means, paired if both have the same runs; 0 if it is not known."""
    if one.runs and other.runs and one.runs.keys() == other.runs.keys() and one.n > 1:
        gains = summary({trial: value - other.runs[trial] for trial, value in one.runs.items()})
        return (gains.deviation or 0.0) / math.sqrt(gains.n)
    if one.deviation is None or other.deviation is None:
        return 0.0
    return math.hypot(one.deviation / math.sqrt(one.n), other.deviation / math.sqrt(other.n))


def order(one: Value, other: Value) -> int:
    """1 if the first is above the second, -1 if below, 0 if they tie.

    They tie if they differ by less than TIE, or by less than ERRORS standard errors of the difference. In floating
    point, 16.4 and 15.9 differ by less than 0.5.
    """
    difference = one.mean - other.mean
    error = float(rounding.error_of(one.mean, other.mean))
    if abs(difference) + error < max(TIE, ERRORS * error_of(one, other)):
        return 0
    return 1 if difference > 0 else -1


def counted(pairs: Iterable[tuple[Value, float]]) -> Counter:
    """How many pairs of methods have the paper's order ("hold"), the opposite one ("differ"), or tie in ours or theirs.

    Args:
        pairs: For each method, our value and the paper's.
    """
    found: Counter = Counter(hold=0, differ=0, tie=0)
    for (ours, theirs), (other, their_other) in itertools.combinations(pairs, 2):
        product = order(ours, other) * order(Value(theirs), Value(their_other))
        found["tie" if product == 0 else "hold" if product > 0 else "differ"] += 1
    return found


def values(entry: Entry, column: Column) -> list[tuple[Value, float]]:
    """Our value and the paper's for each method that has both."""
    found = [(entry.value(row, column), papers_value(column.paper, row.name)) for row in entry.rows]
    return [(ours, theirs) for ours, theirs in found if ours is not None and theirs is not None]


def form_of(entry: Entry, column: Column) -> str:
    """What stands for the paper's own method in a column, if its row has another title; else nothing."""
    folder = (column.paper or "").partition(".")[0]
    titles = [row.title for row in entry.rows if row.name == folder]
    return next((title for title in titles if title.lower() != TITLES[folder].lower()), "")


def name_of(path: str) -> str:
    """The paper's table for a path such as "federico.TABLE1.cifar10.{row}.2"."""
    folder, constant, data, *_ = path.split(".")
    return f"{TITLES[folder]}, Table {constant.removeprefix('TABLE')}, {NAMES.get(data, data)}"


def table(entries: Mapping[str, Entry], pages: Mapping[str, str]) -> str:
    """The scoreboard in Markdown; `pages` names the page of every entry. Forms of a method are counted apart."""
    body: list[list[str]] = []
    totals: dict[str, Counter] = {}
    for name, entry in entries.items():
        for column in entry.columns:
            pairs = values(entry, column)
            if len(pairs) < 2:
                continue
            found = counted(pairs)
            where = name_of(column.paper or "")
            form = form_of(entry, column)
            for whole in (form or where.partition(",")[0], "all"):
                totals[whole] = totals.get(whole, Counter()) + found
            ours = f"[{name}]({pages.get(name, '')}#{name}), {column.head}"
            ours += f"; {form}" if form else ""
            body.append([where, ours, str(len(pairs)), *(str(found[key]) for key in COUNTS)])
    body.sort(key=lambda line: line[0])
    for whole, found in sorted(totals.items(), key=lambda pair: (pair[0] == "all", pair[0])):
        shares = [f"{found[key]} ({100 * found[key] / found.total():.0f} %)" for key in COUNTS]
        body.append([f"**{whole}**", "", "", *shares])
    return markdown_table(
        ["the paper's table", "ours", "methods", "orders that hold", "differ", "tie"], body
    )


def block(entries: Mapping[str, Entry], pages: Mapping[str, str]) -> str:
    """What stands between the scoreboard's marks."""
    return f'<a id="{NAME}"></a>\n\n{table(entries, pages)}\n\n'
