"""The report page of a run: one HTML file, made from the run's files, that works offline."""

from __future__ import annotations

import base64
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfljax.contract.errors import RunError
from pfljax.exchange import processes
from pfljax.folder import files
from pfljax.report import canvas, captions, content, sections
from pfljax.report.markup import Raw, choice, document, paragraph, plot, text
from pfljax.report.plots import Plots

NAME = "report.html"

KINDS = {"sharing": "who shares models", "weights": "weights"}
ORDERS = {"group": "true group", "found": "found group", "accuracy": "accuracy"}


def read(directory: Path) -> tuple[Plots, dict[str, Any]]:
    """Reads the run in a folder and its config.json.

    Raises:
        RunError: if the files are damaged or do not belong to a run.
    """
    try:
        plots, config = Plots.read(directory), files.read_json(directory / "config.json")
        _ = plots.summary["algorithm"], plots.summary["last"]["round"], plots.test
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise RunError(f"{directory}: the run's files are damaged, or this is not a run's folder: {error}") from error
    return plots, config


def write(directory: Path) -> Path:
    """Draws a run's figures to figures/*.png and writes report.html, from the files in `directory`.

    With several processes, only the first one writes.

    Returns:
        Path of the page.
    """
    directory = Path(directory)
    if processes.is_first():
        for name, figure in captions.draw(read(directory)[0], read_curve(directory)).items():
            canvas.save(figure, directory / "figures" / f"{name}.png")
    return write_page(directory)


def read_curve(directory: Path) -> dict[str, Any]:
    """Reads the arrays of curve.npz; empty if the file does not exist."""
    path = directory / "curve.npz"
    return files.read_npz(path) if path.exists() else {}


def write_page(directory: Path) -> Path:
    """Writes only report.html, which does not need the files in figures/.

    Returns:
        Path of the page.
    """
    directory = Path(directory)
    page = directory / NAME
    if not processes.is_first():
        return page
    plots, config = read(directory)
    summary, found = plots.summary, content.collect(plots)
    title = f"{summary['algorithm']} on {summary['dataset']}"
    facts = {"num_clients": "{:,} clients", "rounds": "{:,} rounds", "seed": "seed {}"}
    lead = ", ".join(text.format(summary[key]) for key, text in facts.items() if key in summary)
    parts = {
        "Result": sections.result(summary) + paragraph(" ".join(found.notes)),
        "Who shares models": _sharing(plots, found.data),
        "One client": _client(found.data),
        "All clients": _clients(plots, found.data),
        "Scores over rounds": _scores(plots),
        "More figures": "".join(map(_picture, captions.extras(plots, read_curve(directory)).items())),
        "Clients held out of training": sections.unseen(summary.get("unseen") or {}),
        "Traffic": _traffic(plots),
        "Privacy": sections.privacy(summary.get("privacy")),
        "Memory and execution": sections.plan(summary),
        "Configuration": sections.config(config, summary["algorithm"]),
        "Download": DOWNLOADS,
    }
    files.write_text(page, document(title, lead, parts, found.data, ["ring.js", "sharing.js", "run.js"]))
    return page


def _sharing(plots: Plots, data: Mapping[str, Any]) -> str:
    """Returns the matrix and the graph, with their controls."""
    sharing = data["sharing"]
    if sharing is None:
        return ""
    orders = {name: order for name, order in ORDERS.items() if name != "group" or plots.has_groups}
    bar = " The bar on the left shows the true groups." if plots.has_groups else ""
    found = len(set(sharing["found"].tolist()))
    said = f"Clustering finds {found} group{'s' * (found > 1)} of clients"
    if sharing["agreement"] is not None:
        said += f"; the adjusted Rand index with the true groups is {sharing['agreement']:.2f} (1: identical)"
    elif not plots.knows_groups:
        said += "; their true groups are unknown"
    columns = "models" if sharing["models"] else "clients' models"
    return (
        paragraph(
            "Two clients share models if they weight them alike: the plots show the cosine between their rows of the "
            f"weight matrix W, as in W Wᵀ. W itself shows which {columns} each client uses. Who uses a model can "
            "change during training: a model belongs to the clients that use it, not to its first owner."
        )
        + '<div class="controls"><label class="range" for="round">Round '
        '<input type="range" id="round" min="0" value="0" step="1">'
        '<output id="round-shown" for="round"></output></label>'
        '<button type="button" id="play">Play</button>'
        + choice("kind", "Show", KINDS)
        + choice("order", "Order by", orders)
        + '</div><p class="note" id="cosines" aria-live="polite"></p><div class="pair">'
        + _square(
            plot(
                "matrix",
                "Matrix of the clients",
                f"One row per client; click a row to select its client.{bar}",
            )
        )
        + _square(
            plot(
                "graph",
                "Graph of the clients",
                "Clients in the order of the matrix, each connected to its three "
                "strongest links. Lines of the selected client are thick.",
            )
        )
        + "</div>"
        + paragraph(f"{said}. It uses average linkage on the last round's cosines, cut in the widest gap.")
    )


