"""What each picture of a run shows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from pfljax.evaluation import collaboration
from pfljax.report.picture import (
    GRAY,
    PALETTE,
    SYMBOLS,
    Axis,
    Heat,
    Panel,
    Series,
    colors,
    drift_lines,
)
from pfljax.report.run_data import RunData, Score, evenly, over_clients

MAX_PANELS = 16
MAX_ROWS = 500  # rows of a figure's matrix; with more clients, several share a row
MAX_NAMES = 40  # clients whose numbers are at an axis
LEAST = 0.01  # models with smaller weights have no line
MAX_RUNS = 300  # runs of clients of one group for which a matrix has colors at its side
BANDS = {
    "all clients": (0, 100, "#A9D8F4"),
    "10 to 90 %": (10, 90, "#56B4E9"),
    "25 to 75 %": (25, 75, "#0072B2"),
}
RELATIONS = {"sharing": "cosine of weights", "weights": "weight"}


def axis_of(score: Score) -> Axis:
    """Returns the axis of a score."""
    return Axis(score.label, percent=score.percent)


def scores(run: RunData, score: Score) -> Panel:
    """Describes a score over rounds: bands of clients, the mean, and the edge of the worst tenth."""
    test = run.results[f"{score.name}_test"]
    train = run.results.get(f"{score.name}_train")

    series = []
    for name, (low, high, color) in BANDS.items():
        lower = over_clients(np.nanpercentile, test, low)
        upper = over_clients(np.nanpercentile, test, high)
        series.append(Series(run.rounds, upper, name, "band", lower, color))
    if train is not None:
        mean = over_clients(np.nanmean, train)
        series.append(Series(run.rounds, mean, "training examples, mean", color=GRAY, dash="dot"))
    series += _mean_and_tail(run, score, run.rounds)
    series += drift_lines(run.drifts, test)
    return Panel(Axis("round"), axis_of(score), series, legend="below")


def traffic(run: RunData) -> Panel | None:
    """Describes the score against the megabytes received and sent per client so far; None if there are none."""
    if run.megabytes is None:
        return None
    series = _mean_and_tail(run, run.score, run.megabytes)
    return Panel(Axis("MB received and sent per client"), axis_of(run.score), series)


def duration(run: RunData) -> Panel | None:
    """Describes the score against the simulated seconds so far; None without a clock."""
    if run.simulated is None:
        return None
    series = _mean_and_tail(run, run.score, run.simulated)
    return Panel(Axis("simulated seconds"), axis_of(run.score), series)


def _mean_and_tail(run: RunData, score: Score, x: np.ndarray) -> list[Series]:
    """Describes the mean of a score over clients, and the edge of their worst tenth."""
    worst_tenth = 10 if score.sign > 0 else 90
    tail = over_clients(np.nanpercentile, run.results[f"{score.name}_test"], worst_tenth)
    return [
        Series(x, run.mean(score), "mean over clients", width=2.5, symbol="circle"),
        Series(x, tail, "edge of the worst tenth", color=PALETTE[1], dash="dash", symbol="circle"),
    ]


def measures(run: RunData) -> list[Panel]:
    """Describes the method's own metrics over rounds."""
    panels = []
    for name, values in run.measured.items():
        series = Series(run.rounds, values, symbol="circle")
        panels.append(Panel(Axis("round"), Axis(name.replace("_", " ")), [series]))
    return panels


