"""The text and tables of a run's page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pfljax.contract.host import readable
from pfljax.evaluation.metrics import is_percent
from pfljax.report.elements import ClientButton, Code, Element, Heading, Paragraph, Table
from pfljax.report.run_data import Score
from pfljax.settings.method import METHODS

# Columns of a table of scores, in this order, if the run has them.
SCORES = {
    "accuracy": "accuracy",
    "accuracy_mean": "plain mean",
    "accuracy_std": "deviation over clients",
    "accuracy_bottom_decile": "bottom decile",
    "accuracy_min": "minimum",
    "loss": "loss",
    "train_loss": "train loss",
}
CLIENT_HEADS = {
    "name": "name",
    "network": "network",
    "group": "group",
    "target": "target",
    "accuracy": "accuracy",
    "loss": "loss",
    "n_train": "train examples",
    "n_test": "test examples",
    "classes": "test examples of each class",
}
MAX_CLASSES = 4  # whose examples are listed
EXAMPLES_COVERED = (
    "The bound of examples covers the gradients of local training and treats mini-batches as Poisson "
    "samples."
)
CLIENTS_COVERED = (
    "The bound of whole clients covers the sums of updates, and thus the global model."
)


def score_text(name: str, value: Any) -> str | None:
    """Formats a score: accuracies in percent, others with four decimals. None: it is unknown."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if not isinstance(value, int | float):
        return str(value)
    if name.startswith("accuracy") or is_percent(name):
        return f"{100 * value:.1f} %"
    return f"{value:.4f}"


def words(name: str) -> str:
    """Returns the name of a metric or file as text."""
    return name.replace("_", " ")


def result(summary: Mapping[str, Any], score: Score) -> list[Element]:
    """Returns the scores of the last and best round, and what was scored."""
    last = summary["last"]
    best = summary.get("best")

    # A row per round, a column per score. If another score ranks, it comes first, and accuracy has a single column.
    heads = dict(SCORES)
    if score.name not in SCORES:
        decile = f"{score.name}_bottom_decile"
        heads = {score.name: words(score.name), decile: "bottom decile"}
        for name in ("accuracy", "loss", "train_loss"):
            heads[name] = SCORES[name]
    for name in summary.get("metrics", ()):
        heads.setdefault(name, words(name))
    names = [name for name in heads if name in last]

    def row(label: str, scores: Mapping[str, Any]) -> list[Any]:
        cells = [score_text(name, scores.get(name)) for name in names]
        return [label, scores.get("round"), *cells]

    rows = [row("last", last)]
    if best:
        criterion = words(str(best.get("selected_by", "train_loss")))
        rows.append(row(f"best by {criterion}", best))
    table = Table(["", "round", *(heads[name] for name in names)], rows)

    # What was scored.
    sentences = []
    if "scored" in summary:
        sentences.append(f"Scored: {summary['scored']}.")
    if summary.get("scored_clients"):
        share = f"{summary['scored_clients']:,} of the {summary['num_clients']:,} clients"
        sentences.append(f"A uniform sample of {share} was scored.")
    subject = "Accuracy and loss" if "accuracy" in last else "Losses"
    sentences.append(
        f"{subject} are computed on clients' test examples; means are weighted by number of examples."
    )
    direction = "high" if score.sign > 0 else "low"
    sentences.append(f"Clients are ranked by {score.label}; {direction} values are good.")
    return [table, Paragraph(" ".join(sentences))]


def never_trained(summary: Mapping[str, Any], score: Score) -> list[Element]:
    """Returns how the clients that never took part in training score, and what serves them."""
    entry = summary.get("never_trained") or {}
    count = entry.get("count")
    if not count:
        return []
    text = f"{count:,} client{' has' if count == 1 else 's have'} never trained"
    served = entry.get("served")
    if served:
        text += f" and predict{'s' if count == 1 else ''} with {served}"
    # A run of an earlier version has another score in this entry.
    is_same = entry.get("metric", score.name) == score.name
    theirs = score_text(score.name, entry.get("score") if is_same else None)
    others = score_text(score.name, entry.get("others") if is_same else None)
    if theirs is not None:
        text += f". Their mean {score.label} is {theirs}"
    if theirs is not None and others is not None:
        text += f", that of the others {others}"
    return [Paragraph(f"{text}.")]


