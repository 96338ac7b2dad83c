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


@dataclasses.dataclass(frozen=True)
class Axis:
    label: str = ""  # title
    # positions and texts of the ticks; None: chosen by the renderer
    ticks: Sequence[tuple[float, str]] | None = None
    percent: bool = False  # whether fractions are shown in percent
    log: bool = False  # whether the axis is logarithmic
    # first and last value; the axis is reversed if the first is larger
    limits: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Series:
    """A line, points, a band, or an interval."""

    x: Any  # horizontal positions. Shape (n,).
    y: Any  # vertical positions. Shape (n,). NaN is not drawn.
    name: str = ""  # entry in the legend, if any
    # A band is the area between `low` and `y`; an interval is a line between two positions, with a cap at each end.
    kind: Literal["line", "points", "band", "interval"] = "line"
    low: Any = None  # a band's lower edge. Shape (n,).
    color: str = PALETTE[0]  # a color in hexadecimal digits
    dash: Literal["solid", "dash", "dot"] = "solid"  # style of the line
    width: float = 1.5  # width of the line, in points
    symbol: str = ""  # symbol at each position, one of `SYMBOLS`; "" for none
    size: float = 5.0  # diameter of the symbols, in points
    # What each point stands for on a page: a client's place, or a link. Clicking the point selects it, and the page's
    # data say by key what the pointer shows.
    keys: Any = None


@dataclasses.dataclass(frozen=True)
class Heat:
    """A heat map of a matrix, row 0 at the top."""

    values: Any  # the matrix. Shape (n, m). None: the page fills it in. NaN is not drawn.
    rows: Sequence[str]  # names of the rows
    # names of the columns; (): the matrix is square, and columns are ordered like rows
    columns: Sequence[str] = ()
    label: str = ""  # title of the color bar
    limits: tuple[float, float] = (0.0, 1.0)  # lowest and highest value
    diverging: bool = False  # whether the colors have a middle
    # Positions of lines between groups of rows, and of columns if these are ordered like rows
    edges: Sequence[float] = ()
    # group colors left of the rows, by runs of rows: (start, stop, color)
    strip: Sequence[tuple[int, int, str]] = ()


@dataclasses.dataclass(frozen=True)
class Panel:
    """A pair of axes and what they show."""

    x: Axis  # the horizontal axis
    y: Axis  # the vertical axis
    series: Sequence[Series] = ()  # lines, points and bands; later ones cover earlier ones
    heat: Heat | None = None  # a heat map instead
    title: str = ""  # title above the axes
    # Where the names of the series stand in a figure; a page shows them below the plot
    legend: Literal["best", "below", "none"] = "best"


def drift_lines(rounds: Sequence[int], scores: np.ndarray) -> list[Series]:
    """Describes vertical lines at the rounds after which clients' data changed, as high as the scores."""
    known = np.asarray(scores, float)
    known = known[np.isfinite(known)]
    if not known.size:
        return []
    ends = np.array([known.min(), known.max()])
    lines = []
    for number, drift in enumerate(rounds):
        name = "" if number else "clients' data change"
        lines.append(Series(np.full(2, float(drift)), ends, name, color=GRAY, dash="dash"))
    return lines


def colors(groups: Int[np.ndarray, " n"]) -> list[str]:
    """Returns a color for each entry of `groups`: from the palette for few groups, from a color map for many."""
    values, positions = np.unique(groups, return_inverse=True)
    shades = list(PALETTE)
    if len(values) > len(PALETTE):
        color_map = matplotlib.colormaps["viridis"]
        shades = [to_hex(shade) for shade in color_map(np.linspace(0, 0.95, len(values)))]
    return [shades[position] for position in positions]


def plain(description: Any) -> Any:
    """Returns a description for JSON: fields by name, and numbers with five significant digits."""
    if dataclasses.is_dataclass(description) and not isinstance(description, type):
        return {
            field.name: plain(getattr(description, field.name))
            for field in dataclasses.fields(description)
        }
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
