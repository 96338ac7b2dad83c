"""The terms on which methods are compared: what each was told, its budget, and how it was tuned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pfljax.evaluation import gains, statistics

KNOWS = "knows"
GRADIENTS = "budget: gradients"
MEGABYTES = "budget: MB"
HEADS = (KNOWS, GRADIENTS, MEGABYTES)
BUDGET = (
    "Budget: gradients of mini-batches that a client computes in a round of training, and megabytes that it receives "
    "and sends; means over all clients and rounds."
)
# Headings of the columns that a paper's table leaves out, without units.
ASIDE = (
    "rank",
    "p",
    "win/tie/loss",
    "worst client",
    "best round by validation",
    "bottom decile",
    "simulated s",
)
ASIDE += ("tuned", *HEADS, "s per round")
EFFECTS = ("clients helped / hurt, %", "worst client")
HELPED = (
    "Clients helped or hurt: shares of the clients of all runs whose score is better or worse than with {reference}; "
    "worst client: the smallest gain of one."
)
RISING = (
    "Still improving in the last quarter of the rounds: {names} (lines are fitted to each run's scores, and the 95 % "
    "interval of their mean change excludes 0). More rounds may change the order."
)
# a row's entries, and what they omit
EPSILONS = {"epsilon": "unaccounted", "client_epsilon": "client_unaccounted"}
EDGE = " (edge)"
RETURNED = "Tuned on validation examples, which training then had back."
KEPT = "Tuned on validation examples, which training did not have."
LOWER = "Scores are losses: lower is better."
AT_EDGE = f"{EDGE.strip()}: the best value is the least or largest of those tried; others beyond it may do better."


def entries(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a method's entries for the columns, from the summaries of its runs; see `training.scoring`."""
    gradients = [summary["gradients_per_round"] for summary in summaries]
    return {"knows": summaries[0]["knows"], "gradients_per_round": sum(gradients) / len(gradients)}


def for_paper(heads: Sequence[str]) -> list[str]:
    """Returns the headings of the columns that a paper's table keeps."""
    return [head for head in heads if head.removesuffix(", %").split(" to ")[0] not in ASIDE]


def cells(row: Mapping[str, Any]) -> list[str]:
    """Returns the cells under `HEADS`."""
    return [
        row["knows"] or "-",
        f"{row['gradients_per_round']:,.4g}",
        f"{row['megabytes_per_round']:.3g}",
    ]


def effects(row: Mapping[str, Any], number: Callable[[float], str]) -> list[str]:
    """Returns the cells under `EFFECTS`; `number` formats a score."""
    if not row.get("clients_compared"):
        return ["-"] * len(EFFECTS)
    shares = f"{100 * row['clients_helped']:.0f} / {100 * row['clients_hurt']:.0f}"
    return [shares, statistics.signed_text(row["clients_worst"], number)]


def values(chosen: Mapping[str, Any], at_edge: Sequence[str] = ()) -> str:
    """Describes chosen values, by name, and marks those at the edge of the values tried."""

    def number(value):
        return f"{value:g}" if isinstance(value, float) else str(value)

    texts = []
    for name, value in chosen.items():
        shown = "learning rate" if name == "learning_rate" else name
        texts.append(f"{shown} {number(value)}{EDGE * (name in at_edge)}")
    return ", ".join(texts)


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns lines that explain a table's scores, intervals, budgets and marks."""
    found = [LOWER] * any(row.get("higher_is_better") is False for row in rows)
    found.append(statistics.told(rows))
    reference = next((row["reference"] for row in rows if row.get("clients_compared")), "")
    found += [HELPED.format(reference=reference)] * bool(reference)
    rising = [str(row["method"]) for row in rows if row.get("trend") == gains.IMPROVING]
    found += [RISING.format(names=", ".join(rising))] * bool(rising)
    found += [BUDGET] * any("gradients_per_round" in row for row in rows)
    found += [RETURNED] * any(row.get("validation") == "returned" for row in rows)
    found += [KEPT] * any(row.get("validation") == "kept" for row in rows)
    found += [AT_EDGE] * any(row.get("at_edge") for row in rows)
    for row in rows:
        for name, omitted in EPSILONS.items():
            if row.get(omitted):
                found.append(
                    f"* {row['method']}: {name.replace('_', ' ')} does not include {row[omitted]}."
                )
    found += [f"{row['method']} failed: {row['failed']}." for row in rows if row.get("failed")]
    return [note for note in found if note]
