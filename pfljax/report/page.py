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
from pfljax.report import content, draw, plots, sections
from pfljax.report.elements import (
    Choice,
    ClientPicker,
    Controls,
    Element,
    Image,
    Paragraph,
    Plot,
    RoundSlider,
    SideBySide,
    downloads,
)
from pfljax.report.rendering import document
from pfljax.report.run_data import RunData

NAME = "report.html"

RELATIONS = {"sharing": "who shares models", "weights": "weights"}
ORDERS = {"group": "true group", "found": "found group", "score": "score"}
SQUARE = "min(35rem, 115vw)"  # height of the matrix and the graph
PIXELS = 96  # per inch

RING = (
    "Clients in the order of the matrix, each connected to its three strongest links. Lines of the selected client are "
    "thick."
)
CLUSTERING = "It uses average linkage on the last round's cosines, cut in the widest gap."
TRAFFIC = Plot("traffic", "Score against traffic", "When does more traffic stop paying off?")
DURATION = Plot("duration", "Score against simulated time", "How long until a score is reached?")
CURVE = (
    "Noisy training points, and each client's personal model on its own interval. Personal models should follow the "
    "curve where a single model cannot."
)
AFFINITY = "How much each client has gained from other clients' models so far."
DOWNLOADS = {
    "rounds": "Rounds (CSV)",
    "clients": "Clients (CSV)",
    "scores": "Scores by client and round (CSV)",
}
LEFT_OUT = "Only clients on this page; scores have four digits. results.npz has everything."


def write(directory: Path) -> Path:
    """Draws a run's figures to figures/*.png and writes report.html, from the files in `directory`.

    Returns the page's path. With several processes, only the first one writes.
    """
    directory = Path(directory)
    if processes.is_first():
        run = RunData.read(directory)
        for name, figure in plots.all_figures(run).items():
            draw.save(figure, directory / "figures" / f"{name}.png")
    return write_page(directory)


def write_page(directory: Path) -> Path:
    """Writes only report.html, which does not need the files in figures/. Returns its path."""
    page = Path(directory) / NAME
    if not processes.is_first():
        return page
    run = RunData.read(page.parent)
    data, notes = content.collect(run)
    title = f"{run.summary['method']} on {run.summary['dataset']}"
    text = document(title, lead(run.summary), page_sections(run, data, notes), data, ["run.js"])
    files.write_text(page, text)
    return page


def lead(summary: Mapping[str, Any]) -> str:
    """Returns the line below the page's heading."""
    facts = []
    if "num_clients" in summary:
        facts.append(f"{summary['num_clients']:,} clients")
    if "rounds" in summary:
        facts.append(f"{summary['rounds']:,} rounds")
    if "seed" in summary:
        facts.append(f"seed {summary['seed']}")
    return ", ".join(facts)


def page_sections(
    run: RunData, data: Mapping[str, Any], notes: list[str]
) -> dict[str, list[Element]]:
    """Returns the sections of the page, by heading."""
    summary = run.summary
    score = run.score
    result = sections.result(summary, score) + sections.never_trained(summary, score)
    if notes:
        result.append(Paragraph(" ".join(notes)))
    traffic = sections.traffic(run.rows)
    if "traffic" in data["panels"]:
        traffic.append(TRAFFIC)
    duration = sections.duration(run.rows)
    if "duration" in data["panels"]:
        duration.append(DURATION)
    figures = plots.extra_figures(run)
    return {
        "Result": result,
        "Who shares models": sharing_section(run, data["sharing"]),
        "One client": client_section(data),
        "All clients": clients_section(run, data),
        "Scores over rounds": scores_section(run),
        "More figures": [image(run, name, figure) for name, figure in figures.items()],
        "Clients held out of training": sections.unseen(summary.get("unseen") or {}, score),
        "Traffic": traffic,
        "Simulated time": duration,
        "Privacy": sections.privacy(summary.get("privacy")),
        "Memory, execution and time": sections.plan(summary),
        "Configuration": sections.config(run.config, summary["method"]),
        "Download": [downloads(DOWNLOADS), Paragraph(LEFT_OUT, style="note")],
    }