def worst_first(run: RunData, shown: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Returns the positions of some clients, the worst in the last round first, those without a score last."""
    last = run.test[-1][shown]
    ranks = np.where(np.isnan(last), np.inf, run.score.sign * last)
    return np.argsort(ranks, kind="stable")


def ranking(run: RunData, shown: Int[np.ndarray, " n"]) -> Panel:
    """Describes the scores of some clients in the last round, worst first, colored by their true groups."""
    last = run.test[-1][shown]
    groups = run.target[shown]
    num_scored = np.isfinite(last).sum()
    ranked = worst_first(run, shown)[:num_scored]

    values = np.unique(run.target)
    is_named = 1 < len(values) <= len(PALETTE)
    series = []
    for number, (group, color) in enumerate(zip(values, colors(values), strict=True)):
        ranks = np.nonzero(groups[ranked] == group)[0]
        members = ranked[ranks]
        points = Series(
            x=ranks + 1,
            y=last[members],
            name=f"group {group}" if is_named else "",
            kind="points",
            keys=members,
            color=color,
            symbol=SYMBOLS[number % len(SYMBOLS)],
            size=4.0 if len(shown) > 150 else 7.0,
        )
        series.append(points)

    numbers = run.ids[shown][ranked].tolist()
    ticks = [(rank, str(client)) for rank, client in enumerate(numbers, 1)]
    x = Axis("client, worst first", ticks if len(ticks) <= MAX_NAMES else None)
    return Panel(x, axis_of(run.score), series)


def matrix(
    relation: str,
    order: Int[np.ndarray, " n"],
    shades: Sequence[str],
    names: np.ndarray,
    num_models: int | None,
    *,
    values: Float[np.ndarray, "n m"] | None = None,
    largest: float = 1.0,
    blocks: Int[np.ndarray, " K"] | None = None,
    row: str = "client",
) -> Panel:
    """Describes the matrix of who shares models, or of who uses which model.

    Args:
        relation: One of `RELATIONS`.
        order: The clients of the rows, from top to bottom.
        shades: Colors of the clients' true groups.
        names: The clients' names.
        num_models: Number of shared models, which have a column each. None: models are the clients' own, and columns
            are ordered like rows.
        values: The matrix; None: the page fills it in.
        largest: The largest weight.
        blocks: Groups of clients, which lines separate.
        row: What a row is.
    """
    is_sharing = relation == "sharing"
    is_square = is_sharing or num_models is None
    rows = names[order].astype(str).tolist()

    # Lines and colors that would cover the matrix are left out.
    edges = []
    if blocks is not None:
        edges = (np.nonzero(np.diff(blocks[order]))[0] + 0.5).tolist()
    strip = _runs(np.array(shades)[order])
    shows_strip = len(set(shades)) > 1 and len(strip) <= MAX_RUNS
    heat = Heat(
        values,
        rows,
        columns=[] if is_square else [str(model) for model in range(num_models or 0)],
        label=RELATIONS[relation],
        limits=(0.0, 1.0 if is_sharing else max(largest, 1e-9)),
        edges=edges if len(edges) < len(rows) / 2 else [],
        strip=strip if shows_strip else [],
    )
    column = row
    if not is_sharing:
        column = f"model of {row}" if is_square else "model"
    return Panel(Axis(column), Axis(row), heat=heat)


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

    # The row of each client.
    order = np.argsort(groups, kind="stable")
    per_row = -(-len(order) // MAX_ROWS)
    rows = np.empty(len(order), int)
    rows[order] = np.arange(len(order)) // per_row
    num_rows = rows.max() + 1

    # Mean weights.
    values = np.zeros((num_rows, run.num_models or num_rows))
    columns = rows[index] if run.num_models is None else index
    clients_of_row = np.bincount(rows)[rows]
    np.add.at(values, (rows[:, None], columns), weights / clients_of_row[:, None])
    return matrix(
        "weights",
        order[::per_row],
        colors(groups),
        run.ids,
        run.num_models,
        values=values,
        largest=float(values.max()),
        blocks=groups,
        row="client" if per_row == 1 else f"client (rows of {per_row})",
    )


def spread(groups: Int[np.ndarray, " K"], most: int) -> Int[np.ndarray, " n"]:
    """Returns up to `most` clients, ordered by group and spread over all groups."""
    by_group = np.argsort(groups, kind="stable")
    return by_group[evenly(len(by_group), most)]


def weights(run: RunData) -> list[Panel]:
    """Describes the weights of up to `MAX_PANELS` clients over rounds: one panel per client, one line per model.

    A line has the color of the owner's true group; shared models have colors of their own.
    """
    rounds = run.used["round"]
    index = run.used["index"]
    used = run.used["weights"]
    num_clients = len(run.group)
    has_own_models = run.num_models is None

    # Colors of the clients' groups, of the groups that their models should fit, and of models.
    shades = colors(np.concatenate([run.group, run.target]))
    target_shades = shades[num_clients:]
    model_shades = shades if has_own_models else colors(np.arange(run.num_models or 0))
    has_groups = len(set(shades)) > 1

    limits = (float(rounds[0]) - 0.5, float(rounds[-1]) + 0.5)
    x = Axis("round", limits=limits)
    y = Axis("weight", [(0.0, "0"), (0.5, "0.5"), (1.0, "1")], limits=(-0.03, 1.05))
    panels = []
    for client in spread(run.group, MAX_PANELS).tolist():
        num_models = run.num_models or num_clients
        dense = collaboration.dense(index[:, client], used[:, client], num_models)  # (T, N)
        # A bar has the color of the target group; text in a light color would be hard to read.
        series = [Series(limits, (1.03, 1.03), color=target_shades[client], width=5)]
        for model in np.nonzero(dense.max(axis=0) > LEAST)[0]:
            is_own = has_own_models and model == client
            line = Series(
                rounds,
                dense[:, model],
                color=model_shades[model],
                width=2.6 if is_own else 1.3,
                dash="solid" if is_own else "dash",
            )
            series.append(line)
        title = f"client {client}"
        if has_groups:
            title += group_text(int(run.group[client]), int(run.target[client]))
        panels.append(Panel(x, y, series, title=title))
    return panels


def group_text(group: int, target: int) -> str:
    """Returns a client's group, and that of its test data if it is another."""
    return f" (group {group})" if group == target else f" (has {group}, wants {target})"


def affinities(run: RunData) -> list[Panel]:
    """Describes how much each client has gained from others' models, at up to four rounds."""
    values = run.used["affinity"]
    rounds = run.used["round"]
    return [
        affinity(values[t], run.group, f"after round {rounds[t]}") for t in evenly(len(rounds), 4)
    ]


def affinity(values: Float[np.ndarray, "K K"], groups: Int[np.ndarray, " K"], title: str) -> Panel:
    """Describes an affinity matrix, clients ordered by group."""
    # A client's affinity to itself starts at 1 and would dominate.
    order = np.argsort(groups, kind="stable")
    is_self = np.eye(len(order), dtype=bool)
    limit = max(float(np.abs(values[~is_self]).max(initial=0)), 1e-9)
    in_order = values[np.ix_(order, order)]
    edges = (np.nonzero(np.diff(groups[order]))[0] + 0.5).tolist()
    heat = Heat(
        np.where(is_self, np.nan, in_order),
        order.astype(str).tolist(),
        limits=(-limit, limit),
        diverging=True,
        edges=edges,
    )
    return Panel(Axis("model of client"), Axis("client"), heat=heat, title=title)


def curve(run: RunData) -> Panel:
    """Describes a curve, its noisy points, personal models, where they are not NaN, and perhaps one global model."""
    grid = run.curve["grid"]
    models = run.curve["prediction"]
    shades = colors(np.arange(len(models)))

    # Training points below, then the curve, then the models.
    series = []
    for client, color in enumerate(shades):
        is_theirs = run.curve["client"] == client
        x = run.curve["x"][is_theirs]
        y = run.curve["y"][is_theirs]
        series.append(Series(x, y, kind="points", color=color, symbol="circle", size=3))
    series.append(Series(grid, run.curve["truth"], "true curve", color=GRAY))
    for client, color in enumerate(shades):
        name = "" if client else "personal models"
        series.append(Series(grid, models[client], name, color=color, dash="dash", width=2.2))
    if "reference" in run.curve:
        name = str(run.curve.get("reference_name", ""))
        line = Series(grid, run.curve["reference"], name, color="#000000", dash="dot", width=2)
        series.append(line)
    return Panel(Axis("x"), Axis("y"), series)
