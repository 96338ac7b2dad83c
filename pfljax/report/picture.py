"""Descriptions of pictures as panels: `draw` makes matplotlib figures of them, and assets/page.js Plotly plots."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
from jaxtyping import Int
from matplotlib.colors import to_hex

# The colors of Okabe and Ito, which are safe for color blindness; gray takes the place of black, for dark pages.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#7F7F7F")
SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "triangle-down", "star")
GRAY = PALETTE[-1]
MAX_TICKS = 40  # up to this many clients, each has its own tick


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        label: Title.
        ticks: Positions and texts of the ticks; None: chosen by the renderer.
        percent: Whether fractions are shown in percent.
        log: Whether the axis is logarithmic.
        limits: First and last value; the axis is reversed if the first is larger.
    """

    label: str = ""
    ticks: Sequence[tuple[float, str]] | None = None
    percent: bool = False
    log: bool = False
    limits: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Series:
    """A line, points, or a band.

    Attributes:
        x: Horizontal positions. Shape (n,).
        y: Vertical positions. Shape (n,). NaN is not drawn.
        name: Entry in the legend, if any.
        kind: "line", "points", or "band": the area between `low` and `y`.
        low: A band's lower edge. Shape (n,).
        color: A color in hexadecimal digits.
        dash: Style of the line.
        width: Width of the line, in points.
        symbol: Symbol at each position, one of `SYMBOLS`; "" for none.
        size: Diameter of the symbols, in points.
        keys: What each point stands for on a page: a client's place, or a link. Clicking the point selects it, and the
            page's data say by key what the pointer shows.
    """

    x: Any
    y: Any
    name: str = ""
    kind: Literal["line", "points", "band"] = "line"
    low: Any = None
    color: str = PALETTE[0]
    dash: Literal["solid", "dash", "dot"] = "solid"
    width: float = 1.5
    symbol: str = ""
    size: float = 5.0
    keys: Any = None


@dataclasses.dataclass(frozen=True)
class Heat:
    """A heat map of a matrix, row 0 at the top.

    Attributes:
        values: The matrix. Shape (n, m). None: the page fills it in. NaN is not drawn.
        rows: Names of the rows.
        columns: Names of the columns; (): the matrix is square, and columns are ordered like rows.
        label: Title of the color bar.
        limits: Lowest and highest value.
        diverging: Whether the colors have a middle.
        edges: Positions of lines between groups of rows, and of columns if these are ordered like rows.
        strip: Group colors left of the rows, by runs of rows: (start, stop, color).
    """

    values: Any
    rows: Sequence[str]
    columns: Sequence[str] = ()
    label: str = ""
    limits: tuple[float, float] = (0.0, 1.0)
    diverging: bool = False
    edges: Sequence[float] = ()
    strip: Sequence[tuple[int, int, str]] = ()


@dataclasses.dataclass(frozen=True)
class Panel:
    """A pair of axes and what they show.

    Attributes:
        x: The horizontal axis.
        y: The vertical axis.
        series: Lines, points and bands; later ones cover earlier ones.
        heat: A heat map instead.
        title: Title above the axes.
        legend: Where the names of the series stand in a figure; a page shows them below the plot.
    """

    x: Axis
    y: Axis
    series: Sequence[Series] = ()
    heat: Heat | None = None
    title: str = ""
    legend: Literal["best", "below", "none"] = "best"


def colors(groups: Int[np.ndarray, " n"]) -> list[str]:
    """Returns a color for each entry of `groups`: from the palette for few groups, from a color map for many."""
    values, place = np.unique(groups, return_inverse=True)
    shades = PALETTE
    if len(values) > len(PALETTE):
        shades = [to_hex(shade) for shade in matplotlib.colormaps["viridis"](np.linspace(0, 0.95, len(values)))]
    return [shades[k] for k in place]


def plain(description: Any) -> Any:
    """Returns a description for JSON: fields by name, and numbers with five significant digits."""
    if dataclasses.is_dataclass(description) and not isinstance(description, type):
        return {field.name: plain(getattr(description, field.name)) for field in dataclasses.fields(description)}
    if isinstance(description, list | tuple):
        return [plain(item) for item in description]
    if isinstance(description, np.ndarray) and description.dtype.kind == "f":
        return rounded(description, 5)
    return description


def rounded(values: np.ndarray, digits: int) -> np.ndarray:
    """Rounds numbers to a few significant digits, to keep the page small."""
    values = np.asarray(values, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 10.0 ** (digits - 1 - np.floor(np.log10(np.abs(values))))
        return np.where(np.isfinite(scale), np.round(values * scale) / scale, values)