def _square(figure: str) -> str:
    return figure.replace('class="plot"', 'class="plot square"')


def _client(data: Mapping[str, Any]) -> str:
    out = (
        '<div class="controls"><label for="client">Client <select id="client"></select></label>'
        '<button type="button" id="previous">Previous</button><button type="button" id="next">Next</button></div>'
        '<p id="client-told" aria-live="polite"></p><div class="pair">'
        + plot("curves", "Scores of the client over rounds", "The client's scores and the median client's.")
    )
    if data["labels"] is not None:
        out += plot("labels", "Classes of the client's training examples", "Classes of the client's training examples.")
    if data["sharing"] is not None:
        out += plot(
            "neighbors", "Neighbors of the client over rounds", "Whom it shares models with, or whose models it uses."
        )
    return out + "</div>"


def _clients(plots: Plots, data: Mapping[str, Any]) -> str:
    more: dict[str, dict[int, Any]] = {}
    ids = data["clients"].tolist()
    if data["sharing"] is not None:
        more["found group"] = dict(zip(ids, data["sharing"]["found"].tolist(), strict=True))
    ledger = plots.summary.get("privacy")
    if ledger:
        own = ledger["epsilon_per_client"]
        more["epsilon"] = {k: sections.bound(own[k]) for k in ids if k < len(own)}
    table = sections.clients(data["rows"] or [], more, pickable=True)
    ask = "Are the worst clients in the same group?" if plots.has_groups else "Which clients are the worst?"
    return plot("ranking", "Every client's score in the last round", ask) + (
        f'<div id="clients-table">{table}</div>' if table else ""
    )


def _scores(plots: Plots) -> str:
    out = plot(
        "spread", "Distribution of the clients' scores over rounds", "Does the worst tenth keep up with the mean?"
    )
    for number, name in enumerate(plots.measured):
        out += plot(f"measure-{number}", f"{name} over rounds", f"{name.replace('_', ' ')}, measured by the method.")
    return out


def _traffic(plots: Plots) -> str:
    shown = len(plots.bytes_sent) == len(plots.test) and plots.bytes_sent.any()
    drawn = plot("traffic", "Score against traffic", "When does more traffic stop paying off?") if shown else ""
    return sections.traffic(plots.rows) + drawn


def _picture(entry: tuple[str, captions.Captioned]) -> str:
    """Returns a figure with its caption; the image is embedded in the page."""
    name, (figure, caption) = entry
    image = base64.b64encode(canvas.to_png(figure)).decode()
    width = round(figure.get_figwidth() * 96)
    return Raw(
        f'<figure><img src="data:image/png;base64,{image}" width="{width}" alt="{text(name.replace("_", " "))}">'
        f"<figcaption>{text(caption)}</figcaption></figure>"
    )


DOWNLOADS = (
    '<div class="controls"><button type="button" id="csv-rounds">Rounds (CSV)</button>'
    '<button type="button" id="csv-clients">Clients (CSV)</button>'
    '<button type="button" id="csv-scores">Scores by client and round (CSV)</button></div>'
    '<p class="note">Only clients on this page; scores have four digits. results.npz has everything.</p>'
)
