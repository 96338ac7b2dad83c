"""What each picture shows: panels, described from arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num

from pfljax.evaluation import collaboration
from pfljax.report import markup
from pfljax.report.picture import GRAY, PALETTE, SYMBOLS, Axis, Heat, Panel, Series, colors

MAX_ROWS = 500  # rows of a figure's matrix; with more clients, several share a row
MAX_RUNS = 300  # runs of clients of one group for which a matrix has colors at its side
BANDS = {"all clients": (0, 100, "#A9D8F4"), "10 to 90 %": (10, 90, "#56B4E9"), "25 to 75 %": (25, 75, "#0072B2")}
RELATIONS = {"sharing": "cosine of weights", "weights": "weight"}


class Score(NamedTuple):
    """A score that each client has.

    Attributes:
        name: Its name in the run's files, such as "accuracy".
        label: Its name for people.
        percent: Whether it is shown in percent.
        sign: 1 if high values are good, -1 if low ones are.
    """

    name: str
    label: str
    percent: bool
    sign: int


def score_named(name: str, task: str) -> Score:
    """Returns the score of this name for a task, "classification" or "regression"."""
    label = "MSE" if (name, task) == ("loss", "regression") else name.replace("_", " ")
    return Score(name, f"test {label}", name.endswith("accuracy"), -1 if name.endswith(("loss", "error")) else 1)


def over_clients(reduce: Callable[..., np.ndarray], values: Float[np.ndarray, "T K"], *args: Any) -> np.ndarray:
    """Reduces scores over the clients that have any, such as by `np.nanmean`; NaN if there are none. Shape (T,)."""
    scored = values[:, ~np.isnan(values).all(axis=0)]
    return reduce(scored, *args, axis=1) if scored.size else np.full(len(values), np.nan)


def scores_over_rounds(
    rounds: Int[np.ndarray, " T"],
    test: Float[np.ndarray, "T K"],
    mean: Float[np.ndarray, " T"],
    train: Float[np.ndarray, "T K"] | None,
    score: Score,
) -> Panel:
    """Describes the distribution of clients' scores over rounds: mean, worst tenth, and bands.

    Args:
        rounds: The evaluated rounds.
        test: Scores on test examples; NaN for clients without examples.
        mean: Their means.
        train: The same scores on training examples, of which the mean is drawn.
        score: The score.
    """
    level = lambda percent: over_clients(np.nanpercentile, test, percent)
    bands = [(name, level(low), level(high), color) for name, (low, high, color) in BANDS.items()]
    series = [Series(rounds, high, name, "band", low, color) for name, low, high, color in bands]
    if train is not None:
        series.append(
            Series(rounds, over_clients(np.nanmean, train), "training examples, mean", color=GRAY, dash="dot")
        )
    series += _mean_and_tail(rounds, test, mean, score)
    return Panel(Axis("round"), axis_of(score), series, legend="below")


def score_against_traffic(
    megabytes: Float[np.ndarray, " T"], test: Float[np.ndarray, "T K"], mean: Float[np.ndarray, " T"], score: Score
) -> Panel:
    """Describes the score against the megabytes received and sent per client so far."""
    series = _mean_and_tail(megabytes, test, mean, score)
    return Panel(Axis("MB received and sent per client"), axis_of(score), series)


def _mean_and_tail(x: np.ndarray, test: np.ndarray, mean: np.ndarray, score: Score) -> list[Series]:
    tail = over_clients(np.nanpercentile, test, 50 - 40 * score.sign)
    return [
        Series(x, mean, "mean over clients", width=2.5, symbol="circle"),
        Series(x, tail, "edge of the worst tenth", color=PALETTE[1], dash="dash", symbol="circle"),
    ]


def axis_of(score: Score) -> Axis:
    """Returns the axis of a score."""
    return Axis(score.label, percent=score.percent)


def worst_first(scores: Float[np.ndarray, " K"], score: Score) -> Int[np.ndarray, " K"]:
    """Returns the clients' order from the worst to the best; those without a score come last."""
    return np.argsort(np.where(np.isnan(scores), np.inf, score.sign * scores), kind="stable")


def per_client(
    scores: Float[np.ndarray, " K"], groups: Int[np.ndarray, " K"], ids: Int[np.ndarray, " K"], score: Score
) -> Panel:
    """Describes every client's score, worst first, colored by its true group."""
    ranked = worst_first(scores, score)[: np.isfinite(scores).sum()]
    values, texts = np.unique(groups), np.array(client_texts(ids, scores, groups, score))
    size, series = 4.0 if len(ids) > 150 else 7.0, []
    for number, (group, color) in enumerate(zip(values, colors(values), strict=True)):
        places = np.nonzero(groups[ranked] == group)[0]
        name = f"group {group}" if 1 < len(values) <= len(PALETTE) else ""
        of = {"keys": ranked[places], "texts": texts[ranked[places]].tolist(), "color": str(color)}
        symbol = SYMBOLS[number % len(SYMBOLS)]
        series.append(Series(places + 1, scores[ranked[places]], name, "points", symbol=symbol, size=size, **of))
    few = len(ranked) <= 40
    ticks = [(place, str(k)) for place, k in enumerate(ids[ranked].tolist(), 1)] if few else None
    return Panel(Axis("client, worst first", ticks), axis_of(score), series)