def sharing_section(run: RunData, sharing: Mapping[str, Any] | None) -> list[Element]:
    """Returns the matrix and the graph of who shares models, with their controls."""
    if sharing is None:
        return []

    # What the plots show.
    columns = "models" if sharing["models"] else "clients' models"
    about = (
        "Two clients share models if they weight them alike: the plots show the cosine between their rows of the "
        f"weight matrix W, as in W Wᵀ. W itself shows which {columns} each client uses. Who uses a model can "
        "change during training: a model belongs to the clients that use it, not to its first owner."
    )
    orders = dict(ORDERS)
    rows = "One row per client; click a row to select its client."
    if run.has_groups:
        rows += " The bar on the left shows the true groups."
    else:
        del orders["group"]

    # What clustering finds.
    num_groups = len(set(sharing["found"].tolist()))
    clustering = f"Clustering finds {num_groups} group{'s' if num_groups > 1 else ''} of clients"
    agreement = sharing["agreement"]
    if agreement is not None:
        clustering += (
            f"; the adjusted Rand index with the true groups is {agreement:.2f} (1: identical)"
        )
    elif not run.knows_groups:
        clustering += "; their true groups are unknown"

    controls = Controls(
        [RoundSlider(), Choice("kind", "Show", RELATIONS), Choice("by", "Order by", orders)]
    )
    matrix = Plot("matrix", "Matrix of the clients", rows, SQUARE)
    graph = Plot("graph", "Graph of the clients", RING, SQUARE)
    return [
        Paragraph(about),
        controls,
        Paragraph(name="cosines", style="note", live=True),
        SideBySide([matrix, graph]),
        Paragraph(f"{clustering}. {CLUSTERING}"),
    ]


def client_section(data: Mapping[str, Any]) -> list[Element]:
    """Returns the plots of a selected client."""
    figures: list[Element] = [
        Plot(
            "curves",
            "Scores of the client over rounds",
            "The client's scores and the median client's.",
        )
    ]
    if data["labels"] is not None:
        label = "Classes of the client's training examples"
        figures.append(Plot("labels", label, f"{label}."))
    if data["sharing"] is not None:
        caption = "Whom it shares models with, or whose models it uses."
        figures.append(Plot("neighbors", "Neighbors of the client over rounds", caption))
    text = Paragraph(name="client-text", live=True)
    return [Controls([ClientPicker()]), text, SideBySide(figures)]


def clients_section(run: RunData, data: Mapping[str, Any]) -> list[Element]:
    """Returns every client's score in the last round, as a plot and as a table."""
    shown = data["clients"].tolist()

    # Columns that summary.json does not have.
    columns: dict[str, dict[int, Any]] = {}
    if data["sharing"] is not None:
        groups = data["sharing"]["found"].tolist()
        columns["found group"] = dict(zip(shown, groups, strict=True))
    ledger = run.summary.get("privacy") or {}
    ledgers = {"epsilon": ledger, "client epsilon": ledger.get("of_clients", {})}
    for head, entry in ledgers.items():
        epsilons = entry.get("epsilon_per_client")
        if epsilons:
            columns[head] = {k: sections.bound(epsilons[k]) for k in shown if k < len(epsilons)}

    caption = "Which clients are the worst?"
    if run.has_groups:
        caption = "Are the worst clients in the same group?"
    ranking = Plot("ranking", "Every client's score in the last round", caption)
    rows = [run.client_rows[k] for k in shown if k in run.client_rows]
    return [ranking, *sections.clients(rows, run.score, columns, name="clients-table")]


def scores_section(run: RunData) -> list[Element]:
    """Returns the plots of scores and of the method's own metrics over rounds."""
    options = {name: score.label for name, score in run.scores.items()}
    elements: list[Element] = [
        Controls([Choice("score", "Show", options, ["spread"])]),
        Plot(
            "spread",
            "Distribution of the clients' scores over rounds",
            "Does the worst tenth keep up with the mean?",
        ),
    ]
    for number, name in enumerate(run.measured):
        caption = f"{sections.words(name)}, measured by the method."
        elements.append(Plot(f"measure-{number}", f"{name} over rounds", caption))
    return elements


def image(run: RunData, name: str, figure: Figure) -> Image:
    """Returns a figure with its caption; the image is embedded in the page."""
    return Image(
        data=base64.b64encode(draw.to_png(figure)).decode(),
        width=round(figure.get_figwidth() * PIXELS),
        label=sections.words(name),
        caption=CURVE if name == "curve" else affinity_caption(run),
    )


def affinity_caption(run: RunData) -> str:
    """Returns what the affinities of clients show."""
    if not run.has_groups:
        return AFFINITY
    target = " (or the block of each client's target group)" if "target" in run.used else ""
    caption = f"{AFFINITY} Clients are ordered by group. The blocks on the diagonal{target} should turn blue."
    share = collaboration.top_affinities(run.used["affinity"][-1], run.group, run.target)
    if not math.isnan(share):
        caption += (
            f" For {share:.0%} of the clients with two others in their target group, the two highest affinities are "
            "to such clients."
        )
    return caption
