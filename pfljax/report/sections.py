"""The text and tables of a run's page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pfljax.contract.host import readable
from pfljax.report.markup import Raw, paragraph, score, table, text
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
}


def result(summary: Mapping[str, Any]) -> str:
    """Returns the scores of the last and best round, and what was scored."""
    last = summary["last"]
    best = summary.get("best")
    heads = SCORES | {name: name.replace("_", " ") for name in summary.get("metrics", ())}
    names = [name for name in heads if name in last]

    def line(label, row):
        return [label, row.get("round"), *(score(name, row.get(name)) for name in names)]

    body = [line("last", last)]
    if best:
        body.append(
            line(f"best by {str(best.get('selected_by', 'train_loss')).replace('_', ' ')}", best)
        )
    said = f"Scored: {summary['scored']}. " if "scored" in summary else ""
    if summary.get("scored_clients"):
        share = f"{summary['scored_clients']:,} of the {summary['num_clients']:,} clients"
        said += f"A uniform sample of {share} was scored. "
    if "accuracy" in last:
        said += "Accuracy and loss are computed on clients' test examples; means are weighted by number of examples."
    else:
        said += "Losses are means over clients' test examples, weighted by number of examples."
    return table(["", "round", *(heads[name] for name in names)], body) + paragraph(said)


def unseen(scores: Mapping[str, Any]) -> str:
    """Returns the scores of the clients held out of training."""
    named = [name for name in scores if name.removeprefix("train_") in SCORES]
    body = [
        (
            ("train " if name.startswith("train_") else "test ")
            + SCORES[name.removeprefix("train_")],
            score(name.removeprefix("train_"), scores[name]),
        )
        for name in named
    ]
    return (table([], body) if named else "") + clients(scores.get("per_client") or [])


def clients(
    rows: Sequence[Mapping[str, Any]],
    more: Mapping[str, Mapping[int, Any]] | None = None,
    pickable: bool = False,
) -> str:
    """Returns the table of the per-client rows of summary.json, worst first.

    `more` has further columns, by heading and client. If the clients are `pickable`, their numbers are buttons.
    """
    if not rows:
        return ""
    more = more or {}
    own = {
        name: name.replace("_", " ") for name in rows[0] if name not in ("client", *CLIENT_HEADS)
    }
    heads = {
        name: head
        for name, head in {**CLIENT_HEADS, **own}.items()
        if any(row.get(name) is not None for row in rows)
    }

    def number(k):
        return (
            Raw(f'<button type="button" data-client="{int(k)}">{int(k)}</button>')
            if pickable
            else int(k)
        )

    def cell(name, value):
        return score(name, value) if name in ("accuracy", "loss", *own) else value

    body = [
        [
            number(row["client"]),
            *(cell(name, row.get(name)) for name in heads),
            *(values.get(row["client"]) for values in more.values()),
        ]
        for row in sorted(rows, key=_badness)
    ]
    return table(
        ["client", *heads.values(), *more],
        body,
        "sortable",
        "Worst clients first. Click a heading to sort.",
    )


def _badness(row: Mapping[str, Any]) -> tuple[float, float]:
    accuracy = row.get("accuracy")
    loss = row.get("loss")
    return (np.inf if accuracy is None else accuracy, np.inf if loss is None else -loss)


def traffic(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the bytes that a client has received and sent."""
    if not rows or "bytes_down" not in rows[-1]:
        return ""
    down = rows[-1]["bytes_down"]
    up = rows[-1]["bytes_up"]
    rounds = max(rows[-1]["round"], 1)
    if not down + up:
        return paragraph("No model was sent or received.")
    each = (("down", down), ("up", up), ("both", down + up))
    return table(
        ["per client", "total", "per round"],
        [(name, readable(n), readable(n / rounds)) for name, n in each],
    )


def duration(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the simulated seconds of a run."""
    total = rows[-1].get("simulated_seconds") if rows else None
    if total is None:
        return ""
    lines = [
        ("simulated seconds", f"{total:,.4g}"),
        ("per round", f"{total / max(rows[-1]['round'], 1):,.4g}"),
    ]
    return table([], lines)


def privacy(ledger: Mapping[str, Any] | None) -> str:
    """Returns the privacy bounds of the ledger, of examples and of whole clients."""
    ledger = ledger or {}
    parts = {"of examples": ledger, "of whole clients": ledger.get("of_clients", {})}
    parts = {name: part for name, part in parts.items() if "epsilon" in part}
    if not parts:
        return ""
    lines = {
        "noise multiplier": lambda part: f"{part['noise_multiplier']:g}",
        "clipping norm": lambda part: f"{part['clip_norm']:g}",
        "delta": lambda part: f"{part['delta']:g}",
        "epsilon, maximum over clients": lambda part: bound(max(losses(part))),
        "epsilon, median over clients": lambda part: bound(float(np.median(losses(part)))),
    }
    out = table(["", *parts], [[name, *map(told, parts.values())] for name, told in lines.items()])
    covers = {
        "of examples": "The bound of examples covers the gradients of local training and treats mini-batches as "
        "Poisson samples. ",
        "of whole clients": "The bound of whole clients covers the sums of updates, and thus the global model. ",
    }
    for name, part in parts.items():
        omitted = part.get("unaccounted")
        out += paragraph(covers[name] + (f"Not included: {omitted}." if omitted else ""))
    return out


def losses(part: Mapping[str, Any]) -> list[float]:
    """Each client's epsilon; infinite if there is no bound."""
    return [math.inf if value is None else value for value in part["epsilon_per_client"]]


def bound(epsilon: float | None) -> str:
    """Formats an epsilon; None and infinity mean no bound."""
    return "no bound" if epsilon is None or math.isinf(epsilon) else f"{epsilon:.4g}"


def plan(summary: Mapping[str, Any]) -> str:
    """Returns the table of memory and execution."""
    lines = [
        (name, readable(v) if isinstance(v, int) else v) for name, v in summary.get("plan") or []
    ]
    if summary.get("peak_memory_bytes") is not None:
        lines.append(("peak memory, measured", readable(summary["peak_memory_bytes"])))
    for name, key in (("compile time", "compile_seconds"), ("time per round", "seconds_per_round")):
        if summary.get(key) is not None:
            lines.append((name, f"{summary[key]:.3g} s"))
    return table([], lines, "text") if lines else ""


def config(content: Mapping[str, Any], method: str) -> str:
    """Returns the command that repeats the run, and the settings that it used."""
    command = content.get("command")
    out = f"<p>Command of this run:</p><pre>{text(command)}</pre>" if command else ""
    rest = {
        name: value
        for name, value in content.items()
        if name not in ("flags", "settings", "command") and value
    }
    if rest:
        out += table([], rest.items(), "text")
    given = content.get("flags") or content.get("settings") or {}
    others = METHODS.keys() - {method} if content.get("flags") else set()
    own = {
        name: v
        for name, v in given.items()
        if v is not None and not ("." in name and name.split(".")[0] in others)
    }
    return out + (f"<h3>Settings</h3>{table([], sorted(own.items()), 'text')}" if own else "")
