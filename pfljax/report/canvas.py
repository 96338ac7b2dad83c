"""Shared by all figures: colors, axes and PNGs, without a display or global state."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

from pfljax.folder import files

# The colors of Okabe and Ito, which are safe for color blindness.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")


class Picture(Figure):
    """A figure that notebooks show inline, even if pyplot was not imported."""

    def __init__(self, width: float, height: float, layout: Literal["constrained"] | None = "constrained"):
        super().__init__(figsize=(width, height), layout=layout)

    def _repr_png_(self) -> bytes:
        return to_png(self)


def to_png(figure: Figure) -> bytes:
    """Returns the figure as a PNG."""
    layout, buffer = figure.get_layout_engine(), io.BytesIO()
    if layout:  # savefig would compute the layout twice and draw twice
        layout.execute(figure)
        figure.set_layout_engine("none")
    figure.savefig(buffer, format="png", dpi=130)
    if layout:
        figure.set_layout_engine(layout)
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Writes the figure to a temporary file and renames it."""
    files.write_atomically(path, lambda file: file.write(to_png(figure)))


def colors(groups: Int[np.ndarray, " n"]) -> list:
    """Returns a color for each entry of `groups`: from the palette for few groups, from a color map for many."""
    values = np.unique(groups)
    if len(values) <= len(PALETTE):
        table = dict(zip(values.tolist(), PALETTE, strict=False))
    else:
        shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.95, len(values)))
        table = dict(zip(values.tolist(), shades, strict=True))
    return [table[group] for group in np.asarray(groups).tolist()]


def add_axes(figure: FigureBase, *position: int, **settings: Any) -> Axes:
    """Adds plain axes at a position (rows, columns, number), or over the whole figure if no position is given."""
    axes = figure.add_subplot(*(position or (1, 1, 1)))
    axes.set(**settings)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def byte_unit(num_bytes: float) -> tuple[float, str]:
    """Returns the largest unit in which the number is at least one: (its bytes, its name)."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= scale:
            return scale, unit
    return 1, "B"
