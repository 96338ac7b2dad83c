"""Pictures of comparisons: methods' scores, and time and memory over the number of clients."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from pfljax.evaluation.metrics import is_percent
from pfljax.report.draw import draw, save
from pfljax.report.picture import GRAY, PALETTE, SYMBOLS, Axis, Panel, Series, colors
from pfljax.report.run_data import label_of

HELPED, HURT = PALETTE[:2]
# Pictures of scores over what has been spent: the entry of a row, and the axis.
OVER = {
    "rounds": ("rounds", "round"),
    "megabytes": ("megabytes_curve", "MB received and sent per client"),
    "simulated_seconds": ("clock_mean", "simulated seconds, mean over runs"),
}
PAPER: dict[Any, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}
PAPER |= {"pdf.fonttype": 42, "lines.markersize": 3}  # fonts that journals accept


def method_points(
    values: Mapping[str, Any], axis: Axis, keys: Mapping[str, Sequence[str]] | None = None
) -> Panel:
    """Describes each run of each method as a point, and the mean over a method's runs as a line.

    Args:
        values: One value per run, by method; None and NaN are not drawn.
        axis: The axis of the values.
        keys: For each run, what a click on its point leads to.
    """
    series = []
    for place, (method, shade) in enumerate(
        zip(values, colors(np.arange(len(values))), strict=True)
    ):
        own = np.array(values[method], float)
        symbol = SYMBOLS[place % len(SYMBOLS)]
        keys_of = keys and keys[method]
        heights = np.full(len(own), float(place))
        series.append(
            Series(own, heights, "", "points", color=shade, symbol=symbol, size=8, keys=keys_of)
        )
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
        series.append(
            Series(
                np.array([mean]), np.array([float(place)]), "", "points", symbol="square", size=7
            )
        )
    return Panel(axis, _listed(values), series)


def client_gains(gains: Float[np.ndarray, " n"], axis: Axis) -> Panel:
    """Describes single clients' gains as bars, from the largest to the smallest: those who are helped, and hurt.

    Args:
        gains: Gains in descending order; positive is better.
        axis: The axis of the gains.
    """
    n = max(len(gains), 1)
    edges = np.repeat(np.arange(len(gains) + 1) / n, 2)[1:-1]
    heights = np.repeat(gains, 2)
    zero = np.zeros(len(heights))
    series = [
        Series(edges, np.maximum(heights, 0), "helped", "band", zero, HELPED),
        Series(edges, np.minimum(heights, 0), "hurt", "band", zero, HURT),
        Series(edges, heights, color=GRAY, width=1),
    ]
    return Panel(
        Axis("share of the clients of all runs", percent=True, limits=(0, 1)), axis, series
    )


def client_pairs(pairs: Float[np.ndarray, "n 2"], x: Axis, y: Axis) -> Panel:
    """Describes single clients' scores with two methods as points, and equal scores as a dashed line."""
    ends = (
        np.array([np.min(pairs, initial=np.inf), np.max(pairs, initial=-np.inf)])
        if len(pairs)
        else np.zeros(2)
    )
    series = [
        Series(ends, ends, color=GRAY, dash="dash"),
        Series(pairs[:, 0], pairs[:, 1], "", "points", color=HELPED, symbol="circle", size=4),
    ]
    return Panel(x, y, series)


