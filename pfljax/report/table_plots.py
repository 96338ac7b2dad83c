"""Figures of a comparison, from the rows of its table, and of a study of many clients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pfljax.contract.errors import ArgumentError
from pfljax.report.comparisons import panels_of_rows
from pfljax.report.draw import draw, save
from pfljax.report.picture import SYMBOLS, Axis, Panel, Series, colors

PAPER: dict[Any, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "lines.markersize": 3,
    "pdf.fonttype": 42,  # fonts that journals accept
}
COMPARISON = ("scores", "rounds", "simulated_seconds", "differences")
WIDTH = 6.4  # inches

Rows = Sequence[Mapping[str, Any]]


def plot_comparison(rows: Rows) -> Figure:
    """Plots methods' final scores, one point per run, and scores over rounds, with deviations over runs.

    With a clock, also scores over simulated seconds; with a reference, also the differences to it.
    """
    panels = panels_of_rows(rows)
    shown = [panels[name] for name in COMPARISON if name in panels]
    height = max(4.2, 0.6 + 0.26 * len(rows))
    return draw(shown, (6 * len(shown), height))


def plot_scores(rows: Rows) -> Figure:
    """Plots methods' scores in the last round: one point per run, and a line at the mean."""
    return _plot(rows, "scores", "has no scores")


def plot_rounds(rows: Rows) -> Figure:
    """Plots methods' scores over rounds: means over runs, with bands of one sample deviation."""
    return _plot(rows, "rounds", "has no rounds in which all runs were evaluated")


def plot_traffic(rows: Rows) -> Figure:
    """Plots methods' scores over the megabytes that a client has received and sent."""
    return _plot(rows, "megabytes", "has no method that sends models")


def plot_duration(rows: Rows) -> Figure:
    """Plots methods' scores over simulated seconds."""
    return _plot(rows, "simulated_seconds", "has no simulated times; pass clock= to the runs")


def plot_differences(rows: Rows) -> Figure:
    """Plots methods' paired differences to the reference, with 95 % intervals."""
    text = "has no intervals of differences; they need reference= and several seeds or splits"
    return _plot(rows, "differences", text)


def plot_clients(rows: Rows, method: str) -> Figure:
    """Plots the gains of single clients over the reference, from the largest to the smallest."""
    panels = panels_of_rows(rows)
    prefix = "clients-"
    known = [name.removeprefix(prefix) for name in panels if name.startswith(prefix)]
    if method not in known:
        text = f"accepted: {', '.join(known)}" if known else "gains of clients need reference="
        raise ArgumentError("method", text, method)
    return draw([panels[prefix + method]])


def _plot(rows: Rows, name: str, missing: str) -> Figure:
    """Draws a picture of a table. Raises `ArgumentError` if it has none of this name."""
    panels = panels_of_rows(rows)
    if name not in panels:
        raise ArgumentError("table", missing)
    return draw([panels[name]], (WIDTH, height_of(panels[name], WIDTH)))


def height_of(panel: Panel, width: float) -> float:
    """Returns the height of a figure in inches: enough for a row per method, or three quarters of the width."""
    if panel.y.ticks is None:
        return 0.75 * width
    return max(0.5 + 0.3 * len(panel.y.ticks), 1.2)


def save_figures(rows: Rows, folder: Path, width: float = 3.3) -> list[Path]:
    """Writes each of a table's pictures as NAME.pdf and NAME.png, at the width of a paper's column.

    Args:
        rows: The table's rows.
        folder: The folder. It is created if it is missing.
        width: Width in inches, 3.3 for a column and 6.8 for a page of two columns.

    Returns:
        Paths of the files.
    """
    import matplotlib  # heavy

    paths = []
    for name, panel in panels_of_rows(rows).items():
        with matplotlib.rc_context(PAPER):
            figure = draw([panel], (width, max(height_of(panel, width), 1.2)))
            for suffix in ("pdf", "png"):
                path = folder / f"{name}.{suffix}"
                save(figure, path)
                paths.append(path)
    return paths


# Time and memory over the number of clients


def slope(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float | None:
    """Returns the exponent a of the power law y = b x^a, fitted by least squares in log-log; None for a single x."""
    if len(set(x)) < 2:
        return None
    log_x = np.log(np.asarray(x, float))
    log_y = np.log(np.asarray(y, float))
    return float(np.polyfit(log_x, log_y, 1)[0])


def scaling_figure(lines: Mapping[str, Sequence[dict]], memory: str = "MiB on a device") -> Figure:
    """Plots time and memory of a round against the number of clients, log-log, with the slopes in the legends.

    Args:
        lines: Cells by line; each cell has "num_clients", "seconds_per_round" and "memory_bytes".
        memory: Label of the memory axis.
    """
    panels = [
        scaling_panel(lines, "seconds_per_round", 1, "seconds per round"),
        scaling_panel(lines, "memory_bytes", 2**20, memory),
    ]
    height = 4.2 + 0.12 * max(len(lines) - 6, 0)
    return draw(panels, (11, height))


def scaling_panel(
    lines: Mapping[str, Sequence[dict]], entry: str, unit: float, label: str
) -> Panel:
    """Describes an entry of cells, in a unit, over the number of clients."""
    series = []
    shades = colors(np.arange(len(lines)))
    symbols = itertools.cycle(SYMBOLS)
    for (name, cells), color, symbol in zip(lines.items(), shades, symbols, strict=False):
        in_order = sorted(cells, key=lambda cell: cell["num_clients"])
        clients = [cell["num_clients"] for cell in in_order]
        values = np.array([cell[entry] / unit for cell in in_order])
        exponent = slope(clients, values)
        text = name
        if exponent is not None:
            text += f", slope {round(exponent, 2) + 0.0:.2f}"  # not -0.00
        series.append(Series(clients, values, text, color=color, symbol=symbol))

    # The axis has whole decades, so that slow growth looks slow.
    joined = np.concatenate([line.y for line in series])
    low = np.floor(np.log10(joined.min()))
    high = np.ceil(np.log10(joined.max()))
    limits = (10.0**low, 10.0 ** max(high, low + 1))
    x = Axis("clients K", log=True)
    return Panel(x, Axis(label, log=True, limits=limits), series, legend="below")