def client_texts(
    ids: Int[np.ndarray, " K"], scores: Float[np.ndarray, " K"], groups: Int[np.ndarray, " K"], score: Score
) -> list[str]:
    """Returns what is said of each client under the pointer: its number, its group if there are several, its score."""
    several = len(np.unique(groups)) > 1
    of = lambda group: f", group {group}" if several else ""
    return [f"client {k}{of(g)}: {shown(score, value)}" for k, g, value in zip(ids, groups, scores, strict=True)]


def shown(score: Score, value: float) -> str:
    """Returns a client's score as text."""
    return "not scored" if np.isnan(value) else markup.score(score.name, float(value))


def matrix(
    kind: str,
    order: Int[np.ndarray, " n"],
    shades: np.ndarray,
    ids: Sequence[Any] | np.ndarray,
    num_models: int | None,
    *,
    values: Float[np.ndarray, "n m"] | None = None,
    limit: float = 1.0,
    blocks: Int[np.ndarray, " K"] | None = None,
    each: str = "client",
) -> Panel:
    """Describes the matrix of who shares models, or of who uses which model.

    Args:
        kind: A key of `RELATIONS`.
        order: The clients in the order of rows.
        shades: The color of each client's true group.
        ids: The clients' names.
        num_models: Number of shared models; None if models are the clients' own, whose columns are ordered like rows.
        values: The matrix; None: the page fills it in.
        limit: The largest weight.
        blocks: Lines separate clients who differ in these; None: there are no lines.
        each: What a row is.
    """
    of_clients = kind == "sharing" or num_models is None
    rows = [str(ids[k]) for k in order]
    edges = np.nonzero(np.diff(blocks[order]))[0] + 0.5 if blocks is not None else np.zeros(0)
    strip = runs(shades[order]) if len(set(shades)) > 1 else []
    heat = Heat(
        values,
        rows,
        rows if of_clients else [str(j) for j in range(num_models or 0)],
        label=RELATIONS[kind],
        limits=(0.0, 1.0 if kind == "sharing" else limit),
        edges=edges.tolist() if len(edges) < len(rows) / 2 else [],
        crossed=of_clients,
        strip=strip if len(strip) <= MAX_RUNS else [],
    )
    columns = each if kind == "sharing" else f"model of {each}" if of_clients else "model"
    return Panel(Axis(columns), Axis(each), heat=heat)


def runs(values: Sequence[str] | np.ndarray) -> list[tuple[int, int, str]]:
    """Returns the runs of equal values: (start, stop, value)."""
    starts = [k for k in range(len(values)) if not k or values[k] != values[k - 1]]
    return [(a, b, str(values[a])) for a, b in itertools.pairwise([*starts, len(values)])]


def sharing_matrix(
    index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"], groups: Int[np.ndarray, " K"]
) -> Panel:
    """Describes which clients share models. With more than `MAX_ROWS` clients, some of each group are shown."""
    rows = spread(groups, MAX_ROWS)
    values = collaboration.cosines(index[rows], weights[rows])
    return matrix("sharing", rows, colors(groups), np.arange(len(index)), None, values=values, blocks=groups)


