"""Figures that several papers have: accuracy against a hyperparameter, and over rounds by its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from pfljax.report.draw import draw
from pfljax.report.picture import GRAY, SYMBOLS, Axis, Panel, Series, colors

ACCURACY = Axis("test accuracy", percent=True)


def with_band(
    x: Sequence[float], mean: Sequence[float], std: Sequence[float], name: str, style: dict
) -> list[Series]:
    """Describes a line, with a band of one deviation if there is one; NaN, of a single run, is none."""
    at, middle, spread = (np.asarray(values, float) for values in (x, mean, np.nan_to_num(std)))
    band = (
        [Series(at, middle + spread, "", "band", middle - spread, style["color"])]
        if spread.any()
        else []
    )
    return [*band, Series(at, middle, name, size=6, **style)]


def crosses(x: Sequence[float], y: Sequence[float], color: str, name: str = "") -> Series:
    """Describes a paper's values."""
    return Series(
        np.asarray(x, float), np.asarray(y, float), name, "points", color=color, symbol="x", size=9
    )


def sweep_figure(
    points: Sequence[dict], panels: dict[str, str], paper: str = "the paper"
) -> Figure:
    """Plots accuracy against a hyperparameter: one panel per hyperparameter, one line per method; crosses are a
    paper's values.

    Args:
        points: For each point "panel", "method", "value", "accuracy", "paper" (a fraction, or None) and, for
            several runs, "accuracy_std".
        panels: Label of the horizontal axis, by panel. Panels without points are left out.
        paper: What the crosses are.
    """
    methods = list(dict.fromkeys(point["method"] for point in points))
    shades = dict(zip(methods, colors(np.arange(len(methods))), strict=True))
    found = []
    for name, label in panels.items():
        series = []
        for number, method in enumerate(methods):
            own = [point for point in points if (point["panel"], point["method"]) == (name, method)]
            if not own:
                continue
            values, scores, spread = (
                [p.get(n, 0) for p in own] for n in ("value", "accuracy", "accuracy_std")
            )
            style = {"color": shades[method], "symbol": SYMBOLS[number % len(SYMBOLS)]}
            series += with_band(values, scores, spread, method, style)
            known = [p for p in own if p["paper"] is not None]
            series += (
                [crosses([p["value"] for p in known], [p["paper"] for p in known], shades[method])]
                if known
                else []
            )
        if any(point["paper"] is not None for point in points) and series:
            series.append(crosses([np.nan], [np.nan], GRAY, paper))
        ticks = [
            (value, f"{value:g}")
            for value in sorted({p["value"] for p in points if p["panel"] == name})
        ]
        if series:
            found.append(
                Panel(
                    Axis(label, ticks),
                    ACCURACY,
                    series,
                    legend="below" if len(methods) > 5 else "best",
                )
            )
    height = 4.2 + 0.1 * max(len(methods) - 5, 0)
    return draw(found, (5.5 * len(found), height))


def curves_panel(lines: Sequence[dict], over: str, title: str = "") -> Panel:
    """Describes accuracy over rounds or local epochs, one line per value of a hyperparameter.

    Args:
        lines: Each has "title", "curve", and the key that `over` names.
        over: "rounds" or "epochs".
        title: Title of the panel.
    """
    label = {"rounds": "round", "epochs": "local epochs so far"}[over]
    shades = colors(np.arange(len(lines)))
    drawn = [
        Series(line[over], line["curve"], line["title"], color=c)
        for line, c in zip(lines, shades, strict=True)
    ]
    return Panel(Axis(label), ACCURACY, drawn, title=title)


def hyperparameter_curves(panels: Mapping[str, Sequence[dict]], over: str = "rounds") -> Figure:
    """Plots accuracy over rounds or local epochs: one panel per hyperparameter, with lines as in `curves_panel`."""
    found = [curves_panel(lines, over, hyperparameter) for hyperparameter, lines in panels.items()]
    return draw(found, (5.2 * len(found), 4))
