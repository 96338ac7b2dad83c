"""Draws pictures with matplotlib, without a display or global state."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis as DrawnAxis
from matplotlib.axis import XAxis
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pfljax.folder import files
from pfljax.report.picture import SYMBOLS, Axis, Heat, Panel, Series

MARKERS = dict(zip(SYMBOLS, "osDPX^v*", strict=True)) | {"": ""}
DASHES = {"solid": "-", "dash": "--", "dot": ":"}
LEGEND_BELOW = {"ncols": 2, "loc": "upper center", "bbox_to_anchor": (0.5, -0.14)}
CAP = 9.0  # points; height of an interval's caps
SMALLEST_FONT = 5.0  # points; smaller names of rows are left out
CHARACTER = 0.56  # mean width of a character, relative to the font's size
INCH = 72  # points
BELOW = 0.5  # inches below a panel's axes
BESIDE = 0.7  # share of a panel's width that its axes take beside names of methods


class InlineFigure(Figure):
    """A figure that notebooks show inline, even if pyplot was not imported."""

    def _repr_png_(self) -> bytes:
        return to_png(self)


def to_png(figure: Figure) -> bytes:
    """Returns a figure as PNG."""
    # savefig would compute the layout twice and draw twice.
    layout = figure.get_layout_engine()
    if layout:
        layout.execute(figure)
        figure.set_layout_engine("none")

    # Weak compression takes half the time; files are a fifth larger.
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, pil_kwargs={"compress_level": 1})
    if layout:
        figure.set_layout_engine(layout)
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Writes the figure to a temporary file and renames it. It is a PDF if the name ends in .pdf, else a PNG."""

    def write_pdf(file: Any) -> None:
        figure.savefig(file, format="pdf", metadata={"CreationDate": None})

    def write_png(file: Any) -> None:
        file.write(to_png(figure))

    files.write_atomically(path, write_pdf if path.suffix == ".pdf" else write_png)


def draw(
    panels: Sequence[Panel],
    size: tuple[float, float] = (6.4, 4.0),
    columns: int = 0,
    alike: bool = False,
) -> Figure:
    """Draws panels side by side.

    Args:
        panels: Descriptions of the panels.
        size: Width and height of the figure in inches.
        columns: Number of panels in a row; 0: all of them.
        alike: Whether all panels have the same axes. They are then labeled at the figure's left and lower edge only.
    """
    width, height = size
    columns = columns or len(panels)
    rows = -(-len(panels) // columns)
    figure = InlineFigure(figsize=size, layout=None if alike else "constrained")
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        draw_panel(axes, panel, (width / columns, height / rows))
        if alike:
            is_lowest = number + columns > len(panels)
            is_first = number % columns == 1
            axes.tick_params(labelsize=8, labelbottom=is_lowest, labelleft=is_first)
            axes.set(xlabel="", ylabel="")
    if alike:
        _label_alike(figure, panels[0], size)
    return figure


def _label_alike(figure: Figure, panel: Panel, size: tuple[float, float]) -> None:
    """Labels a figure whose panels have the same axes. Margins are fixed, so labels need not be measured."""
    width, height = size
    figure.subplots_adjust(
        left=0.6 / width,
        right=1 - 0.15 / width,
        bottom=0.6 / height,
        top=1 - 0.35 / height,
        wspace=0.12,
        hspace=0.25,
    )
    figure.supxlabel(panel.x.label, fontsize=10)
    figure.supylabel(panel.y.label, fontsize=10, x=0.1 / width)


def draw_panel(axes: Axes, panel: Panel, size: tuple[float, float]) -> None:
    """Draws a panel that has some inches in width and height into axes."""
    width, height = size

    # Its content.
    if panel.heat is not None:
        _draw_heat(axes, panel.heat, width)
    else:
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        for series in panel.series:
            _draw_series(axes, series)
        types = {np.asarray(series.x).dtype.kind for series in panel.series}
        if types == {"i"}:
            axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))

    # Its axes, title and legend.
    _set_axis(axes.xaxis, panel.x, BESIDE * width, axes.set_xscale, axes.set_xlim)
    _set_axis(axes.yaxis, panel.y, height - BELOW, axes.set_yscale, axes.set_ylim)
    axes.set_title(panel.title, fontsize=9)
    _, names = axes.get_legend_handles_labels()
    if names and panel.legend == "below":
        axes.legend(frameon=False, fontsize=8, **LEGEND_BELOW)
    elif names and panel.legend == "best":
        axes.legend(frameon=False)


