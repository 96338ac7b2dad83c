"""The figures of comparisons: methods, knobs, numbers of clients, other libraries."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pfljax.report.canvas import PALETTE, Picture, add_axes, colors
from pfljax.report.figures import draw_affinity


def comparison_figure(table: Sequence[dict]) -> Figure:
    """Methods side by side: last scores and scores over rounds, with deviations where there are several seeds."""
    num = len(table)
    figure = Picture(12, max(4.2, 0.6 + 0.26 * num))
    bars = add_axes(figure, 1, 2, 1, xlabel="test score, last round")
    over = add_axes(figure, 1, 2, 2, xlabel="round", ylabel="test score")
    shades = colors(np.arange(num))
    for place, (row, shade) in enumerate(zip(table, shades, strict=True)):
        error = row["accuracy_std"] if len(row["seeds"]) > 1 else None
        bars.barh(place, row["accuracy_mean"], xerr=error, color=shade, capsize=3, height=0.7)
        mean, spread = np.asarray(row["curve_mean"], float), np.asarray(row["curve_std"], float)
        over.plot(row["rounds"], mean, color=shade, label=row["algorithm"])
        over.fill_between(row["rounds"], mean - spread, mean + spread, color=shade, alpha=0.15, linewidth=0)
    bars.set_yticks(np.arange(num), [row["algorithm"] for row in table])
    bars.set_ylim(num - 0.4, -0.6)
    if num <= len(PALETTE):  # of more, the bars have the colors
        over.legend(frameon=False)
    return figure


def branch_weights(panels: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]], shown: int = 5) -> Figure:
    """Clients' weights of shared branches over rounds: a row of pictures for each title, clients by distribution.

    Args:
        panels: By title: rounds (T,), weights (T, K, B), distribution (K,).
        shown: How many of the rounds to show, the first and the last among them.
    """
    height = 0.8 + max(len(distribution) for _, _, distribution in panels.values()) * 0.18
    figure = Picture(2 * shown + 1, height * len(panels))
    parts = figure.subfigures(len(panels), 1, squeeze=False)[:, 0]
    for part, (title, (rounds, weights, distribution)) in zip(parts, panels.items(), strict=True):
        part.suptitle(title)
        order = np.argsort(distribution, kind="stable")
        places = np.unique(np.linspace(0, len(rounds) - 1, shown).round().astype(int))
        grid = part.subplots(1, len(places), squeeze=False)[0]
        for axes, place in zip(grid, places, strict=True):
            image = axes.imshow(weights[place][order], cmap="Blues", vmin=0, vmax=1, aspect="auto")
            axes.set(title=f"round {rounds[place]}", xlabel="branch", xticks=np.arange(weights.shape[2]))
            axes.set_yticks(np.arange(len(order)), [str(k) for k in order] if axes is grid[0] else [])
        grid[0].set_ylabel("client")
        part.colorbar(image, ax=list(grid), label="weight")
    return figure


MARKERS = "osD^vP*X<>"


def sweep_figure(points: Sequence[dict], panels: dict[str, str]) -> Figure:
    """Accuracy against a knob, a panel for each knob and a line for each method; crosses are a paper's values.

    Args:
        points: "panel", "algorithm", "value", "accuracy", "paper" (a share, or None) and, if there are several runs,
            "accuracy_std" of each point.
        panels: The label of the horizontal axis of each panel that has points.
    """
    panels = {panel: label for panel, label in panels.items() if any(point["panel"] == panel for point in points)}
    figure = Picture(5.5 * len(panels), 4.2)
    methods = list(dict.fromkeys(point["algorithm"] for point in points))
    shades = dict(zip(methods, colors(np.arange(len(methods))), strict=True))
    crowded = len(methods) > len(MARKERS) // 2
    for place, (panel, label) in enumerate(panels.items(), 1):
        axes = add_axes(figure, 1, len(panels), place, xlabel=label, ylabel="test accuracy")
        for method in methods:
            own = [point for point in points if (point["panel"], point["algorithm"]) == (panel, method)]
            if not own:
                continue
            values, scores, spread = (
                np.array([p.get(n, 0) for p in own]) for n in ("value", "accuracy", "accuracy_std")
            )
            marker = MARKERS[methods.index(method) % len(MARKERS)] if crowded else "o"
            axes.plot(values, scores, f"{marker}-", color=shades[method], label=method)
            axes.fill_between(values, scores - spread, scores + spread, color=shades[method], alpha=0.15, linewidth=0)
            known = [p for p in own if p["paper"] is not None]
            axes.plot([p["value"] for p in known], [p["paper"] for p in known], "x", color=shades[method], markersize=9)
        axes.set_xticks(sorted({point["value"] for point in points if point["panel"] == panel}))
        if any(point["paper"] is not None for point in points):
            axes.plot([], [], "x", color="gray", label="the paper's Table 2")
        if not crowded:
            axes.legend(frameon=False)
    if crowded and figure.axes:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


def knob_curves(panels: Mapping[str, Sequence[dict]], over: str = "rounds") -> Figure:
    """Accuracy over rounds or local epochs: a panel for each knob, a line for each of its values.

    Args:
        panels: By knob, its lines: "title", "curve", and what `over` names.
        over: "rounds" or "epochs".
    """
    figure = Picture(5.2 * len(panels), 4)
    for place, (knob, lines) in enumerate(panels.items(), 1):
        axes = add_axes(figure, 1, len(panels), place, ylabel="test accuracy" if place == 1 else "")
        _draw_curves(axes, lines, over)
        axes.set_title(knob)
    return figure


def _draw_curves(axes: Axes, lines: Sequence[dict], over: str) -> None:
    for line, shade in zip(lines, colors(np.arange(len(lines))), strict=True):
        axes.plot(line[over], line["curve"], color=shade, label=line["title"])
    axes.set_xlabel({"rounds": "round", "epochs": "local epochs so far"}[over])
    axes.legend(frameon=False)


def curves_and_last(lines: Sequence[dict], label: str) -> Figure:
    """FedFomo's Figure 9: accuracy over local epochs, a line for each value of a knob; right, the last against it.

    Args:
        lines: "title", "value", "epochs", "curve", "accuracy_mean" and "accuracy_std" of the last.
        label: The knob.
    """
    figure = Picture(10.4, 4)
    over = add_axes(figure, 1, 2, 1, ylabel="test accuracy")
    _draw_curves(over, lines, "epochs")
    last = add_axes(
        figure, 1, 2, 2, xlabel=label, ylabel="test accuracy, last round", xticks=[0, 0.2, 0.4, 0.6, 0.8, 1]
    )
    values, mean, std = ([line[name] for line in lines] for name in ("value", "accuracy_mean", "accuracy_std"))
    last.errorbar(values, mean, std, color=PALETTE[0], marker="o", capsize=3)
    return figure


def privacy_figure(affinities: Mapping[str, tuple[np.ndarray, np.ndarray]], points: Sequence[dict]) -> Figure:
    """FedFomo's Figure 5: whom clients gain from under noise; right, accuracy against the noise and its epsilon.

    Args:
        affinities: By title: affinities (K, K) after the last round, and distributions (K,).
        points: "algorithm", "sigma", "epsilon_text", "accuracy_mean", "accuracy_std", and "paper": (epsilon, accuracy
            in percent), drawn as a cross, or None.
    """
    width = 3.1 * len(affinities)
    figure = Picture(width + 5, 3.6)
    left, right = figure.subfigures(1, 2, width_ratios=[width, 5], squeeze=False)[0]
    grid = left.subplots(1, len(affinities), squeeze=False)[0]
    for axes, (title, (affinity, distribution)) in zip(grid, affinities.items(), strict=True):
        draw_affinity(axes, affinity, distribution)
        axes.set(xlabel="model of client", ylabel="client" if axes is grid[0] else "")
        axes.set_title(title, fontsize=9.5)
    axes = add_axes(right, xlabel="noise multiplier sigma, and epsilon", ylabel="test accuracy")
    methods = list(dict.fromkeys(point["algorithm"] for point in points))
    for method, shade in zip(methods, colors(np.arange(len(methods))), strict=True):
        own = [point for point in points if point["algorithm"] == method]
        sigmas, mean, std = ([point[name] for point in own] for name in ("sigma", "accuracy_mean", "accuracy_std"))
        axes.errorbar(sigmas, mean, std, color=shade, marker="o", capsize=3, label=method)
        known = [point for point in own if point["paper"]]
        values = [point["paper"][1] / 100 for point in known]
        axes.plot([point["sigma"] for point in known], values, "x", color=shade, markersize=9)
    if any(point["paper"] for point in points):
        axes.plot([], [], "x", color="gray", label="the paper, CIFAR-10")
    ticks = {point["sigma"]: f"{point['sigma']:g}\n{point['epsilon_text']}" for point in reversed(points)}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.legend(frameon=False)
    return figure


def slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The exponent a of the power law y = b x^a that is nearest by least squares in log-log; None for one x."""
    if len(set(x)) < 2:
        return None
    return float(np.polyfit(np.log(np.asarray(x, float)), np.log(np.asarray(y, float)), 1)[0])


