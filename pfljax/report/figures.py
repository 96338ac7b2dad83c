"""Figures of a run, drawn from arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int, Real
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pfljax.evaluation import collaboration
from pfljax.report.canvas import PALETTE, Picture, add_axes, byte_unit, colors

MAX_PANELS = 16
MAX_ROWS = 500  # rows of a matrix; with more clients, several share a row
MAX_TICKS = 40  # up to this many clients, each has its own tick


def _name(task: str) -> str:
    return "test accuracy" if task == "classification" else "test loss"


def _mean(scores: Float[np.ndarray, "T K"], sizes: Real[np.ndarray, " K"] | None) -> np.ndarray:
    """Returns the mean over clients, weighted by `sizes`; skips clients without examples (NaN)."""
    real = ~np.isnan(scores)
    weights = real * (1.0 if sizes is None else sizes)
    return np.where(real, scores * weights, 0).sum(axis=1) / np.maximum(weights.sum(axis=1), 1e-12)


def accuracy_over_rounds(
    rounds: Int[np.ndarray, " T"],
    test: Float[np.ndarray, "T K"],
    *,
    sizes: Real[np.ndarray, " K"] | None = None,
    train: Float[np.ndarray, "T K"] | None = None,
    task: str = "classification",
) -> Figure:
    """Plots the mean over clients and the worst tenth of clients over rounds.

    Args:
        rounds: The evaluated rounds.
        test: Accuracies in [0, 1] or losses; NaN for clients without examples.
        sizes: Numbers of examples, the weights of the mean; None: equal weights.
        train: The same scores on training examples, drawn faintly.
        task: "classification" or "regression".
    """
    figure = Picture(6.4, 4)
    axes = add_axes(figure, xlabel="round", ylabel=_name(task))
    good = task == "classification"
    if train is not None:
        axes.plot(rounds, _mean(train, None), color="0.6", linestyle=":", label="training examples, mean")
    axes.plot(rounds, _mean(test, sizes), color=PALETTE[0], marker=".", label="mean over clients")
    decile = np.nanpercentile(test, 10 if good else 90, axis=1)
    axes.plot(rounds, decile, color=PALETTE[1], marker=".", linestyle="--", label="worst tenth of clients")
    if good:
        axes.set_ylim(0, 1.02)
    axes.legend(frameon=False)
    return figure


def per_client(
    scores: Float[np.ndarray, " K"], distribution: Int[np.ndarray, " K"], *, task: str = "classification"
) -> Figure:
    """Plots every client's final score, sorted, and colored by its true distribution."""
    figure = Picture(7.2, 4)
    axes = add_axes(figure, xlabel="client, sorted", ylabel=_name(task))
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
    if not 1 < len(groups) <= len(PALETTE):
        return
    for group, color in zip(groups, colors(groups), strict=True):
        axes.scatter([], [], color=color, s=36, label=f"distribution {group}")
    axes.legend(frameon=False, ncols=min(len(groups), 4), loc="lower right")