def weight_matrix(
    index: Int[np.ndarray, "K J"],
    weights: Float[np.ndarray, "K J"],
    groups: Int[np.ndarray, " K"],
    num_models: int | None,
) -> Panel:
    """Describes which client uses which model.

    With more than `MAX_ROWS` clients, several share a row: the row is their mean, and a column sums over their models.
    """
    order = np.argsort(groups, kind="stable")
    step = -(-len(order) // MAX_ROWS)  # clients per row
    place = np.empty(len(order), int)
    place[order] = np.arange(len(order)) // step
    values = np.zeros((place.max() + 1, num_models or place.max() + 1))
    columns = place[index] if num_models is None else index
    np.add.at(values, (place[:, None], columns), weights / np.bincount(place)[place][:, None])
    limit, each = max(float(values.max()), 1e-9), "client" if step == 1 else f"client (rows of {step})"
    rows, ids = order[::step], np.arange(len(index))
    told = {"values": values, "limit": limit, "blocks": groups, "each": each}
    return matrix("weights", rows, colors(groups), ids, num_models, **told)


def spread(groups: Int[np.ndarray, " K"], most: int) -> Int[np.ndarray, " n"]:
    """Returns up to `most` clients, ordered by group and spread over all groups."""
    by_group = np.argsort(groups, kind="stable")
    places = np.linspace(0, len(by_group) - 1, min(most, len(by_group))).round().astype(int)
    return by_group[np.unique(places)]


def weights_over_rounds(
    rounds: Int[np.ndarray, " T"],
    index: Int[np.ndarray, "T K J"],
    weights: Float[np.ndarray, "T K J"],
    distribution: Int[np.ndarray, " K"],
    wanted: Int[np.ndarray, " K"],
    num_models: int | None,
    most: int = 16,
) -> list[Panel]:
    """Describes the weights of up to `most` clients over rounds: one panel per client, one line per model.

    Args:
        rounds: The evaluated rounds.
        index: The models that each client uses.
        weights: Their weights.
        distribution: Each client's true distribution; it determines the color of the client's model.
        wanted: Distribution of each client's test data.
        num_models: Number of shared models, each of its own color; None: models are the clients' own.
    """
    groups = colors(np.concatenate([distribution, wanted]))
    several = len(set(groups)) > 1
    shades = groups if num_models is None else colors(np.arange(num_models))
    limits, panels = (float(rounds[0]) - 0.5, float(rounds[-1]) + 0.5), []
    for client in spread(distribution, most):
        dense = collaboration.dense(index[:, client], weights[:, client], num_models or len(distribution))  # (T, N)
        # A bar has the color of the target distribution; text in a light color would be hard to read.
        series = [Series(limits, (1.03, 1.03), color=groups[len(distribution) + client], width=5)]
        for model in np.nonzero(dense.max(axis=0) > 0.01)[0]:
            own = num_models is None and model == client
            style = {"width": 2.6} if own else {"width": 1.3, "dash": "dash"}
            series.append(Series(rounds, dense[:, model], color=shades[model], **style))
        has, wants = distribution[client], wanted[client]
        of = f" (distribution {wants})" if wants == has else f" (has {has}, wants {wants})"
        title, ticks = f"client {client}{of if several else ''}", [(0.0, "0"), (0.5, "0.5"), (1.0, "1")]
        panels.append(
            Panel(Axis("round", limits=limits), Axis("weight", ticks, limits=(-0.03, 1.05)), series, title=title)
        )
    return panels


def affinity(values: Float[np.ndarray, "K K"], groups: Int[np.ndarray, " K"], title: str) -> Panel:
    """Describes an affinity matrix, clients ordered by group."""
    order = np.argsort(groups, kind="stable")
    own = np.eye(len(order), dtype=bool)  # a client's affinity to itself starts at 1 and would dominate
    limit = max(float(np.abs(values[~own]).max(initial=0)), 1e-9)
    outer = np.where(own, np.nan, values[np.ix_(order, order)])
    names, edges = [str(k) for k in order], np.nonzero(np.diff(groups[order]))[0] + 0.5
    heat = Heat(outer, names, names, limits=(-limit, limit), diverging=True, edges=edges.tolist())
    return Panel(Axis("model of client"), Axis("client"), heat=heat, title=title)


def measure(rounds: Int[np.ndarray, " T"], values: Num[np.ndarray, " T"], name: str) -> Panel:
    """Describes a metric over rounds."""
    return Panel(Axis("round"), Axis(name.replace("_", " ")), [Series(rounds, values, symbol="circle")])


def curve(arrays: Mapping[str, Any]) -> Panel:
    """Describes a curve, its noisy points, personal models and one global model.

    Args:
        arrays: Content of curve.npz: points "x" and "y" of "client" (n,); at "grid" (G,) the curve "truth", personal
            models "prediction" (K, G), NaN where they are not drawn, and perhaps "reference" and "reference_name".
    """
    shades = colors(np.arange(len(arrays["prediction"])))
    of = lambda k: arrays["client"] == k
    series = [
        Series(arrays["x"][of(k)], arrays["y"][of(k)], kind="points", color=shade, symbol="circle", size=3)
        for k, shade in enumerate(shades)
    ]
    series.append(Series(arrays["grid"], arrays["truth"], "true curve", color=GRAY))
    for k, (values, shade) in enumerate(zip(arrays["prediction"], shades, strict=True)):
        name = "" if k else "personal models"
        series.append(Series(arrays["grid"], values, name, color=shade, dash="dash", width=2.2))
    if "reference" in arrays:
        name = str(arrays.get("reference_name", ""))
        series.append(Series(arrays["grid"], arrays["reference"], name, color="#000000", dash="dot", width=2))
    return Panel(Axis("x"), Axis("y"), series)
