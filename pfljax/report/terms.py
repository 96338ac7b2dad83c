"""The terms on which methods are compared: what each was told, its budget, and how it was tuned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pfljax.evaluation import gains, statistics
from pfljax.evaluation.metrics import is_percent

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
    "tuned",
    *HEADS,
    "s per round",
)
EFFECTS = ("clients helped / hurt, %", "worst client")
HELPED = (
    "Clients helped or hurt: shares of the clients of all runs whose score is defined, and better or worse than with "
    "{reference}; worst client: the smallest gain of one. A gain is an improvement."
)
RISING = (
    "Still improving in the last quarter of the rounds: {names} (lines are fitted to each run's scores, and the 95 % "
    "interval of their mean change excludes 0). More rounds may change the order."
)
# a row's entries, and what they omit
EPSILONS = {"epsilon": "unaccounted", "client_epsilon": "client_unaccounted"}
EDGE = " (edge)"
RETURNED = "Tuned on validation examples, which training then had back."
WITHHELD = "Tuned on validation examples, which training did not have."
WEIGHTED = (
    "Scores and their differences are means over clients, weighted by numbers of test examples."
)
PLAIN = "Scores and their differences are plain means over clients."
UNDEFINED = (
    "The {score} is undefined for {undefined:.3g} of {tested:.3g} clients, such as those with a single class; they are "
    "left out."
)
UNLIKE = (
    "The {score} is undefined for different numbers of clients ({counts}), so the methods' means and the differences "
    "of means are over different clients. Clients helped and hurt are among those that both methods have."
)
BEST_UNKNOWN = (
    "The best round by validation is unknown: rounds before the last were evaluated without the {score}. Runs in a new "
    "folder have it."
)
LOWER = "Scores: lower is better, so a negative difference of scores is an improvement."
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
    texts = []
    for name, value in chosen.items():
        number = f"{value:g}" if isinstance(value, float) else str(value)
        texts.append(f"{tuned_name(name)} {number}{EDGE if name in at_edge else ''}")
    return ", ".join(texts)


def tuned_name(name: str) -> str:
    """Returns the name of a hyperparameter or of the learning rate, for texts."""
    return "learning rate" if name == "learning_rate" else name


def is_weighted(score: str) -> bool:
    """Whether the score of a run weights clients by their numbers of test examples; other metrics are plain means."""
    return score in ("accuracy", "loss")


def weighting(score: str) -> str:
    """Returns how the score of a run weights its clients, for labels."""
    return "weighted by examples" if is_weighted(score) else "mean over clients"


def means(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns lines on the scores of a table: what they are means over, and what is unknown."""
    scores = [row["score"] for row in rows if row.get("score")]
    score = scores[0] if scores else ""
    label = score.replace("_", " ")
    lines = []

    # Tables of accuracies say so if they also have gains of single clients.
    is_compared = any(row.get("clients_compared") for row in rows)
    if score and (is_compared or not is_weighted(score)):
        lines.append(WEIGHTED if is_weighted(score) else PLAIN)
    if any(row.get("best_unknown") for row in rows):
        lines.append(BEST_UNKNOWN.format(score=label))

    # Clients whose score is undefined, for all methods alike or for some of them.
    undefined = {}
    for row in rows:
        if row.get("score"):
            undefined[row["method"]] = row.get("clients_undefined") or 0.0
    if any(undefined.values()):
        tested = max(row.get("clients_tested") or 0.0 for row in rows)
        most = max(undefined.values())
        lines.append(UNDEFINED.format(score=label, undefined=most, tested=tested))
    if len(set(undefined.values())) > 1:
        counts = ", ".join(f"{name} {count:.4g}" for name, count in undefined.items())
        lines.append(UNLIKE.format(score=label, counts=counts))
    return lines


def never_trained(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each method of which some clients never trained: how many, and how they score."""
    lines = []
    for row in rows:
        if not row.get("never_trained"):
            continue
        score = row["score"]
        scale, form = (100, "{:.1f} %") if is_percent(score) else (1, "{:.4f}")
        values = [row["never_trained_score"], row["trained_score"]]
        known = [form.format(scale * value) for value in values if value is not None]
        num = row["never_trained"]
        count = f"{num:.0f}" if num == round(num) else f"on average {num:.1f}"
        count = f"{count} clients never trained"
        text = f"{count} and predict with {row['never_trained_served']}"
        if len(known) == 2:
            text += f"; their mean {score.replace('_', ' ')} is {known[0]}, that of the others {known[1]}"
        lines.append(f"{row['method']}: {text}.")
    return lines


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns lines that explain a table's scores, intervals, budgets and marks."""
    lines = []
    if any(row.get("higher_is_better") is False for row in rows):
        lines.append(LOWER)
    lines += means(rows)

    lines += never_trained(rows)

    # Intervals, clients and trends.
    intervals = statistics.explanation(rows)
    if intervals:
        lines.append(intervals)
    references = [row["reference"] for row in rows if row.get("clients_compared")]
    if references:
        lines.append(HELPED.format(reference=references[0]))
    rising = [str(row["method"]) for row in rows if row.get("trend") == gains.IMPROVING]
    if rising:
        lines.append(RISING.format(names=", ".join(rising)))

    # Budgets and tuning.
    if any("gradients_per_round" in row for row in rows):
        lines.append(BUDGET)
    validation = {row.get("validation") for row in rows}
    if "returned" in validation:
        lines.append(RETURNED)
    if "kept" in validation:
        lines.append(WITHHELD)
    if any(row.get("at_edge") for row in rows):
        lines.append(AT_EDGE)

    # Privacy, and methods that failed.
    for row in rows:
        for name, omitted in EPSILONS.items():
            if row.get(omitted):
                epsilon = name.replace("_", " ")
                lines.append(f"* {row['method']}: {epsilon} does not include {row[omitted]}.")
    lines += [f"{row['method']} failed: {row['failed']}." for row in rows if row.get("failed")]
    return lines
