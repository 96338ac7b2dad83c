"""The figures of a run and of comparisons, from arrays; drawn without a display or global state."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pfljax.training import files

# Okabe and Ito's colors, which colorblind people can tell apart.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
MAX_PANELS = 16
MAX_ROWS = 500  # of a matrix of clients; of more clients, several share a row
MAX_TICKS = 40  # clients up to which each has a tick of its own


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Writes the figure under a temporary name and renames it."""
    files.write_atomically(path, lambda file: file.write(to_png(figure)))


def colors(groups: np.ndarray) -> list:
    """A color for each entry of `groups` (integers): a palette for few groups, a color map for many."""
    values = np.unique(groups)
    if len(values) <= len(PALETTE):
        table = dict(zip(values.tolist(), PALETTE, strict=False))
    else:
        shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.95, len(values)))
        table = dict(zip(values.tolist(), shades, strict=True))
    return [table[group] for group in np.asarray(groups).tolist()]


def _axes(figure: Figure, *position: int, **labels: str) -> Axes:
    axes = figure.add_subplot(*(position or (1, 1, 1)))
    axes.set(**labels)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def byte_unit(num_bytes: float) -> tuple[float, str]:
    """The largest unit that leaves a number of at least one: (its bytes, its name)."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= scale:
            return scale, unit
    return 1, "B"


def _name(task: str) -> str:
    return "test accuracy" if task == "classification" else "test mean squared error"


def _mean(scores: np.ndarray, sizes: np.ndarray | None) -> np.ndarray:
    """The mean of (T, K) over clients, weighted by `sizes` (K,); clients without examples (NaN) are left out."""
    real = ~np.isnan(scores)
    weights = real * (1.0 if sizes is None else sizes)
    return np.where(real, scores * weights, 0).sum(axis=1) / np.maximum(weights.sum(axis=1), 1e-12)


def accuracy_over_rounds(
    rounds: np.ndarray,
    test: np.ndarray,
    *,
    sizes: np.ndarray | None = None,
    train: np.ndarray | None = None,
    task: str = "classification",
) -> Figure:
    """Mean over clients and the worst tenth of them against rounds.

    Args:
        rounds: (T,).
        test: (T, K), accuracies in [0, 1] or losses; NaN for clients without examples.
        sizes: (K,) examples that weight the mean; None: all alike.
        train: (T, K), the same on training examples, drawn faintly.
        task: "classification" or "regression".
    """
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = _axes(figure, xlabel="round", ylabel=_name(task))
    good = task == "classification"
    if train is not None:
        axes.plot(rounds, _mean(train, None), color="0.6", linestyle=":", label="training examples, mean")
    axes.plot(rounds, _mean(test, sizes), color=PALETTE[0], marker=".", label="mean over clients")
    decile = np.nanpercentile(test, 10 if good else 90, axis=1)
    axes.plot(rounds, decile, color=PALETTE[1], marker=".", linestyle="--", label="worst tenth of the clients")
    if good:
        axes.set_ylim(0, 1.02)
    axes.legend(frameon=False)
    return figure


def per_client(scores: np.ndarray, distribution: np.ndarray, *, task: str = "classification") -> Figure:
    """Every client's last score (K,), sorted, colored by its true distribution (K,)."""
    figure = Figure(figsize=(7.2, 4), layout="constrained")
    axes = _axes(figure, xlabel="client, sorted", ylabel=_name(task))
    order = np.argsort(scores, kind="stable")
    size = float(np.clip(2000 / max(len(scores), 1), 6, 60))
    axes.scatter(np.arange(len(order)), scores[order], c=colors(distribution[order]), s=size, linewidths=0)
    if len(order) <= MAX_TICKS:
        axes.set_xticks(np.arange(len(order)), [str(k) for k in order])
        axes.set_xlabel("client (id), sorted")
    _legend_of_groups(axes, distribution)
    return figure


def _legend_of_groups(axes: Axes, distribution: np.ndarray) -> None:
    groups = np.unique(distribution)
    if len(groups) > len(PALETTE):
        return
    for group, color in zip(groups, colors(groups), strict=True):
        axes.scatter([], [], color=color, s=36, label=f"distribution {group}")
    axes.legend(frameon=False, ncols=min(len(groups), 4), loc="lower right")


