"""What each picture of a run shows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from pfljax.evaluation import collaboration
from pfljax.report.picture import GRAY, PALETTE, SYMBOLS, Axis, Heat, Panel, Series, colors
from pfljax.report.run_data import RunData, Score, evenly, over_clients

MAX_PANELS = 16
MAX_ROWS = 500  # rows of a figure's matrix; with more clients, several share a row
MAX_RUNS = 300  # runs of clients of one group for which a matrix has colors at its side
BANDS = {
    "all clients": (0, 100, "#A9D8F4"),
    "10 to 90 %": (10, 90, "#56B4E9"),
    "25 to 75 %": (25, 75, "#0072B2"),
}
RELATIONS = {"sharing": "cosine of weights", "weights": "weight"}


def axis_of(score: Score) -> Axis:
    return Axis(score.label, percent=score.percent)


def scores(run: RunData, score: Score) -> Panel:
    """Describes a score over rounds: bands of clients, the mean, and the edge of the worst tenth."""
    test = run.results[f"{score.name}_test"]
    train = run.results.get(f"{score.name}_train")

    def level(percent):
        return over_clients(np.nanpercentile, test, percent)

    bands = [(name, level(low), level(high), color) for name, (low, high, color) in BANDS.items()]
    series = [
        Series(run.rounds, high, name, "band", low, color) for name, low, high, color in bands
    ]
    if train is not None:
        mean = over_clients(np.nanmean, train)
        series.append(Series(run.rounds, mean, "training examples, mean", color=GRAY, dash="dot"))
    return Panel(
        Axis("round"),
        axis_of(score),
        [*series, *_mean_and_tail(run, score, run.rounds)],
        legend="below",
    )


def traffic(run: RunData) -> Panel | None:
    """Describes the score against the megabytes received and sent per client so far; None if there are none."""
    if run.megabytes is None:
        return None
    return Panel(
        Axis("MB received and sent per client"),
        axis_of(run.score),
        _mean_and_tail(run, run.score, run.megabytes),
    )


def duration(run: RunData) -> Panel | None:
    """Describes the score against the simulated seconds so far; None without a clock."""
    if run.simulated is None:
        return None
    return Panel(
        Axis("simulated seconds"), axis_of(run.score), _mean_and_tail(run, run.score, run.simulated)
    )


def _mean_and_tail(run: RunData, score: Score, x: np.ndarray) -> list[Series]:
    tail = over_clients(np.nanpercentile, run.results[f"{score.name}_test"], 50 - 40 * score.sign)
    return [
        Series(x, run.mean(score), "mean over clients", width=2.5, symbol="circle"),
        Series(x, tail, "edge of the worst tenth", color=PALETTE[1], dash="dash", symbol="circle"),
    ]


def measures(run: RunData) -> list[Panel]:
    """Describes the method's own metrics over rounds."""
    drawn = {
        name.replace("_", " "): Series(run.rounds, values, symbol="circle")
        for name, values in run.measured.items()
    }
    return [Panel(Axis("round"), Axis(label), [series]) for label, series in drawn.items()]