def _set_axis(
    drawn: DrawnAxis,
    axis: Axis,
    inches: float,
    set_scale: Callable[[str], Any],
    set_limits: Callable[[float, float], Any],
) -> None:
    """Sets the scale, limits, label and ticks of an axis, which has some inches for its label."""
    if axis.log:
        set_scale("log")
    if axis.limits is not None:
        set_limits(*axis.limits)
    characters = inches * INCH / (CHARACTER * float(drawn.label.get_fontsize()))
    drawn.set_label_text(textwrap.fill(axis.label, max(round(characters), 1)))
    if axis.percent:
        drawn.set_major_formatter(PercentFormatter(1, decimals=None))
        if isinstance(drawn, XAxis):  # wide labels, such as 97.5%, side by side
            drawn.set_major_locator(MaxNLocator(3))
    if axis.ticks is not None:
        positions = [position for position, _ in axis.ticks]
        texts = [text for _, text in axis.ticks]
        drawn.set_ticks(positions, texts)


def _draw_series(axes: Axes, series: Series) -> None:
    """Draws a line, points, a band or an interval."""
    label = series.name or None
    if series.kind == "band":
        axes.fill_between(
            series.x,
            series.low,
            series.y,
            color=series.color,
            alpha=0.18,
            linewidth=0,
            label=label,
        )
        return
    has_caps = series.kind == "interval"
    axes.plot(
        series.x,
        series.y,
        color=series.color,
        linestyle="" if series.kind == "points" else DASHES[series.dash],
        linewidth=series.width,
        marker="|" if has_caps else MARKERS[series.symbol],
        markersize=CAP if has_caps else series.size,
        markeredgewidth=series.width if has_caps else 0,
        label=label,
    )


def _draw_heat(axes: Axes, heat: Heat, width: float) -> None:
    """Draws a matrix."""
    low, high = heat.limits
    image = axes.imshow(
        heat.values,
        cmap="RdBu" if heat.diverging else "Blues",
        vmin=low,
        vmax=high,
        aspect="auto" if heat.columns else "equal",
        interpolation="nearest",
    )
    axes.figure.colorbar(image, ax=axes, label=heat.label, shrink=0.8)

    # Lines between groups.
    for edge in heat.edges:
        axes.axhline(edge, color="0.35", linewidth=0.8)
        if not heat.columns:
            axes.axvline(edge, color="0.35", linewidth=0.8)

    # Names of rows and columns, if they fit.
    columns = heat.columns or heat.rows
    _name_cells(axes.xaxis, columns, width)
    _name_cells(axes.yaxis, heat.rows, width)
    axes.tick_params("x", labelrotation=90 if len(columns) > 20 else 0)
    axes.tick_params("y", pad=12 if heat.strip else 3, length=0 if heat.strip else 3)

    # Colors of the rows' groups.
    for start, stop, color in heat.strip:
        bar = Rectangle(
            (-0.03, start - 0.5),
            0.02,
            stop - start,
            color=color,
            transform=axes.get_yaxis_transform(),
            clip_on=False,
        )
        axes.add_patch(bar)


def _name_cells(axis: DrawnAxis, names: Sequence[str], width: float) -> None:
    """Names the rows or columns of a matrix in a font so small that names stand side by side."""
    size = min(9.0, 45 * width / len(names))
    if size > SMALLEST_FONT:
        axis.set_ticks(np.arange(len(names)), names, fontsize=size)
    else:
        axis.set_ticks([])
