"""Pictures of comparisons, from the rows of a table or from runs: scores, differences, curves and single clients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from pfljax.evaluation.metrics import is_percent
from pfljax.report import terms
from pfljax.report.picture import (
    GRAY,
    PALETTE,
    SYMBOLS,
    Axis,
    Panel,
    Series,
    colors,
    drift_lines,
)
from pfljax.report.run_data import label_of

HELPED, HURT = PALETTE[:2]
# Pictures of scores over what has been spent: the entry of a row, and the axis.
SPENT = {
    "rounds": ("rounds", "round"),
    "megabytes": ("megabytes_curve", "MB received and sent per client"),
    "simulated_seconds": ("clock_mean", "simulated seconds, mean over runs"),
}
# Points of runs that would overlap are stacked: the distance from which they do not, as a share of the axis; the steps
# between their levels, and the levels, where rows are 1 apart.
CLOSE = 0.03
LEVEL = 0.19
LEVELS: tuple[int, ...] = (0, 1, -1, 2, -2)


def stacked(values: Float[np.ndarray, " n"], close: float) -> Float[np.ndarray, " n"]:
    """Returns vertical offsets with which points do not hide each other.

    Each point takes the first of `LEVELS` that has no other point within a distance. If there is none, it takes the
    level whose last point is farthest away.

    Args:
        values: Horizontal positions. NaN is not drawn.
        close: Distance within which two points of a level would overlap.
    """
    offsets = np.zeros(len(values))
    last: dict[int, float] = dict.fromkeys(LEVELS, -math.inf)  # position of each level's last point
    for point in np.argsort(values, kind="stable"):
        value = float(values[point])
        if math.isnan(value):
            continue
        free = [level for level in LEVELS if value - last[level] >= close]
        level = free[0] if free else min(LEVELS, key=lambda level: last[level])
        last[level] = value
        offsets[point] = level * LEVEL
    return offsets


def method_points(
    values: Mapping[str, Any], axis: Axis, keys: Mapping[str, Sequence[str]] | None = None
) -> Panel:
    """Describes each run of each method as a point, and the mean over a method's runs as a line across its row.

    Points that would hide each other are stacked.

    Args:
        values: One value per run, by method; None and NaN are not drawn.
        axis: The axis of the values.
        keys: For each run, the address that a click on its point leads to.
    """
    scores = {method: np.array(runs, float) for method, runs in values.items()}
    known = np.concatenate([np.empty(0), *scores.values()])
    known = known[np.isfinite(known)]
    close = CLOSE * np.ptp(known) if len(known) else 0.0

    series = []
    shades = colors(np.arange(len(scores)))
    for row, (method, runs) in enumerate(scores.items()):
        points = Series(
            x=runs,
            y=row + stacked(runs, close),
            kind="points",
            color=shades[row],
            symbol=SYMBOLS[row % len(SYMBOLS)],
            size=6,
            keys=keys and keys[method],
        )
        series.append(points)
        if np.isfinite(runs).sum() > 1:
            mean = float(np.nanmean(runs))
            ends = (row - 0.45, row + 0.45)
            series.append(Series((mean, mean), ends, color=shades[row], width=2))
    return Panel(axis, rows_axis(scores), series)


def difference_points(values: Mapping[str, tuple[float, float, float]], axis: Axis) -> Panel:
    """Describes methods' mean differences as points, their intervals as lines with caps, and zero as a dashed line.

    Args:
        values: Mean difference and the ends of its interval, by method.
        axis: The axis of the differences.
    """
    # The axis shows zero, and a margin beside the caps.
    numbers = [0.0]
    for row in values.values():
        numbers.extend(row)
    margin = 0.05 * (max(numbers) - min(numbers)) or 1.0
    axis = dataclasses.replace(axis, limits=(min(numbers) - margin, max(numbers) + margin))

    series = [Series((0.0, 0.0), (-0.6, len(values) - 0.4), color=GRAY, dash="dash")]
    for row, (mean, low, high) in enumerate(values.values()):
        height = float(row)
        ends = np.array([low, high])
        series.append(Series(ends, np.full(2, height), kind="interval", width=2))
        point = np.array([mean])
        series.append(Series(point, np.array([height]), kind="points", symbol="square", size=7))
    return Panel(axis, rows_axis(values), series)


def client_gains(gains: Float[np.ndarray, " n"], axis: Axis) -> Panel:
    """Describes single clients' gains as bars, from the largest to the smallest: those who are helped, and hurt.

    Args:
        gains: Gains in descending order; positive is better.
        axis: The axis of the gains.
    """
    # A bar is two points of an area's edge.
    num_bars = max(len(gains), 1)
    borders = np.arange(len(gains) + 1) / num_bars
    edges = np.repeat(borders, 2)[1:-1]
    heights = np.repeat(gains, 2)
    zero = np.zeros(len(heights))

    series = [
        Series(edges, np.maximum(heights, 0), "helped", "band", zero, HELPED),
        Series(edges, np.minimum(heights, 0), "hurt", "band", zero, HURT),
        Series(edges, heights, color=GRAY, width=1),
    ]
    x = Axis("share of the clients of all runs", percent=True, limits=(0, 1))
    return Panel(x, axis, series)


def client_pairs(pairs: Float[np.ndarray, "n 2"], x: Axis, y: Axis) -> Panel:
    """Describes single clients' scores with two methods as points, and equal scores as a dashed line."""
    ends = np.array([pairs.min(), pairs.max()]) if len(pairs) else np.zeros(2)
    equal = Series(ends, ends, color=GRAY, dash="dash")
    points = Series(
        x=pairs[:, 0],
        y=pairs[:, 1],
        kind="points",
        color=HELPED,
        symbol="circle",
        size=4,
    )
    return Panel(x, y, [equal, points])