def collaboration_matrix(
    index: Int[np.ndarray, "K J"],
    weights: Float[np.ndarray, "K J"],
    distribution: Int[np.ndarray, " K"],
    *,
    topology: str,
) -> Figure:
    """Plots which client uses which model, ordered by true distribution, with lines between distributions.

    Args:
        index: The models that each client uses.
        weights: Their weights; each row is on the simplex.
        distribution: Each client's true distribution.
        topology: Unless "shared", models are the clients' own, and columns are ordered like rows. If several clients
            share a row, the row is their mean, and a column sums over their models.
    """
    of_clients = topology != "shared"
    order = np.argsort(distribution, kind="stable")
    step = -(-len(order) // MAX_ROWS)  # clients per row of the image
    place = np.empty(len(order), int)
    place[order] = np.arange(len(order)) // step
    rows = place.max() + 1
    shown = place[index] if of_clients else index
    matrix = np.zeros((rows, rows if of_clients else int(index.max()) + 1))
    np.add.at(matrix, (place[:, None], shown), weights / np.bincount(place)[place][:, None])
    figure = Picture(6, 5.2)
    axes = figure.add_subplot()
    limit = max(float(matrix.max()), 1e-9)
    image = axes.imshow(matrix, cmap="Blues", vmin=0, vmax=limit, aspect="auto", interpolation="nearest")
    each = "client" if step == 1 else f"client (rows of {step})"
    axes.set(xlabel=f"model of {each}" if of_clients else "model", ylabel=each)
    figure.colorbar(image, label="weight for the client")
    edges = (np.nonzero(np.diff(distribution[order]))[0] + 1) / step - 0.5
    if len(edges) < len(PALETTE):
        _draw_edges(axes, edges, both=of_clients)
    if len(order) <= MAX_TICKS:
        names = [str(k) for k in order]
        axes.set_yticks(np.arange(len(order)), names)
        if of_clients:
            axes.set_xticks(np.arange(len(order)), names, rotation=90 if len(order) > 20 else 0)
    if not of_clients and matrix.shape[1] <= MAX_TICKS:
        axes.set_xticks(np.arange(matrix.shape[1]))
    return figure


def sharing_matrix(
    index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"], distribution: Int[np.ndarray, " K"]
) -> Figure:
    """Plots which clients share models: the cosines of clients' rows of weights, ordered by true distribution.

    Args:
        index: The models that each client uses.
        weights: Their weights.
        distribution: Each client's true distribution. With more than `MAX_ROWS` clients, some of each are shown.
    """
    shown = _spread(distribution, MAX_ROWS)
    figure = Picture(6, 5.2)
    axes = figure.add_subplot()
    image = axes.imshow(collaboration.cosines(index[shown], weights[shown]), cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="client", ylabel="client")
    figure.colorbar(image, label="cosine of the clients' weights")
    edges = np.nonzero(np.diff(distribution[shown]))[0] + 0.5
    if len(edges) < len(PALETTE):
        _draw_edges(axes, edges)
    if len(shown) <= MAX_TICKS:
        names = [str(k) for k in shown]
        axes.set_yticks(np.arange(len(shown)), names)
        axes.set_xticks(np.arange(len(shown)), names, rotation=90 if len(shown) > 20 else 0)
    return figure


def _draw_edges(axes: Axes, edges: np.ndarray, *, both: bool = True, width: float = 0.8) -> None:
    """Draws lines between the distributions: across the rows and, if `both`, across the columns."""
    for edge in edges:
        axes.axhline(edge, color="0.35", linewidth=width)
        if both:
            axes.axvline(edge, color="0.35", linewidth=width)


def weights_over_rounds(
    rounds: Int[np.ndarray, " T"],
    index: Int[np.ndarray, "T K J"],
    weights: Float[np.ndarray, "T K J"],
    distribution: Int[np.ndarray, " K"],
    *,
    topology: str,
    target: Int[np.ndarray, " K"] | None = None,
) -> Figure:
    """Plots each client's weights over rounds, one line per model (FedeRiCo, Figure 3; FedFomo, Figures 6 and 7).

    Args:
        rounds: The evaluated rounds.
        index: The models that each client uses.
        weights: Their weights.
        distribution: Each client's true distribution; it determines the color of the client's model.
        topology: Unless "shared", models are the clients' own. If "shared", each model has its own color.
        target: Distribution of each client's test data, if it differs from that of its training data.
    """
    target = distribution if target is None else target
    of_clients = topology != "shared"
    num_models = len(distribution) if of_clients else int(index.max()) + 1
    shown = _spread(distribution, MAX_PANELS)
    columns = min(4, len(shown))
    lines = -(-len(shown) // columns)
    width, height = 2.6 * columns + 0.4, 2.3 * lines + 0.3
    figure = Picture(width, height, layout=None)  # all panels are alike, so labels need not be measured
    margins = {"left": 0.6 / width, "right": 1 - 0.15 / width, "bottom": 0.6 / height, "top": 1 - 0.35 / height}
    figure.subplots_adjust(**margins, wspace=0.12, hspace=0.25)
    groups = colors(np.concatenate([distribution, target]))
    several = len(np.unique([distribution, target])) > 1
    of_owner, of_target = groups[: len(distribution)], groups[len(distribution) :]
    shades = of_owner if of_clients else colors(np.arange(num_models))
    limits = rounds[0] - 0.5, rounds[-1] + 0.5
    ticks = np.unique(MaxNLocator(4, integer=True).tick_values(rounds[0], rounds[-1]))
    ticks = ticks[(limits[0] <= ticks) & (ticks <= limits[1])]
    for place, client in enumerate(shown, 1):
        axes = add_axes(figure, lines, columns, place)
        dense = collaboration.dense(index[:, client], weights[:, client], num_models)  # (T, N)
        for model in np.nonzero(dense.max(axis=0) > 0.01)[0]:
            own = of_clients and model == client
            line, dashes = (2.6, "-") if own else (1.3, "--")
            axes.plot(rounds, dense[:, model], color=shades[model], linewidth=line, linestyle=dashes)
        axes.set(ylim=(-0.03, 1.03), xlim=limits, xticks=ticks, yticks=(0, 0.5, 1))
        has, wants = distribution[client], target[client]
        of = f" (distribution {wants})" if wants == has else f" (has {has}, wants {wants})"
        axes.set_title(f"client {client}{of if several else ''}", fontsize=8.5)
        # A bar has the color of the target distribution; text in a light color would be hard to read.
        axes.axhline(1.03, color=of_target[client], linewidth=5)
        below, left = place + columns > len(shown), (place - 1) % columns == 0
        axes.tick_params(labelsize=8, labelbottom=below, labelleft=left)
    figure.supxlabel("round", fontsize=10)
    figure.supylabel("weight", fontsize=10, x=0.1 / width)
    return figure


def _spread(distribution: np.ndarray, most: int) -> np.ndarray:
    """Returns up to `most` clients, ordered by distribution and spread over all distributions."""
    by_group = np.argsort(distribution, kind="stable")
    places = np.linspace(0, len(by_group) - 1, min(most, len(by_group))).round().astype(int)
    return by_group[np.unique(places)]


def affinity_over_rounds(
    rounds: Int[np.ndarray, " T"], affinity: Float[np.ndarray, "T K K"], distribution: Int[np.ndarray, " K"]
) -> Figure:
    """Plots the affinity matrix at up to four rounds, clients ordered by distribution (FedFomo, Figure 2)."""
    shown = np.unique(np.linspace(0, len(rounds) - 1, min(4, len(rounds))).round().astype(int))
    figure = Picture(3.1 * len(shown) + 0.8, 3.3)
    for place, number in enumerate(shown, 1):
        axes = figure.add_subplot(1, len(shown), place)
        draw_affinity(axes, affinity[number], distribution)
        axes.set(xlabel="model of client", ylabel="client" if place == 1 else "")
        axes.set_title(f"after round {rounds[number]}", fontsize=9.5)
    return figure


def draw_affinity(axes: Axes, affinity: Float[np.ndarray, "K K"], distribution: Int[np.ndarray, " K"]) -> None:
    """Draws an affinity matrix with a color bar, clients ordered by distribution."""
    order = np.argsort(distribution, kind="stable")
    off = ~np.eye(len(order), dtype=bool)  # a client's affinity to itself starts at 1 and would dominate
    matrix = affinity[order][:, order].copy()
    limit = max(float(np.abs(matrix[off]).max(initial=0)), 1e-9)
    matrix[~off] = np.nan
    image = axes.imshow(matrix, cmap="RdBu", vmin=-limit, vmax=limit, interpolation="nearest")
    edges = np.nonzero(np.diff(distribution[order]))[0] + 0.5
    _draw_edges(axes, edges[: len(PALETTE) * 2], width=0.6)
    if len(order) <= 20:
        axes.set_xticks(np.arange(len(order)), [str(k) for k in order], fontsize=6.5)
        axes.set_yticks(np.arange(len(order)), [str(k) for k in order], fontsize=6.5)
    axes.figure.colorbar(image, ax=axes, shrink=0.8)


def traffic_against_accuracy(
    num_bytes: Real[np.ndarray, " T"],
    test: Float[np.ndarray, "T K"],
    *,
    sizes: Real[np.ndarray, " K"] | None = None,
    task: str = "classification",
) -> Figure:
    """Plots the mean score against the bytes received and sent per client so far."""
    figure = Picture(6.4, 4)
    scale, unit = byte_unit(float(num_bytes.max()))
    axes = add_axes(figure, xlabel=f"{unit} received and sent per client", ylabel=_name(task))
    axes.plot(num_bytes / scale, _mean(test, sizes), color=PALETTE[2], marker=".")
    return figure


def measures(rounds: Int[np.ndarray, " T"], values: Mapping[str, Sequence[float]]) -> Figure:
    """Plots the method's own metrics over rounds, one panel per metric."""
    figure = Picture(4.6 * len(values), 3.4)
    for place, (name, line) in enumerate(values.items(), 1):
        axes = add_axes(figure, 1, len(values), place, xlabel="round", ylabel=name.replace("_", " "))
        axes.plot(rounds, line, color=PALETTE[0], marker=".")
    return figure


def curve(
    x: Float[np.ndarray, " n"],
    y: Float[np.ndarray, " n"],
    client: Int[np.ndarray, " n"],
    grid: Float[np.ndarray, " G"],
    truth: Float[np.ndarray, " G"],
    prediction: Float[np.ndarray, "K G"],
    reference: Float[np.ndarray, " G"] | None = None,
    reference_name: str = "",
) -> Figure:
    """Plots noisy points, the true curve, personal models and one global model (FedeRiCo, Figure 1, left).

    Args:
        x: Training inputs.
        y: Training targets.
        client: The client of each training point.
        grid: Inputs of the curves.
        truth: The curve without noise.
        prediction: Personal predictions; NaN is not drawn.
        reference: Predictions of a single model.
        reference_name: Name of the single model.
    """
    figure = Picture(7.2, 4.2)
    axes = add_axes(figure, xlabel="x", ylabel="y")
    shades = colors(np.arange(len(prediction)))
    axes.scatter(x, y, c=[shades[k] for k in client], s=9, alpha=0.7, linewidths=0)
    axes.plot(grid, truth, color="0.4", linewidth=1.5, label="true curve")
    for number, (values, shade) in enumerate(zip(prediction, shades, strict=True)):
        axes.plot(grid, values, color=shade, linestyle="--", linewidth=2.2, label=None if number else "personal models")
    if reference is not None:
        axes.plot(grid, reference, color="k", linestyle=":", linewidth=2, label=reference_name)
    axes.legend(frameon=False)
    return figure