def worst_first(run: RunData, shown: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Returns the places of some clients, the worst in the last round first, those without a score last."""
    last = run.test[-1][shown]
    return np.argsort(np.where(np.isnan(last), np.inf, run.score.sign * last), kind="stable")


def ranking(run: RunData, shown: Int[np.ndarray, " n"]) -> Panel:
    """Describes the scores of some clients in the last round, worst first, colored by their true groups."""
    last = run.test[-1][shown]
    groups = run.target[shown]
    ranked = worst_first(run, shown)[: np.isfinite(last).sum()]
    values = np.unique(run.target)
    size = 4.0 if len(shown) > 150 else 7.0
    series = []
    for number, (group, color) in enumerate(zip(values, colors(values), strict=True)):
        at = np.nonzero(groups[ranked] == group)[0]
        members = ranked[at]
        name = f"group {group}" if 1 < len(values) <= len(PALETTE) else ""
        style = {"color": color, "symbol": SYMBOLS[number % len(SYMBOLS)], "size": size}
        series.append(Series(at + 1, last[members], name, "points", keys=members, **style))
    ticks = [(place, str(k)) for place, k in enumerate(run.ids[shown][ranked].tolist(), 1)]
    return Panel(
        Axis("client, worst first", ticks if len(ticks) <= 40 else None), axis_of(run.score), series
    )


def matrix(
    kind: str,
    order: Int[np.ndarray, " n"],
    shades: Sequence[str],
    names: np.ndarray,
    num_models: int | None,
    *,
    values: Float[np.ndarray, "n m"] | None = None,
    largest: float = 1.0,
    blocks: Int[np.ndarray, " K"] | None = None,
    each: str = "client",
) -> Panel:
    """Describes the matrix of who shares models, or of who uses which model: a `kind` in `RELATIONS`.

    Rows are clients in an order; each has the color of its true group and a name. Of `num_models` shared models each
    has a column; None: models are the clients' own, whose columns are ordered like rows. Without `values`, the page
    fills the matrix in. Lines separate clients who differ in `blocks`. `each` is what a row is.
    """
    of_clients = kind == "sharing" or num_models is None
    rows = names[order].astype(str).tolist()
    edges = [] if blocks is None else (np.nonzero(np.diff(blocks[order]))[0] + 0.5).tolist()
    strip = _runs(np.array(shades)[order])
    heat = Heat(
        values,
        rows,
        [] if of_clients else [str(j) for j in range(num_models or 0)],
        label=RELATIONS[kind],
        limits=(0.0, 1.0 if kind == "sharing" else max(largest, 1e-9)),
        edges=edges if len(edges) < len(rows) / 2 else [],
        strip=strip if len(set(shades)) > 1 and len(strip) <= MAX_RUNS else [],
    )
    columns = each if kind == "sharing" else f"model of {each}" if of_clients else "model"
    return Panel(Axis(columns), Axis(each), heat=heat)


def _runs(values: np.ndarray) -> list[tuple[int, int, str]]:
    """Returns the runs of equal values: (start, stop, value)."""
    starts = [0, *(np.nonzero(values[1:] != values[:-1])[0] + 1).tolist(), len(values)]
    return [(a, b, str(values[a])) for a, b in itertools.pairwise(starts)]


def sharing_matrix(run: RunData, evaluation: int) -> Panel:
    """Describes which clients share models. With more than `MAX_ROWS` clients, some of each group are shown."""
    index = run.used["index"][evaluation]
    weights = run.used["weights"][evaluation]
    rows = spread(run.target, MAX_ROWS)
    cosines = collaboration.cosines(index[rows], weights[rows])
    return matrix(
        "sharing", rows, colors(run.target), run.ids, None, values=cosines, blocks=run.target
    )


def weight_matrix(run: RunData, evaluation: int) -> Panel:
    """Describes which client uses which model.

    With more than `MAX_ROWS` clients, several share a row: the row is their mean, and a column sums over their models.
    """
    index = run.used["index"][evaluation]
    weights = run.used["weights"][evaluation]
    groups = run.target
    order = np.argsort(groups, kind="stable")
    step = -(-len(order) // MAX_ROWS)  # clients per row
    place = np.empty(len(order), int)
    place[order] = np.arange(len(order)) // step
    values = np.zeros((place.max() + 1, run.num_models or place.max() + 1))
    columns = place[index] if run.num_models is None else index
    np.add.at(values, (place[:, None], columns), weights / np.bincount(place)[place][:, None])
    shown = {"values": values, "largest": float(values.max()), "blocks": groups}
    shown["each"] = "client" if step == 1 else f"client (rows of {step})"
    return matrix("weights", order[::step], colors(groups), run.ids, run.num_models, **shown)


def spread(groups: Int[np.ndarray, " K"], most: int) -> Int[np.ndarray, " n"]:
    """Returns up to `most` clients, ordered by group and spread over all groups."""
    by_group = np.argsort(groups, kind="stable")
    return by_group[evenly(len(by_group), most)]


def weights(run: RunData) -> list[Panel]:
    """Describes the weights of up to `MAX_PANELS` clients over rounds: one panel per client, one line per model.

    A line has the color of the owner's true group; shared models have colors of their own.
    """
    rounds, index, used = (run.used[name] for name in ("round", "index", "weights"))
    num_clients = len(run.group)
    own_models = run.num_models is None
    shades = colors(np.concatenate([run.group, run.target]))
    several = len(set(shades)) > 1
    of_target = shades[num_clients:]
    of_model = shades if own_models else colors(np.arange(run.num_models or 0))
    limits = (float(rounds[0]) - 0.5, float(rounds[-1]) + 0.5)
    panels = []
    for client in spread(run.group, MAX_PANELS).tolist():
        # (T, N)
        dense = collaboration.dense(
            index[:, client], used[:, client], run.num_models or num_clients
        )
        # A bar has the color of the target group; text in a light color would be hard to read.
        series = [Series(limits, (1.03, 1.03), color=of_target[client], width=5)]
        for model in np.nonzero(dense.max(axis=0) > 0.01)[0]:
            width, dash = (2.6, "solid") if own_models and model == client else (1.3, "dash")
            series.append(
                Series(rounds, dense[:, model], color=of_model[model], width=width, dash=dash)
            )
        has = run.group[client]
        wants = run.target[client]
        of = f" (group {wants})" if wants == has else f" (has {has}, wants {wants})"
        y = Axis("weight", [(0.0, "0"), (0.5, "0.5"), (1.0, "1")], limits=(-0.03, 1.05))
        panels.append(
            Panel(Axis("round", limits=limits), y, series, title=f"client {client}{of * several}")
        )
    return panels


def affinities(run: RunData) -> list[Panel]:
    """Describes how much each client has gained from others' models, at up to four rounds."""
    values = run.used["affinity"]
    rounds = run.used["round"]
    return [
        affinity(values[t], run.group, f"after round {rounds[t]}") for t in evenly(len(rounds), 4)
    ]


def affinity(values: Float[np.ndarray, "K K"], groups: Int[np.ndarray, " K"], title: str) -> Panel:
    """Describes an affinity matrix, clients ordered by group."""
    order = np.argsort(groups, kind="stable")
    # a client's affinity to itself starts at 1 and would dominate
    own = np.eye(len(order), dtype=bool)
    limit = max(float(np.abs(values[~own]).max(initial=0)), 1e-9)
    names = order.astype(str).tolist()
    edges = (np.nonzero(np.diff(groups[order]))[0] + 0.5).tolist()
    shown = np.where(own, np.nan, values[np.ix_(order, order)])
    heat = Heat(shown, names, limits=(-limit, limit), diverging=True, edges=edges)
    return Panel(Axis("model of client"), Axis("client"), heat=heat, title=title)


def curve(run: RunData) -> Panel:
    """Describes a curve, its noisy points, personal models, where they are not NaN, and perhaps one global model."""
    x, y, client, grid, truth, models = (
        run.curve[name] for name in ("x", "y", "client", "grid", "truth", "prediction")
    )
    shades = list(enumerate(colors(np.arange(len(models)))))

    def of(k):
        return (x[client == k], y[client == k])

    series = [
        Series(*of(k), kind="points", color=shade, symbol="circle", size=3) for k, shade in shades
    ]
    series.append(Series(grid, truth, "true curve", color=GRAY))
    for k, shade in shades:
        series.append(
            Series(
                grid, models[k], "" if k else "personal models", color=shade, dash="dash", width=2.2
            )
        )
    if "reference" in run.curve:
        name = str(run.curve.get("reference_name", ""))
        series.append(
            Series(grid, run.curve["reference"], name, color="#000000", dash="dot", width=2)
        )
    return Panel(Axis("x"), Axis("y"), series)
