"""Draws pictures with matplotlib, without a display or global state."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis as Drawn
from matplotlib.axis import XAxis
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pfljax.folder import files
from pfljax.report.picture import SYMBOLS, Axis, Heat, Panel, Series

MARKERS = dict(zip(SYMBOLS, "osDPX^v*", strict=True)) | {"": ""}
DASHES = {"solid": "-", "dash": "--", "dot": ":"}


class Shown(Figure):
    """A figure that notebooks show inline, even if pyplot was not imported."""

    def _repr_png_(self) -> bytes:
        return to_png(self)


def to_png(figure: Figure) -> bytes:
    layout = figure.get_layout_engine()
    buffer = io.BytesIO()
    if layout:  # savefig would compute the layout twice and draw twice
        layout.execute(figure)
        figure.set_layout_engine("none")
    # half the time, a fifth larger
    figure.savefig(buffer, format="png", dpi=130, pil_kwargs={"compress_level": 1})
    if layout:
        figure.set_layout_engine(layout)
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Writes the figure to a temporary file and renames it. It is a PDF if the name ends in .pdf, else a PNG."""
    if path.suffix == ".pdf":
        files.write_atomically(
            path, lambda file: figure.savefig(file, format="pdf", metadata={"CreationDate": None})
        )
    else:
        files.write_atomically(path, lambda file: file.write(to_png(figure)))


def draw(
    panels: Sequence[Panel],
    size: tuple[float, float] = (6.4, 4.0),
    columns: int = 0,
    alike: bool = False,
) -> Figure:
    """Draws panels side by side in a figure of `size` inches; in `columns`, or all in one row.

    If they are `alike`, all panels have the same axes, which are labeled at the figure's left and lower edge only.
    """
    (width, height) = size
    columns = columns or len(panels)
    rows = -(-len(panels) // columns)
    figure = Shown(figsize=size, layout=None if alike else "constrained")
    for place, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, place)
        draw_panel(axes, panel, width / columns)
        if alike:
            axes.tick_params(
                labelsize=8,
                labelbottom=place + columns > len(panels),
                labelleft=place % columns == 1,
            )
            axes.set(xlabel="", ylabel="")
    if alike:  # labels need not be measured
        margins = {
            "left": 0.6 / width,
            "right": 1 - 0.15 / width,
            "bottom": 0.6 / height,
            "top": 1 - 0.35 / height,
        }
        figure.subplots_adjust(**margins, wspace=0.12, hspace=0.25)
        figure.supxlabel(panels[0].x.label, fontsize=10)
        figure.supylabel(panels[0].y.label, fontsize=10, x=0.1 / width)
    return figure


def draw_panel(axes: Axes, panel: Panel, width: float) -> None:
    """Draws a panel into axes of some inches in width."""
    if panel.heat is not None:
        _heat(axes, panel.heat, width)
    else:
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        for series in panel.series:
            _series(axes, series)
        if panel.series and all(np.asarray(series.x).dtype.kind == "i" for series in panel.series):
            axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    for drawn, axis, scale, limits in (
        (axes.xaxis, panel.x, axes.set_xscale, axes.set_xlim),
        (axes.yaxis, panel.y, axes.set_yscale, axes.set_ylim),
    ):
        if axis.log:
            scale("log")
        if axis.limits is not None:
            limits(*axis.limits)
        _ticks(drawn, axis)
    axes.set_title(panel.title, fontsize=9)
    if panel.legend != "none" and axes.get_legend_handles_labels()[0]:
        below = {"fontsize": 8, "ncols": 2, "loc": "upper center", "bbox_to_anchor": (0.5, -0.14)}
        axes.legend(frameon=False, **(below if panel.legend == "below" else {}))


def _series(axes: Axes, series: Series) -> None:
    label = series.name or None
    if series.kind == "band":
        axes.fill_between(
            series.x, series.low, series.y, color=series.color, alpha=0.18, linewidth=0, label=label
        )
        return
    style = DASHES[series.dash] if series.kind == "line" else ""
    axes.plot(
        series.x,
        series.y,
        color=series.color,
        linestyle=style,
        linewidth=series.width,
        marker=MARKERS[series.symbol],
        markersize=series.size,
        markeredgewidth=0,
        label=label,
    )


def _ticks(drawn: Drawn, axis: Axis) -> None:
    drawn.set_label_text(axis.label)
    if axis.percent:
        drawn.set_major_formatter(PercentFormatter(1, decimals=None))
        if isinstance(drawn, XAxis):  # wide labels, such as 97.5%, side by side
            drawn.set_major_locator(MaxNLocator(3))
    if axis.ticks is not None:
        drawn.set_ticks([place for place, _ in axis.ticks], [text for _, text in axis.ticks])


def _heat(axes: Axes, heat: Heat, width: float) -> None:
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
    for edge in heat.edges:
        axes.axhline(edge, color="0.35", linewidth=0.8)
        if not heat.columns:
            axes.axvline(edge, color="0.35", linewidth=0.8)
    for axis, names in ((axes.xaxis, heat.columns or heat.rows), (axes.yaxis, heat.rows)):
        size = min(9.0, 45 * width / len(names))  # in points, so that they stand side by side
        axis.set_ticks(np.arange(len(names)), names, fontsize=size) if size > 5 else axis.set_ticks(
            []
        )
    axes.tick_params("x", labelrotation=90 if len(heat.columns or heat.rows) > 20 else 0)
    axes.tick_params("y", pad=12 if heat.strip else 3, length=0 if heat.strip else 3)
    for start, stop, color in heat.strip:
        place = axes.get_yaxis_transform()
        axes.add_patch(
            Rectangle(
                (-0.03, start - 0.5),
                0.02,
                stop - start,
                color=color,
                transform=place,
                clip_on=False,
            )
        )
