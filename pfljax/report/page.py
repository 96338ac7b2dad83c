"""The page of a run: one HTML file that opens without a network, from the files that the run has left."""

from __future__ import annotations

import base64
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfljax.core.errors import RunError
from pfljax.engine import processes
from pfljax.report import canvas, captions, content, sections
from pfljax.report.markup import Raw, choice, document, paragraph, plot, text
from pfljax.report.plots import Plots
from pfljax.training import files

NAME = "report.html"

KINDS = {"sharing": "who shares models", "weights": "weights"}
ORDERS = {"group": "true group", "found": "found group", "accuracy": "accuracy"}


def read(directory: Path) -> tuple[Plots, dict[str, Any]]:
    """The run in a folder, and its config.json.

    Raises:
        RunError: if they are damaged, or not those of a run.
    """
    try:
        plots, config = Plots.read(directory), files.read_json(directory / "config.json")
        _ = plots.summary["algorithm"], plots.summary["last"]["round"], plots.test
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise RunError(f"{directory}: the run's files are damaged, or not those of a run: {error}") from error
    return plots, config


def write(directory: Path) -> Path:
    """Draws a run's figures into figures/*.png and writes report.html, from what the run has left in `directory`.

    Of several processes, the first does so.

    Returns:
        The page.
    """
    directory = Path(directory)
    if processes.is_first():
        for name, figure in captions.draw(read(directory)[0], read_curve(directory)).items():
            canvas.save(figure, directory / "figures" / f"{name}.png")
    return write_page(directory)


def read_curve(directory: Path) -> dict[str, Any]:
    """The arrays of curve.npz, or none."""
    path = directory / "curve.npz"
    return files.read_npz(path) if path.exists() else {}


def write_page(directory: Path) -> Path:
    """Writes report.html alone, without the figures for papers; it needs none of them.

    Returns:
        The page.
    """
    directory = Path(directory)
    page = directory / NAME
    if not processes.is_first():
        return page
    plots, config = read(directory)
    summary, found = plots.summary, content.collect(plots)
    title = f"{summary['algorithm']} on {summary['dataset']}"
    facts = {"clients": "num_clients", "rounds": "rounds", "seed": "seed"}
    lead = ", ".join(f"{name} {summary[key]}" for name, key in facts.items() if key in summary)
    parts = {
        "Result": sections.result(summary) + paragraph(" ".join(found.notes)),
        "Who shares models": _sharing(plots, found.data),
        "One client": _client(found.data),
        "All clients": _clients(plots, found.data),
        "Scores over rounds": _scores(plots),
        "More figures": "".join(map(_picture, captions.extras(plots, read_curve(directory)).items())),
        "Clients that were not there in training": sections.unseen(summary.get("unseen") or {}),
        "Traffic": _traffic(plots),
        "Privacy": sections.privacy(summary.get("privacy")),
        "Memory and execution": sections.plan(summary),
        "Configuration": sections.config(config, summary["algorithm"]),
        "Download": DOWNLOADS,
    }
    files.write_text(page, document(title, lead, parts, found.data, ["ring.js", "sharing.js", "run.js"]))
    return page


def _sharing(plots: Plots, data: Mapping[str, Any]) -> str:
    """The matrix and the graph, with what is chosen for both."""
    sharing = data["sharing"]
    if sharing is None:
        return ""
    orders = dict(ORDERS) if len(set(data["group"].tolist())) > 1 else {k: v for k, v in ORDERS.items() if k != "group"}
    found = len(set(sharing["found"].tolist()))
    said = f"Clustering finds {found} group{'s' * (found > 1)} among the clients"
    if sharing["agreement"] is not None:
        said += f"; it agrees with the true groups to {sharing['agreement']:.2f} (adjusted Rand index; 1 is full)"
    columns = "models" if sharing["models"] else "clients' models"
    return (
        paragraph(
            "Two clients share models where they give them like weights: the cosine of their rows of the weights W, "
            f"as in W Wᵀ. W itself says which {columns} each client uses. Owners drift: a model belongs to those who "
            "use it, whoever held it at the start."
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
                "A row for each client; a click picks it. The bar at the left has the colors of the true groups.",
            )
        )
        + _square(
            plot(
                "graph",
                "Graph of the clients",
                "The clients in the order of the matrix, each joined to the "
                "three that it has most to do with. Lines of the picked one are thick.",
            )
        )
        + "</div>"
        + paragraph(f"{said}. It is an average linkage of the cosines of the last round, cut in its widest gap.")
    )


def _square(figure: str) -> str:
    return figure.replace('class="plot"', 'class="plot square"')


def _client(data: Mapping[str, Any]) -> str:
    out = (
        '<div class="controls"><label for="client">Client <select id="client"></select></label>'
        '<button type="button" id="previous">Previous</button><button type="button" id="next">Next</button></div>'
        '<p id="client-told" aria-live="polite"></p><div class="pair">'
        + plot("curves", "Scores of the client over rounds", "Its scores, and those of the median client.")
    )
    if data["labels"] is not None:
        out += plot("labels", "Classes of the client's training examples", "The classes of its training examples.")
    if data["sharing"] is not None:
        out += plot("neighbors", "Neighbors of the client over rounds", "With whom it shares models, or whom it uses.")
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
    return plot("ranking", "Every client's score in the last round", "Do the bad ones share a group?") + (
        f'<div id="clients-table">{table}</div>' if table else ""
    )


def _scores(plots: Plots) -> str:
    out = plot("spread", "Distribution of the clients' scores over rounds", "Does the worst tenth gain with the mean?")
    for number, name in enumerate(plots.measured):
        out += plot(f"measure-{number}", f"{name} over rounds", f"{name.replace('_', ' ')}, which the method measures.")
    return out


def _traffic(plots: Plots) -> str:
    shown = len(plots.bytes_sent) == len(plots.test) and plots.bytes_sent.any()
    drawn = plot("traffic", "Score against traffic", "Where does more traffic stop paying?") if shown else ""
    return sections.traffic(plots.rows) + drawn


def _picture(entry: tuple[str, captions.Captioned]) -> str:
    """A figure with its caption, the image in the page itself."""
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
    '<p class="note">The clients that the page shows; scores to four digits. results.npz has everything.</p>'
)