def unseen(scores: Mapping[str, Any], score: Score) -> list[Element]:
    """Returns the scores of the clients held out of training."""
    rows = []
    for name, value in scores.items():
        metric = name.removeprefix("train_")
        if metric in SCORES or metric == score.name:
            split = "train" if name.startswith("train_") else "test"
            label = SCORES.get(metric, words(metric))
            rows.append([f"{split} {label}", score_text(metric, value)])
    table = [Table([], rows)] if rows else []
    return [*table, *clients(scores.get("per_client") or [], score)]


def clients(
    rows: Sequence[Mapping[str, Any]],
    score: Score,
    columns: Mapping[str, Mapping[int, Any]] | None = None,
    name: str = "",
) -> list[Element]:
    """Returns the table of the per-client rows of summary.json, worst first.

    Args:
        rows: The rows.
        score: The score that clients are ranked by.
        columns: Further columns, by heading and client.
        name: The table's id. With one, the clients' numbers are buttons.
    """
    if not rows:
        return []
    columns = columns or {}

    # The columns for which a client has an entry.
    metrics = [entry for entry in rows[0] if entry not in ("client", *CLIENT_HEADS)]
    heads = {}
    names = list(CLIENT_HEADS)
    names.insert(names.index("accuracy"), score.name)
    for entry in (*names, *metrics):
        if any(row.get(entry) is not None for row in rows):
            heads[entry] = CLIENT_HEADS.get(entry, words(entry))
    scores = {"accuracy", "loss", *metrics}

    def worst_first(row: Mapping[str, Any]) -> tuple[float, float]:
        value = row.get(score.name)
        loss = row.get("loss")
        rank = math.inf if value is None else score.sign * value
        return rank, math.inf if loss is None else -loss

    body = []
    for row in sorted(rows, key=worst_first):
        number = int(row["client"])
        cells: list[Any] = [ClientButton(number) if name else number]
        for entry in heads:
            value = row.get(entry)
            if entry in scores:
                value = score_text(entry, value)
            elif entry == "classes":
                value = classes_text(value or {})
            cells.append(value)
        cells += [values.get(number) for values in columns.values()]
        body.append(cells)
    caption = f"Worst clients first, by {score.label}. Click a heading to sort."
    headings = ["client", *heads.values(), *columns]
    return [Table(headings, body, caption, sortable=True, name=name)]


def classes_text(classes: Mapping[str, int]) -> str:
    """Formats the examples of each class; of many classes, of the rarest."""
    if len(classes) <= MAX_CLASSES:
        return ", ".join(f"{name}: {count}" for name, count in classes.items())
    name, count = min(classes.items(), key=lambda entry: entry[1])
    return f"{len(classes)} classes, fewest {name}: {count}"


def traffic(rows: Sequence[Mapping[str, Any]]) -> list[Element]:
    """Returns the bytes that a client has received and sent."""
    if not rows or "bytes_down" not in rows[-1]:
        return []
    down = rows[-1]["bytes_down"]
    up = rows[-1]["bytes_up"]
    if not down + up:
        return [Paragraph("No model was sent or received.")]
    rounds = max(rows[-1]["round"], 1)
    body = []
    for name, total in (("down", down), ("up", up), ("both", down + up)):
        body.append([name, readable(total), readable(total / rounds)])
    return [Table(["per client", "total", "per round"], body)]


def duration(rows: Sequence[Mapping[str, Any]]) -> list[Element]:
    """Returns the simulated seconds of a run."""
    total = rows[-1].get("simulated_seconds") if rows else None
    if total is None:
        return []
    rounds = max(rows[-1]["round"], 1)
    body = [["simulated seconds", f"{total:,.4g}"], ["per round", f"{total / rounds:,.4g}"]]
    return [Table([], body)]