def rows_axis(names: Iterable[str]) -> Axis:
    """Returns the axis of methods from top to bottom, 1 apart. Long names lose their beginnings."""
    ticks = []
    for row, name in enumerate(names):
        text = name if len(name) <= 24 else f"…{name[-23:]}"
        ticks.append((float(row), text))
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
    shades = colors(np.arange(len(curves)))
    for row, (method, (positions, means, deviations)) in enumerate(curves.items()):
        spent = np.asarray(positions)
        mean = np.asarray(means, float)
        spread = np.asarray(deviations, float)
        if x.log and x.ticks:
            spent = np.maximum(spent, x.ticks[0][0])
        if np.nanmax(spread, initial=0) > 0:
            series.append(Series(spent, mean + spread, "", "band", mean - spread, shades[row]))
        symbol = SYMBOLS[row % len(SYMBOLS)] if symbols and len(spent) <= 60 else ""
        series.append(Series(spent, mean, method, color=shades[row], width=2, symbol=symbol))
    return Panel(x, y, series, legend="best" if len(curves) <= len(PALETTE) else "none")


def with_drifts(panel: Panel, drifts: Iterable[int]) -> Panel:
    """A panel of scores over rounds, with lines at the rounds after which clients' data changed."""
    scores = np.concatenate([np.asarray(series.y, float) for series in panel.series])
    return dataclasses.replace(panel, series=[*panel.series, *drift_lines(sorted(drifts), scores)])


def spent_axis(label: str, spent: Iterable[Any]) -> Axis:
    """Returns the axis of the resources that methods have spent, such as megabytes up to each evaluation.

    It is logarithmic if a method spends more than ten times as much as another that spends anything. Its first tick is
    then zero, at a third of the smallest positive value; the others are powers of ten.

    Args:
        label: The axis' label.
        spent: Resources of each method up to each evaluation. Shape (T,) each.
    """
    amounts = [np.asarray(amount, float) for amount in spent]
    totals = np.array([amount[-1] for amount in amounts])
    if not totals.any() or totals.max() <= 10 * totals[totals > 0].min():
        return Axis(label)

    joined = np.concatenate(amounts)
    low = joined[joined > 0].min()
    high = joined.max()
    first = math.ceil(math.log10(low))
    last = math.floor(math.log10(high))
    ticks = [(float(low / 3), "0")]
    for power in range(first, last + 1):
        ticks.append((10.0**power, f"{10.0**power:g}"))
    return Axis(label, ticks, log=True)


# Pictures of a table's rows


def panels_of_rows(rows: Sequence[Mapping]) -> dict[str, Panel]:
    """Returns the pictures of a table by name: "scores", and scores over "rounds", "megabytes", "simulated_seconds".

    With a reference, also "differences" to it and, for each other method, "clients-METHOD": single clients' gains.
    Methods that failed are left out.
    """
    rows = [row for row in rows if not row.get("failed")]
    score = rows[0].get("score") or ("accuracy" if "accuracy" in rows[0]["seeds"][0] else "loss")
    percent = is_percent(score)
    label = label_of(score)

    # Final scores, and curves.
    last = {row["method"]: [seed.get(score) for seed in row["seeds"]] for row in rows}
    panels = {"scores": method_points(last, Axis(f"{label}, last round", percent=percent))}
    for name, (entry, spent_label) in SPENT.items():
        spent = [row.get(entry) for row in rows]
        if not all(spent) or not any(np.any(amount) for amount in spent):
            continue
        curves = {row["method"]: (row[entry], row["curve_mean"], row["curve_std"]) for row in rows}
        x = Axis(spent_label) if name == "rounds" else spent_axis(spent_label, spent)
        panels[name] = method_curves(curves, x, Axis(label, percent=percent))
        if name == "rounds":
            drifts = {entry["round"] for row in rows for entry in row.get("drift") or ()}
            panels[name] = with_drifts(panels[name], drifts)

    # Differences to the reference.
    scale = 100 if percent else 1
    unit = ", percentage points" if percent else ""
    differences = {}
    reference = ""
    for row in rows:
        if np.isfinite(np.array(row.get("difference_low", np.nan), float)):
            names = ("difference", "difference_low", "difference_high")
            differences[row["method"]] = tuple(scale * row[name] for name in names)
            reference = row["reference"]
    if differences:
        axis = Axis(f"{label} minus {reference}'s{unit}, {terms.weighting(score)}")
        panels["differences"] = difference_points(differences, axis)

    # Gains of single clients.
    for row in rows:
        if row.get("client_gains"):
            axis = Axis(f"gain over {row['reference']}, {label}{unit}")
            gains = scale * np.array(row["client_gains"])
            panels[f"clients-{row['method']}"] = client_gains(gains, axis)
    return panels