def scaling_figure(lines: Mapping[str, Sequence[dict]], memory: str = "MiB on a device") -> Figure:
    """Time and memory of a round against the number of clients, log-log, with the slopes in the legends.

    Args:
        lines: Of each line the cells: "num_clients", "seconds_per_round", "memory_bytes".
        memory: What the memory is, for its axis.
    """
    figure = Picture(11, 4.2 + 0.12 * max(len(lines) - 6, 0))
    styles = list(zip(colors(np.arange(len(lines))), itertools.cycle("osD^vPX"), strict=False))
    for place, (key, unit, label) in enumerate(
        (("seconds_per_round", 1, "seconds a round"), ("memory_bytes", 2**20, memory)), 1
    ):
        axes = add_axes(figure, 1, 2, place, xlabel="clients K", ylabel=label, xscale="log", yscale="log")
        for (name, cells), (shade, marker) in zip(lines.items(), styles, strict=True):
            cells = sorted(cells, key=lambda cell: cell["num_clients"])
            clients, values = ([cell[what] for cell in cells] for what in ("num_clients", key))
            fitted = slope(clients, values)
            text = name if fitted is None else f"{name}, slope {round(fitted, 2) + 0.0:.2f}"  # not -0.00
            axes.plot(clients, np.array(values) / unit, color=shade, marker=marker, label=text)
        low, high = np.log10(axes.get_ylim())
        axes.set_ylim(10 ** np.floor(low), 10 ** np.ceil(high))  # whole decades: what hardly grows looks so
        # Below, where they hide nothing.
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    return figure


def benchmark_figure(rows: Sequence[dict]) -> Figure:
    """How many times faster a round is than the PyTorch loop, a bar a workload."""
    figure = Picture(8, 0.6 * len(rows) + 1.2)
    axes = add_axes(figure, xlabel="speedup over a PyTorch loop over clients")
    places = np.arange(len(rows))[::-1]
    bars = axes.barh(places, [row["ratio"] for row in rows], color=PALETTE[0], height=0.6)
    axes.bar_label(bars, [f"{row['ratio']:.1f} x" for row in rows], padding=4)
    axes.set_yticks(places, [row["workload"] for row in rows])
    axes.axvline(1, color="0.3", linewidth=1)
    axes.margins(x=0.12)
    return figure
