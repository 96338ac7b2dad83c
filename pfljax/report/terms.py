"""The terms on which methods are compared: what each was told, its budget, and how its rates and knobs were chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pfljax.evaluation import statistics

KNOWS, GRADIENTS, MEGABYTES = "knows", "budget: gradients", "budget: MB"
HEADS = (KNOWS, GRADIENTS, MEGABYTES)
BUDGET = (
    "Budget: gradients of mini-batches that a client computes in a round of training, and megabytes that it receives "
    "and sends; means over all clients and rounds."
)
EDGE = " (edge)"
AT_EDGE = f"{EDGE.strip()}: the best value is the least or largest of those tried; others beyond it may do better."


def entries(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a method's entries for the columns, from the summaries of its runs; see `training.scoring`."""
    gradients = [summary["gradients_per_round"] for summary in summaries]
    return {"knows": summaries[0]["knows"], "gradients_per_round": sum(gradients) / len(gradients)}


def cells(row: Mapping[str, Any]) -> list[str]:
    """Returns the cells under `HEADS`."""
    return [row["knows"] or "-", f"{row['gradients_per_round']:,.4g}", f"{row['megabytes_per_round']:.3g}"]


def values(chosen: Mapping[str, Any], at_edge: Sequence[str] = ()) -> str:
    """Describes chosen values, by name, and marks those at the edge of the values tried."""
    number = lambda value: f"{value:g}" if isinstance(value, float) else str(value)
    short = lambda name: "rate" if name == "learning_rate" else name
    return ", ".join(f"{short(name)} {number(value)}{EDGE * (name in at_edge)}" for name, value in chosen.items())


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns lines that explain a table's intervals, budgets and marks."""
    found = [statistics.told(rows)]
    found += [BUDGET] * any("gradients_per_round" in row for row in rows)
    found += [AT_EDGE] * any(row.get("at_edge") for row in rows)
    return [note for note in found if note]