def _listed(names: Iterable[str]) -> Axis:
    """Returns the axis of methods from top to bottom."""
    ticks = [
        (float(place), name if len(name) <= 24 else f"…{name[-23:]}")
        for place, name in enumerate(names)
    ]
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
        x: The horizontal axis. If it is logarithmic, its first tick stands for zero (see `spent_axis`).
        y: The axis of the means.
        symbols: Whether each method has a symbol of its own.
    """
    series = []
    for place, (method, shade) in enumerate(
        zip(curves, colors(np.arange(len(curves))), strict=True)
    ):
        at = np.asarray(curves[method][0])
        (mean, spread) = np.asarray(curves[method][1:], float)
        if x.log and x.ticks:
            at = np.maximum(at, x.ticks[0][0])
        if np.nanmax(spread, initial=0) > 0:
            series.append(Series(at, mean + spread, "", "band", mean - spread, shade))
        symbol = SYMBOLS[place % len(SYMBOLS)] if symbols and len(at) <= 60 else ""
        series.append(Series(at, mean, method, color=shade, width=2, symbol=symbol))
    return Panel(x, y, series, legend="best" if len(curves) <= len(PALETTE) else "none")


def spent_axis(label: str, spent: Iterable[Any]) -> Axis:
    """Returns the axis of what methods have spent, such as megabytes up to each evaluation; shape (T,) for each.

    It is logarithmic if a method spends more than ten times as much as another that spends anything. Its first tick is
    then zero, at a third of the smallest positive value; the others are powers of ten.
    """
    spent = [np.asarray(each, float) for each in spent]
    totals = np.array([each[-1] for each in spent])
    every = np.concatenate(spent)
    if not totals.any() or totals.max() <= 10 * totals[totals > 0].min():
        return Axis(label)
    low = every[every > 0].min()
    high = every.max()
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return Axis(
        label,
        [(float(low / 3), "0"), *((10.0**power, f"{10.0**power:g}") for power in powers)],
        log=True,
    )


def comparison_figure(table: Sequence[Mapping]) -> Figure:
    """Plots methods' final scores, one point per seed, and scores over rounds, with deviations over runs.

    With a clock, also scores over simulated seconds; with a reference, also the differences to it.
    """
    shown = comparison_panels(table)
    panels = [
        shown[name]
        for name in ("scores", "rounds", "simulated_seconds", "differences")
        if name in shown
    ]
    return draw(panels, (6 * len(panels), max(4.2, 0.6 + 0.26 * len(table))))


def comparison_panels(table: Sequence[Mapping]) -> dict[str, Panel]:
    """Returns the pictures of a table by name: "scores", and scores over "rounds", "megabytes", "simulated_seconds".

    With a reference, also "differences" to it and, for each other method, "clients-METHOD": single clients' gains.
    """
    table = [row for row in table if not row.get("failed")]
    # Rows of earlier versions do not name it.
    score = table[0].get("score") or ("accuracy" if "accuracy" in table[0]["seeds"][0] else "loss")
    name = label_of(score)
    percent = is_percent(score)
    scale = 100 if percent else 1
    unit = ", percentage points" if percent else ""

    def of(label):
        return Axis(label, percent=percent)

    last = {row["method"]: [seed.get(score) for seed in row["seeds"]] for row in table}
    panels = {"scores": method_points(last, of(f"{name}, last round"))}
    for over_name, (key, label) in OVER.items():
        spent = [row.get(key) for row in table]
        if all(spent) and any(map(np.any, spent)):
            over = {row["method"]: (row[key], row["curve_mean"], row["curve_std"]) for row in table}
            axis = Axis(label) if over_name == "rounds" else spent_axis(label, spent)
            panels[over_name] = method_curves(over, axis, of(name))
    differs = [
        row for row in table if np.isfinite(np.array(row.get("difference_low", np.nan), float))
    ]
    if differs:
        names = ("difference", "difference_low", "difference_high")
        values = {row["method"]: tuple(scale * row[entry] for entry in names) for row in differs}
        label = f"{name} minus {differs[0]['reference']}'s{unit}"
        panels["differences"] = difference_points(values, Axis(label))
    for row in [row for row in table if row.get("client_gains")]:
        label = f"gain over {row['reference']}{unit or f', {name}'}"
        panels[f"clients-{row['method']}"] = client_gains(
            scale * np.array(row["client_gains"]), Axis(label)
        )
    return panels


def paper_figures(table: Sequence[Mapping], folder: Path, width: float = 3.3) -> list[Path]:
    """Writes each of `comparison_panels` as NAME.pdf and NAME.png, at the width of a paper's column.

    Args:
        table: The table's rows.
        folder: The folder, which is made if it is missing.
        width: Width in inches, 3.3 for a column and 6.8 for a page of two columns.

    Returns:
        Paths of the files.
    """
    import matplotlib  # heavy

    paths = []
    for name, panel in comparison_panels(table).items():
        listed = panel.y.ticks is not None  # a row for each method
        height = 0.5 + 0.2 * len(panel.y.ticks or ()) if listed else 0.75 * width
        with matplotlib.rc_context(PAPER):
            figure = draw([panel], (width, max(height, 1.2)))
            for kind in ("pdf", "png"):
                paths.append(folder / f"{name}.{kind}")
                save(figure, paths[-1])
    return paths


def slope(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float | None:
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
    for key, unit, label in (
        ("seconds_per_round", 1, "seconds per round"),
        ("memory_bytes", 2**20, memory),
    ):
        series = []
        every = np.array([cell[key] / unit for cells in lines.values() for cell in cells])
        styles = zip(colors(np.arange(len(lines))), itertools.cycle(SYMBOLS), strict=False)
        for (name, cells), (shade, symbol) in zip(lines.items(), styles, strict=False):
            cells = sorted(cells, key=lambda cell: cell["num_clients"])
            clients, values = ([cell[what] for cell in cells] for what in ("num_clients", key))
            fitted = slope(clients, values)
            # not -0.00
            text = name if fitted is None else f"{name}, slope {round(fitted, 2) + 0.0:.2f}"
            series.append(
                Series(clients, np.array(values) / unit, text, color=shade, symbol=symbol)
            )
        low = np.floor(np.log10(every.min()))
        high = np.ceil(np.log10(every.max()))
        # whole decades, so that slow growth looks slow
        limits = 10.0**low, 10.0 ** max(high, low + 1)
        panels.append(
            Panel(
                Axis("clients K", log=True),
                Axis(label, log=True, limits=limits),
                series,
                legend="below",
            )
        )
    return draw(panels, (11, 4.2 + 0.12 * max(len(lines) - 6, 0)))
