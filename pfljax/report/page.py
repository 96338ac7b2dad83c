"""The report page of a run: one HTML file, made from the run's files, that works offline."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pfljax.contract import processes
from pfljax.evaluation import collaboration
from pfljax.folder import files
from pfljax.report import content, draw, sections
from pfljax.report.markup import Raw, choice, controls, document, downloads, paragraph, plot, text
from pfljax.report.plots import Plots

NAME = "report.html"

KINDS = {"sharing": "who shares models", "weights": "weights"}
ORDERS = {"group": "true group", "found": "found group", "score": "score"}


SQUARE = "min(35rem, 115vw)"  # height of the matrix and the graph


def write(directory: Path) -> Path:
    """Draws a run's figures to figures/*.png and writes report.html, from the files in `directory`.

    Returns the page's path. With several processes, only the first one writes.
    """
    directory = Path(directory)
    if processes.is_first():
        for name, figure in Plots.read(directory).figures().items():
            draw.save(figure, directory / "figures" / f"{name}.png")
    return write_page(directory)


def write_page(directory: Path) -> Path:
    """Writes only report.html, which does not need the files in figures/. Returns its path."""
    page = Path(directory) / NAME
    if not processes.is_first():
        return page
    run = Plots.read(page.parent)
    summary = run.summary
    (data, notes) = content.collect(run)
    title = f"{summary['method']} on {summary['dataset']}"
    facts = {"num_clients": "{:,} clients", "rounds": "{:,} rounds", "seed": "seed {}"}
    lead = ", ".join(text.format(summary[key]) for key, text in facts.items() if key in summary)
    parts = {
        "Result": sections.result(summary) + paragraph(" ".join(notes)),
        "Who shares models": _sharing(run, data["sharing"]),
        "One client": _client(data),
        "All clients": _clients(run, data),
        "Scores over rounds": _scores(run),
        "More figures": "".join(_picture(run, *extra) for extra in run.extras().items()),
        "Clients held out of training": sections.unseen(summary.get("unseen") or {}),
        "Traffic": sections.traffic(run.rows) + (TRAFFIC if "traffic" in data["panels"] else ""),
        "Simulated time": sections.duration(run.rows)
        + (DURATION if "duration" in data["panels"] else ""),
        "Privacy": sections.privacy(summary.get("privacy")),
        "Memory and execution": sections.plan(summary),
        "Configuration": sections.config(run.config, summary["method"]),
        "Download": downloads(DOWNLOADS) + LEFT_OUT,
    }
    files.write_text(page, document(title, lead, parts, data, ["run.js"]))
    return page


def _sharing(run: Plots, sharing: Mapping[str, Any] | None) -> str:
    """Returns the matrix and the graph, with their controls."""
    if sharing is None:
        return ""
    orders = {name: order for name, order in ORDERS.items() if name != "group" or run.has_groups}
    bar = " The bar on the left shows the true groups." if run.has_groups else ""
    found = len(set(sharing["found"].tolist()))
    said = f"Clustering finds {found} group{'s' * (found > 1)} of clients"
    if sharing["agreement"] is not None:
        said += f"; the adjusted Rand index with the true groups is {sharing['agreement']:.2f} (1: identical)"
    elif not run.knows_groups:
        said += "; their true groups are unknown"
    columns = "models" if sharing["models"] else "clients' models"
    about = (
        "Two clients share models if they weight them alike: the plots show the cosine between their rows of the "
        f"weight matrix W, as in W Wᵀ. W itself shows which {columns} each client uses. Who uses a model can "
        "change during training: a model belongs to the clients that use it, not to its first owner."
    )
    row = f"One row per client; click a row to select its client.{bar}"
    ring = (
        "Clients in the order of the matrix, each connected to its three strongest links. Lines of the selected client "
        "are thick."
    )
    return (
        paragraph(about)
        + controls(SLIDER, choice("kind", "Show", KINDS), choice("by", "Order by", orders))
        + '<p class="note" id="cosines" aria-live="polite"></p><div class="pair">'
        + plot("matrix", "Matrix of the clients", row, SQUARE)
        + plot("graph", "Graph of the clients", ring, SQUARE)
        + "</div>"
        + paragraph(
            f"{said}. It uses average linkage on the last round's cosines, cut in the widest gap."
        )
    )


def _client(data: Mapping[str, Any]) -> str:
    out = controls(PICKER) + '<p id="client-told" aria-live="polite"></p><div class="pair">'
    out += plot(
        "curves", "Scores of the client over rounds", "The client's scores and the median client's."
    )
    if data["labels"] is not None:
        out += plot(
            "labels",
            "Classes of the client's training examples",
            "Classes of the client's training examples.",
        )
    if data["sharing"] is not None:
        about = "Whom it shares models with, or whose models it uses."
        out += plot("neighbors", "Neighbors of the client over rounds", about)
    return out + "</div>"


def _clients(run: Plots, data: Mapping[str, Any]) -> str:
    more: dict[str, dict[int, Any]] = {}
    if data["sharing"] is not None:
        more["found group"] = dict(
            zip(data["clients"].tolist(), data["sharing"]["found"].tolist(), strict=True)
        )
    ledger = run.summary.get("privacy") or {}
    for name, part in (("epsilon", ledger), ("client epsilon", ledger.get("of_clients", {}))):
        if own := part.get("epsilon_per_client"):
            more[name] = {
                k: sections.bound(own[k]) for k in data["clients"].tolist() if k < len(own)
            }
    rows = [run.client_rows[k] for k in data["clients"].tolist() if k in run.client_rows]
    table = sections.clients(rows, more, pickable=True)
    ask = (
        "Are the worst clients in the same group?"
        if run.has_groups
        else "Which clients are the worst?"
    )
    ranking = plot("ranking", "Every client's score in the last round", ask)
    return ranking + (f'<div id="clients-table">{table}</div>' if table else "")


def _scores(run: Plots) -> str:
    out = controls(
        choice(
            "score", "Show", {score.name: score.label for score in run.scores.values()}, "spread"
        )
    )
    about = "Does the worst tenth keep up with the mean?"
    out += plot("spread", "Distribution of the clients' scores over rounds", about)
    for number, name in enumerate(run.measured):
        out += plot(
            f"measure-{number}",
            f"{name} over rounds",
            f"{name.replace('_', ' ')}, measured by the method.",
        )
    return out


def _picture(run: Plots, name: str, figure: Figure) -> str:
    """Returns a figure with its caption; the image is embedded in the page."""
    image = base64.b64encode(draw.to_png(figure)).decode()
    width = round(figure.get_figwidth() * 96)
    caption = CURVE if name == "curve" else _affinity(run)
    return Raw(
        f'<figure><img src="data:image/png;base64,{image}" width="{width}" alt="{text(name.replace("_", " "))}">'
        f"<figcaption>{text(caption)}</figcaption></figure>"
    )


def _affinity(run: Plots) -> str:
    caption = "How much each client has gained from other clients' models so far."
    if not run.has_groups:
        return caption
    share = collaboration.top_affinities(run.used["affinity"][-1], run.group, run.target)
    other = " (or the block of each client's target group)" if "target" in run.used else ""
    caption += f" Clients are ordered by group. The blocks on the diagonal{other} should turn blue."
    if not math.isnan(share):
        caption += (
            f" For {share:.0%} of the clients with two others in their target group, the two highest affinities "
            "are to such clients."
        )
    return caption


SLIDER = (
    '<label class="range" for="round">Round <input type="range" id="round" min="0" value="0" step="1">'
    '<output id="round-shown" for="round"></output></label><button type="button" id="play">Play</button>'
)
PICKER = (
    '<label for="client">Client <select id="client"></select></label>'
    '<button type="button" id="previous">Previous</button><button type="button" id="next">Next</button>'
)
TRAFFIC = plot("traffic", "Score against traffic", "When does more traffic stop paying off?")
DURATION = plot("duration", "Score against simulated time", "How long until a score is reached?")
CURVE = (
    "Noisy training points, and each client's personal model on its own interval. Personal models should follow the "
    "curve where a single model cannot."
)
DOWNLOADS = {
    "rounds": "Rounds (CSV)",
    "clients": "Clients (CSV)",
    "scores": "Scores by client and round (CSV)",
}
LEFT_OUT = Raw(
    '<p class="note">Only clients on this page; scores have four digits. results.npz has everything.</p>'
)
