"""Pictures of comparisons: methods' scores, and time and memory over the number of clients."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pfljax.report.draw import draw
from pfljax.report.picture import GRAY, PALETTE, SYMBOLS, Axis, Panel, Series, colors


def method_points(values: Mapping[str, Any], axis: Axis, keys: Mapping[str, Sequence[str]] | None = None) -> Panel:
    """Describes each run of each method as a point, and the mean over a method's runs as a line.

    Args:
        values: One value per run, by method; None and NaN are not drawn.
        axis: The axis of the values.
        keys: For each run, what a click on its point leads to.
    """
    series = []
    for place, (method, shade) in enumerate(zip(values, colors(np.arange(len(values))), strict=True)):
        own, symbol, keys_of = np.array(values[method], float), SYMBOLS[place % len(SYMBOLS)], keys and keys[method]
        heights = np.full(len(own), float(place))
        series.append(Series(own, heights, "", "points", color=shade, symbol=symbol, size=8, keys=keys_of))
        if np.isfinite(own).sum() > 1:
            mean = float(np.nanmean(own))
            series.append(Series((mean, mean), (place - 0.32, place + 0.32), color=shade, width=3))
    return Panel(axis, _listed(values), series)


def difference_points(values: Mapping[str, tuple[float, float, float]], axis: Axis) -> Panel:
    """Describes methods' mean differences as points, their intervals as lines, and zero as a dashed line.

    Args:
        values: Mean difference and the ends of its interval, by method.
        axis: The axis of the differences.
    """
    every = [0.0, *itertools.chain(*values.values())]
    margin = 0.05 * (max(every) - min(every)) or 1.0
    axis = dataclasses.replace(axis, limits=(min(every) - margin, max(every) + margin))
    series = [Series((0.0, 0.0), (-0.6, len(values) - 0.4), color=GRAY, dash="dash")]
    for place, (mean, low, high) in enumerate(values.values()):
        series.append(Series(np.array([low, high]), np.full(2, float(place)), width=2))
        series.append(Series(np.array([mean]), np.array([float(place)]), "", "points", symbol="square", size=7))
    return Panel(axis, _listed(values), series)


def _listed(names: Iterable[str]) -> Axis:
    """Returns the axis of methods from top to bottom."""
    ticks = [(float(place), name if len(name) <= 24 else f"…{name[-23:]}") for place, name in enumerate(names)]
    return Axis(ticks=ticks, limits=(len(ticks) - 0.4, -0.6))


def method_curves(
    curves: Mapping[str, tuple[Any, Any, Any]],
    x: Axis,
    y: Axis,
    symbols: bool = True,
) -> Panel:
    """Describes a curve per method, with a band of one sample deviation over runs where there is one.

    Args:
        curves: Positions, means and sample deviations over runs, by method.
        x: The horizontal axis.
        y: The axis of the means.
        symbols: Whether each method has a symbol of its own.
    """
    series = []
    for place, (method, shade) in enumerate(zip(curves, colors(np.arange(len(curves))), strict=True)):
        at, (mean, spread) = np.asarray(curves[method][0]), np.asarray(curves[method][1:], float)
        if np.nanmax(spread, initial=0) > 0:
            series.append(Series(at, mean + spread, "", "band", mean - spread, shade))
        symbol = SYMBOLS[place % len(SYMBOLS)] if symbols and len(at) <= 60 else ""
        series.append(Series(at, mean, method, color=shade, width=2, symbol=symbol))
    return Panel(x, y, series, legend="best" if len(curves) <= len(PALETTE) else "none")


def comparison_figure(table: Sequence[Mapping]) -> Figure:
    """Plots methods' final scores, one point per seed, and scores over rounds, with deviations over runs.

    With a reference, also the differences to it.
    """
    score = "accuracy" if "accuracy" in table[0]["seeds"][0] else "loss"
    scale, unit = (100, ", percentage points") if score == "accuracy" else (1, "")
    last = {row["algorithm"]: [seed.get(score) for seed in row["seeds"]] for row in table}
    over = {row["algorithm"]: (row["rounds"], row["curve_mean"], row["curve_std"]) for row in table}
    of = lambda label: Axis(label, percent=score == "accuracy")
    panels = [
        method_points(last, of(f"test {score}, last round")),
        method_curves(over, Axis("round"), of(f"test {score}")),
    ]
    if any(row.get("clock_mean") for row in table):
        timed = {row["algorithm"]: (row["clock_mean"], row["curve_mean"], row["curve_std"]) for row in table}
        panels.append(method_curves(timed, Axis("simulated seconds, mean over runs"), of(f"test {score}")))
    differs = [row for row in table if np.isfinite(np.array(row.get("difference_low", np.nan), float))]
    if differs:
        names = ("difference", "difference_low", "difference_high")
        values = {row["algorithm"]: tuple(scale * row[name] for name in names) for row in differs}
        panels.append(difference_points(values, Axis(f"test {score} minus {differs[0]['reference']}'s{unit}")))
    return draw(panels, (6 * len(panels), max(4.2, 0.6 + 0.26 * len(table))))


def slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Returns the exponent a of the power law y = b x^a, fitted by least squares in log-log; None for a single x."""
    if len(set(x)) < 2:
        return None
    return float(np.polyfit(np.log(np.asarray(x, float)), np.log(np.asarray(y, float)), 1)[0])


def scaling_figure(lines: Mapping[str, Sequence[dict]], memory: str = "MiB on a device") -> Figure:
    """Plots time and memory of a round against the number of clients, log-log, with the slopes in the legends.

    Args:
        lines: Cells by line; each cell has "num_clients", "seconds_per_round" and "memory_bytes".
        memory: Label of the memory axis.
    """
    panels = []
    for key, unit, label in (("seconds_per_round", 1, "seconds per round"), ("memory_bytes", 2**20, memory)):
        series, every = [], np.array([cell[key] / unit for cells in lines.values() for cell in cells])
        styles = zip(colors(np.arange(len(lines))), itertools.cycle(SYMBOLS), strict=False)
        for (name, cells), (shade, symbol) in zip(lines.items(), styles, strict=False):
            cells = sorted(cells, key=lambda cell: cell["num_clients"])
            clients, values = ([cell[what] for cell in cells] for what in ("num_clients", key))
            fitted = slope(clients, values)
            text = name if fitted is None else f"{name}, slope {round(fitted, 2) + 0.0:.2f}"  # not -0.00
            series.append(Series(clients, np.array(values) / unit, text, color=shade, symbol=symbol))
        low, high = np.floor(np.log10(every.min())), np.ceil(np.log10(every.max()))
        limits = 10.0**low, 10.0 ** max(high, low + 1)  # whole decades, so that slow growth looks slow
        panels.append(Panel(Axis("clients K", log=True), Axis(label, log=True, limits=limits), series, legend="below"))
    return draw(panels, (11, 4.2 + 0.12 * max(len(lines) - 6, 0)))