def dense_collaboration(index: np.ndarray, weights: np.ndarray, num_models: int) -> np.ndarray:
    """The (K, N) matrix of weights out of index (K, J) and weights (K, J); a repeated index adds."""
    dense = np.zeros((len(index), num_models))
    np.add.at(dense, (np.arange(len(index))[:, None], index), weights)
    return dense


def collaboration_matrix(index: np.ndarray, weights: np.ndarray, distribution: np.ndarray, *, topology: str) -> Figure:
    """Who uses whose model, clients ordered by their true distribution, boundaries between distributions drawn.

    Args:
        index: (K, J) models.
        weights: (K, J), each row on the simplex.
        distribution: (K,).
        topology: Unless "shared", models are the clients' own and columns are ordered like rows. Where several clients
            share a row it is their mean, and a column sums over their models.
    """
    of_clients = topology != "shared"
    order = np.argsort(distribution, kind="stable")
    step = -(-len(order) // MAX_ROWS)  # clients to a row of the picture
    place = np.empty(len(order), int)
    place[order] = np.arange(len(order)) // step
    rows = place.max() + 1
    shown = place[index] if of_clients else index
    matrix = np.zeros((rows, rows if of_clients else int(index.max()) + 1))
    np.add.at(matrix, (place[:, None], shown), weights / np.bincount(place)[place][:, None])
    figure = Figure(figsize=(6, 5.2), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(
        matrix, cmap="Blues", vmin=0, vmax=max(float(matrix.max()), 1e-9), aspect="auto", interpolation="nearest"
    )
    each = "client" if step == 1 else f"client (rows of {step})"
    axes.set(xlabel=f"model of {each}" if of_clients else "model", ylabel=each)
    if not of_clients and matrix.shape[1] <= MAX_TICKS:
        axes.set_xticks(np.arange(matrix.shape[1]))
    figure.colorbar(image, label="weight for the client")
    groups = distribution[order]
    edges = (np.nonzero(np.diff(groups))[0] + 1) / step - 0.5
    if len(edges) < len(PALETTE):
        for edge in edges:
            axes.axhline(edge, color="0.35", linewidth=0.8)
            if of_clients:
                axes.axvline(edge, color="0.35", linewidth=0.8)
    if len(order) <= MAX_TICKS:
        names = [str(k) for k in order]
        axes.set_yticks(np.arange(len(order)), names)
        if of_clients:
            axes.set_xticks(np.arange(len(order)), names, rotation=90 if len(order) > 20 else 0)
    return figure


def weights_over_rounds(
    rounds: np.ndarray,
    index: np.ndarray,
    weights: np.ndarray,
    distribution: np.ndarray,
    *,
    topology: str,
    target: np.ndarray | None = None,
) -> Figure:
    """FedeRiCo's Figure 3, FedFomo's 6 and 7: a client's weights over rounds, a line a model, colored by distribution.

    Args:
        rounds: (T,).
        index: (T, K, J).
        weights: (T, K, J).
        distribution: (K,).
        topology: Unless "shared", models are the clients'; else each model has a color of its own.
        target: (K,) the distribution of each client's test data, where it differs from that of its training data.
    """
    target = distribution if target is None else target
    of_clients = topology != "shared"
    num_models = len(distribution) if of_clients else int(index.max()) + 1
    num_clients = len(distribution)
    by_group = np.argsort(distribution, kind="stable")
    shown = by_group[np.unique(np.linspace(0, num_clients - 1, min(MAX_PANELS, num_clients)).round().astype(int))]
    columns = min(4, len(shown))
    lines = -(-len(shown) // columns)
    figure = Figure(figsize=(2.6 * columns + 0.4, 2.3 * lines + 0.3), layout="constrained")
    groups = colors(np.concatenate([distribution, target]))
    of_owner, of_target = groups[: len(distribution)], groups[len(distribution) :]
    shades = of_owner if of_clients else colors(np.arange(num_models))
    for place, client in enumerate(shown):
        axes = _axes(figure, lines, columns, place + 1)
        dense = dense_collaboration(index[:, client], weights[:, client], num_models)  # (T, N)
        for model in np.nonzero(dense.max(axis=0) > 0.01)[0]:
            own = of_clients and model == client
            style = {"linewidth": 2.6, "linestyle": "-"} if own else {"linewidth": 1.3, "linestyle": "--"}
            axes.plot(rounds, dense[:, model], color=shades[model], **style)
        axes.set_ylim(-0.03, 1.03)
        same = target[client] == distribution[client]
        of = f"distribution {target[client]}" if same else f"has {distribution[client]}, wants {target[client]}"
        axes.set_title(f"client {client} ({of})", fontsize=8.5)
        # A bar in the color of the distribution that it wants; a light color would be hard to read as text.
        axes.axhline(1.03, color=of_target[client], linewidth=5)
        axes.tick_params(labelsize=8)
    figure.supxlabel("round", fontsize=10)
    figure.supylabel("weight", fontsize=10)
    return figure


def affinity_over_rounds(rounds: np.ndarray, affinity: np.ndarray, distribution: np.ndarray) -> Figure:
    """FedFomo's Figure 2: the affinity matrix (T, K, K) at up to four rounds, clients ordered by distribution (K,)."""
    shown = np.unique(np.linspace(0, len(rounds) - 1, min(4, len(rounds))).round().astype(int))
    order = np.argsort(distribution, kind="stable")
    figure = Figure(figsize=(3.1 * len(shown) + 0.8, 3.3), layout="constrained")
    off = ~np.eye(len(order), dtype=bool)  # a client's affinity to itself starts at 1 and would hide the others
    for place, number in enumerate(shown, 1):
        matrix = affinity[number][order][:, order].copy()
        limit = max(float(np.abs(matrix[off]).max(initial=0)), 1e-9)
        matrix[~off] = np.nan
        axes = figure.add_subplot(1, len(shown), place)
        image = axes.imshow(matrix, cmap="RdBu", vmin=-limit, vmax=limit, interpolation="nearest")
        axes.set(xlabel="model of client", ylabel="client" if place == 1 else "")
        axes.set_title(f"after round {rounds[number]}", fontsize=9.5)
        edges = np.nonzero(np.diff(distribution[order]))[0] + 0.5
        for edge in edges[: len(PALETTE) * 2]:
            axes.axhline(edge, color="0.35", linewidth=0.6)
            axes.axvline(edge, color="0.35", linewidth=0.6)
        if len(order) <= 20:
            axes.set_xticks(np.arange(len(order)), [str(k) for k in order], fontsize=6.5)
            axes.set_yticks(np.arange(len(order)), [str(k) for k in order], fontsize=6.5)
        figure.colorbar(image, shrink=0.8)
    return figure


def traffic_against_accuracy(
    num_bytes: np.ndarray, test: np.ndarray, *, sizes: np.ndarray | None = None, task: str = "classification"
) -> Figure:
    """Mean score of (T, K) against the bytes (T,) that a client has received and sent by then."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    scale, unit = byte_unit(float(num_bytes.max()))
    axes = _axes(figure, xlabel=f"{unit} received and sent by a client, so far", ylabel=_name(task))
    axes.plot(num_bytes / scale, _mean(test, sizes), color=PALETTE[2], marker=".")
    return figure


def measures(rounds: np.ndarray, values: dict[str, Sequence[float]]) -> Figure:
    """What a method measures of itself over rounds (T,), a panel for each name."""
    figure = Figure(figsize=(4.6 * len(values), 3.4), layout="constrained")
    for place, (name, line) in enumerate(values.items(), 1):
        axes = _axes(figure, 1, len(values), place, xlabel="round", ylabel=name.replace("_", " "))
        axes.plot(rounds, line, color=PALETTE[0], marker=".")
    return figure


def curve(
    x: np.ndarray,
    y: np.ndarray,
    client: np.ndarray,
    grid: np.ndarray,
    truth: np.ndarray,
    prediction: np.ndarray,
    reference: np.ndarray | None = None,
    reference_name: str = "",
) -> Figure:
    """FedeRiCo's Figure 1, left: noisy points, the true curve, personal models and one global model.

    Args:
        x: (n,) training inputs.
        y: (n,) targets.
        client: (n,) whose they are.
        grid: (G,).
        truth: (G,) the curve without noise.
        prediction: (K, G) personal predictions, NaN where they are not to be drawn.
        reference: (G,) the prediction of a single model.
        reference_name: Its name.
    """
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = _axes(figure, xlabel="x", ylabel="y")
    shades = colors(np.arange(len(prediction)))
    axes.scatter(x, y, c=[shades[k] for k in client], s=9, alpha=0.7, linewidths=0)
    axes.plot(grid, truth, color="0.4", linewidth=1.5, label="true curve")
    for number, (values, shade) in enumerate(zip(prediction, shades, strict=True)):
        axes.plot(grid, values, color=shade, linestyle="--", linewidth=2.2, label=None if number else "personal models")
    if reference is not None:
        axes.plot(grid, reference, color="k", linestyle=":", linewidth=2, label=reference_name)
    axes.legend(frameon=False)
    return figure


def comparison_figure(table: Sequence[dict]) -> Figure:
    """Methods side by side: last score with its deviation over seeds, and scores over rounds with a band."""
    num = len(table)
    figure = Figure(figsize=(12, max(4.2, 0.6 + 0.26 * num)), layout="constrained")
    bars = _axes(figure, 1, 2, 1, xlabel="test score, last round")
    over = _axes(figure, 1, 2, 2, xlabel="round", ylabel="test score")
    shades = colors(np.arange(num))
    for place, (row, shade) in enumerate(zip(table, shades, strict=True)):
        bars.barh(place, row["accuracy_mean"], xerr=row["accuracy_std"], color=shade, capsize=3, height=0.7)
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
    figure = Figure(figsize=(2 * shown + 1, height * len(panels)), layout="constrained")
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


def sweep_figure(points: Sequence[dict], panels: dict[str, str]) -> Figure:
    """Accuracy against a knob, a panel for each knob and a line for each method; crosses are a paper's values.

    Args:
        points: "panel", "algorithm", "value", "accuracy", "paper" (a share, or None) and, if there are several runs,
            "accuracy_std" of each point.
        panels: The label of the horizontal axis of each panel that has points.
    """
    panels = {panel: label for panel, label in panels.items() if any(point["panel"] == panel for point in points)}
    figure = Figure(figsize=(5.5 * len(panels), 4.2), layout="constrained")
    methods = list(dict.fromkeys(point["algorithm"] for point in points))
    shades = dict(zip(methods, colors(np.arange(len(methods))), strict=True))
    for place, (panel, label) in enumerate(panels.items(), 1):
        axes = _axes(figure, 1, len(panels), place, xlabel=label, ylabel="test accuracy")
        for method in methods:
            own = [point for point in points if (point["panel"], point["algorithm"]) == (panel, method)]
            if not own:
                continue
            values, scores, spread = (
                np.array([p.get(n, 0) for p in own]) for n in ("value", "accuracy", "accuracy_std")
            )
            axes.plot(values, scores, "o-", color=shades[method], label=method)
            axes.fill_between(values, scores - spread, scores + spread, color=shades[method], alpha=0.15, linewidth=0)
            known = [p for p in own if p["paper"] is not None]
            axes.plot([p["value"] for p in known], [p["paper"] for p in known], "x", color=shades[method], markersize=9)
        axes.set_xticks(sorted({point["value"] for point in points if point["panel"] == panel}))
        if any(point["paper"] is not None for point in points):
            axes.plot([], [], "x", color="gray", label="the paper's Table 2")
        axes.legend(frameon=False)
    return figure


def slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The exponent a of the power law y = b x^a that is nearest by least squares in log-log; None for one x."""
    if len(set(x)) < 2:
        return None
    return float(np.polyfit(np.log(np.asarray(x, float)), np.log(np.asarray(y, float)), 1)[0])


def scaling_figure(lines: dict[str, Sequence[dict]]) -> Figure:
    """Time and memory of a round against the number of clients, log-log, with the slopes in the legends.

    Args:
        lines: Of each line the cells: "num_clients", "seconds_per_round", "memory_bytes".
    """
    figure = Figure(figsize=(11, 4.2 + 0.12 * max(len(lines) - 6, 0)), layout="constrained")
    styles = list(zip(colors(np.arange(len(lines))), itertools.cycle("osD^vPX"), strict=False))
    for place, (key, unit, label) in enumerate(
        (("seconds_per_round", 1, "seconds a round"), ("memory_bytes", 2**20, "MiB on a device")), 1
    ):
        axes = _axes(figure, 1, 2, place, xlabel="clients K", ylabel=label, xscale="log", yscale="log")
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
    figure = Figure(figsize=(8, 0.6 * len(rows) + 1.2), layout="constrained")
    axes = _axes(figure, xlabel="speedup over a PyTorch loop over clients")
    places = np.arange(len(rows))[::-1]
    bars = axes.barh(places, [row["ratio"] for row in rows], color=PALETTE[0], height=0.6)
    axes.bar_label(bars, [f"{row['ratio']:.1f} x" for row in rows], padding=4)
    axes.set_yticks(places, [row["workload"] for row in rows])
    axes.axvline(1, color="0.3", linewidth=1)
    axes.margins(x=0.12)
    return figure