def privacy(ledger: Mapping[str, Any] | None) -> list[Element]:
    """Returns the privacy bounds of the ledger, of examples and of whole clients."""
    ledger = ledger or {}
    bounds = {}
    if "epsilon" in ledger:
        bounds["of examples"] = ledger
    if "epsilon" in ledger.get("of_clients", {}):
        bounds["of whole clients"] = ledger["of_clients"]
    if not bounds:
        return []

    def row(name: str, text: Callable[[Mapping[str, Any]], str]) -> list[str]:
        return [name, *(text(entry) for entry in bounds.values())]

    body = [
        row("noise multiplier", lambda entry: f"{entry['noise_multiplier']:g}"),
        row("clipping norm", lambda entry: f"{entry['clip_norm']:g}"),
        row("delta", lambda entry: f"{entry['delta']:g}"),
        row("epsilon, maximum over clients", lambda entry: bound(max(losses(entry)))),
        row("epsilon, median over clients", lambda entry: bound(float(np.median(losses(entry))))),
    ]
    elements: list[Element] = [Table(["", *bounds], body)]
    for name, entry in bounds.items():
        text = EXAMPLES_COVERED if name == "of examples" else CLIENTS_COVERED
        omitted = entry.get("unaccounted")
        if omitted:
            text += f" Not included: {omitted}."
        elements.append(Paragraph(text))
    return elements


def losses(entry: Mapping[str, Any]) -> list[float]:
    """Returns each client's epsilon; infinite if there is no bound."""
    return [math.inf if value is None else value for value in entry["epsilon_per_client"]]


def bound(epsilon: float | None) -> str:
    """Formats an epsilon; None and infinity mean no bound."""
    return "no bound" if epsilon is None or math.isinf(epsilon) else f"{epsilon:.4g}"


def plan(summary: Mapping[str, Any]) -> list[Element]:
    """Returns the table of memory, execution and time."""
    rows = []
    for name, value in summary.get("plan") or []:
        rows.append([name, readable(value) if isinstance(value, int) else value])
    if summary.get("peak_memory_bytes") is not None:
        rows.append(["peak memory, measured", readable(summary["peak_memory_bytes"])])
    if summary.get("compile_seconds") is not None:
        rows.append(["compile time", seconds_text(summary["compile_seconds"])])
    if summary.get("seconds_per_round") is not None:
        rows.append(["time per round", seconds_text(summary["seconds_per_round"])])

    # Where the run's time went.
    seconds = summary.get("seconds")
    if isinstance(seconds, Mapping):
        for name, value in seconds.items():
            rows.append([f"time, {words(str(name))}", seconds_text(value)])
    return [Table([], rows, style="text")] if rows else []


def seconds_text(value: float | None) -> str | None:
    """Formats seconds with three digits."""
    return None if value is None else f"{value:.3g} s"


def config(content: Mapping[str, Any], method: str) -> list[Element]:
    """Returns the command that repeats the run, and the settings that it used."""
    elements: list[Element] = []
    command = content.get("command")
    if command:
        elements.append(Paragraph("Command of this run:"))
        elements.append(Code(command))

    # The environment. Nested entries, such as fingerprints, stay in config.json.
    environment = []
    for name, value in content.items():
        is_nested = isinstance(value, Mapping) and any(
            isinstance(entry, Mapping | list) for entry in value.values()
        )
        if value and not is_nested and name not in ("flags", "settings", "command"):
            environment.append([name, value])
    if environment:
        elements.append(Table([], environment, style="text"))

    # Settings, without hyperparameters of other methods.
    flags = content.get("flags")
    settings = flags or content.get("settings") or {}
    other_methods = METHODS.keys() - {method} if flags else set()
    rows = []
    for name, value in sorted(settings.items()):
        owner, dot, _ = name.partition(".")
        is_foreign = bool(dot) and owner in other_methods
        if value is not None and not is_foreign:
            rows.append([name, value])
    if rows:
        elements += [Heading("Settings"), Table([], rows, style="text")]
    return elements
