"""The data for a run's page: its panels, and what its script shows of a client and of a round, thinned out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from pfljax.evaluation import collaboration
from pfljax.report import pictures, plots
from pfljax.report.picture import SYMBOLS, Panel, colors, plain, rounded
from pfljax.report.plots import Plots

MAX_CLIENTS = 1000  # clients with their own values on a page
MAX_ROUNDS = 40  # rounds with a matrix
MAX_POINTS = 100_000  # numbers in all clients' curves
MAX_NUMBERS = 2_000_000  # numbers in all matrices
LEAST = 1e-4  # smaller weights are left out
MAX_MERGES = 50  # last merges of the clustering that are considered for the cut
WORDS = {  # what a client's strongest links are, and what is said if it has none
    "sharing": ("Shares models most with", "Shares models with no one"),
    "weights": ("Uses most", "Uses nobody else's model"),
}


class Content(NamedTuple):
    """The data of a page.

    Attributes:
        data: Data for the scripts.
        notes: Sentences about what was left out.
    """

    data: dict[str, Any]
    notes: list[str]


def collect(run: Plots) -> Content:
    """Returns the data of a run's page."""
    shown, notes = _shown_clients(run)
    times, told = _evenly(len(run.test), max(2, MAX_POINTS // max(len(shown), 1)), "of clients' curves")
    notes += told
    score, groups, last = run.score, run.wanted[shown], run.test[-1][shown]
    train, labels = run.results.get(f"{score.name}_train"), run.used.get("labels")
    orders = {"group": np.argsort(groups, kind="stable"), "score": pictures.worst_first(last, score)}
    panels = _panels(run, shown)
    sharing = None
    if run.chooses:
        sharing, told = _sharing(run, shown)
        notes += told
        orders["found"] = sharing.pop("order")
        panels["matrix"] = _matrices(run, shown, orders, sharing)
    data = {
        "panels": {name: {choice: plain(panel) for choice, panel in of.items()} for name, of in panels.items()},
        "orders": orders,
        "score": {"name": score.name} | plain(pictures.axis_of(score)),
        "rounds": run.rounds[times],
        "test": rounded(run.test[times][:, shown].T, 4),
        "train": None if train is None else rounded(train[times][:, shown].T, 4),
        "median": rounded(pictures.over_clients(np.nanmedian, run.test)[times], 4),
        "labels": None if labels is None else np.asarray(labels)[shown],
        "all_labels": None if labels is None else np.sum(labels, axis=0),
        "sharing": sharing,
    }
    found = [""] * len(shown) if sharing is None else sharing["found"].tolist()
    return Content(data | _of_clients(run, shown, found), notes)


def _panels(run: Plots, shown: Int[np.ndarray, " n"]) -> dict[str, dict[str, Panel]]:
    """Returns the panels that the page only draws, by plot and by choice."""
    ranking = pictures.per_client(run.test[-1][shown], run.wanted[shown], run.ids[shown], run.score)
    panels = {"spread": {score.name: plots.over_rounds(run, score) for score in run.scores}, "ranking": {"": ranking}}
    panels |= {f"measure-{number}": {"": panel} for number, panel in enumerate(plots.of_measures(run))}
    traffic = plots.against_traffic(run)
    return panels if traffic is None else panels | {"traffic": {"": traffic}}


def _of_clients(run: Plots, shown: Int[np.ndarray, " n"], found: Sequence[Any]) -> dict[str, Any]:
    """Returns what the page says about each client, and its tables for downloading."""
    ids, groups, score = run.ids[shown].tolist(), run.wanted[shown].tolist(), run.score
    rows = [run.client_rows.get(k, {}) for k in ids]
    texts = pictures.client_texts(run.ids[shown], run.test[-1][shown], run.wanted[shown], score)
    named = [
        f"{k} ({row['name']})" if row.get("name") is not None else str(k) for k, row in zip(ids, rows, strict=True)
    ]
    told = []
    for name, group, cluster, row, value in zip(named, groups, found, rows, run.test[-1][shown].tolist(), strict=True):
        parts = [f"Client {name}"] + [f"group {group}"] * run.has_groups + [f"found group {cluster}"] * (cluster != "")
        if row:
            parts.append(f"{row['n_train']} training and {row['n_test']} test examples")
        told.append(f"{', '.join(parts)}, {score.label} {pictures.shown(score, value)} in the last round.")
    heads = [name for name in (rows[0] if rows else {}) if name != "client"]
    table = [["client", "group", "found_group", *heads]]
    for client, group, cluster, row in zip(ids, groups, found, rows, strict=True):
        table.append([client, group if run.has_groups else "", cluster, *(row.get(head) for head in heads)])
    columns = list(dict.fromkeys(name for row in run.rows for name in row))
    history = [columns, *([row.get(name) for name in columns] for row in run.rows)]
    return {
        "clients": ids,
        "groups": [f" (group {group})" * run.has_groups for group in groups],
        "named": named,
        "colors": colors(run.wanted)[shown].tolist(),
        "texts": texts,
        "told": told,
        "csv": {"rounds": history, "clients": table},
    }


def _shown_clients(run: Plots) -> tuple[Int[np.ndarray, " n"], list[str]]:
    """Returns the clients to show on the page: all, or evenly spaced from the worst to the best."""
    num, limit = run.test.shape[1], MAX_CLIENTS
    if run.chooses:  # leaves room for at least two rounds of models and weights
        limit = min(limit, max(2, MAX_NUMBERS // (4 * run.used["index"].shape[2])))
    if num <= limit:
        return np.arange(num), []
    order = np.argsort(run.test[-1], kind="stable")
    shown = np.sort(order[np.linspace(0, num - 1, limit).round().astype(int)])
    return shown, [f"The page shows {limit:,} of {num:,} clients, evenly spaced from the worst to the best."]


def _evenly(num: int, most: int, what: str) -> tuple[Int[np.ndarray, " n"], list[str]]:
    """Selects at most `most` of `num` entries, including the first and last. Returns a note if some are left out."""
    if num <= most:
        return np.arange(num), []
    return np.linspace(0, num - 1, most).round().astype(int), [f"{most} of {num} evaluated rounds {what} are shown."]


def _sharing(run: Plots, shown: Int[np.ndarray, " n"]) -> tuple[dict[str, Any], list[str]]:
    """Returns which models the clients use, by round, and the groups found from that."""
    all_index, all_weights, groups = run.used["index"], run.used["weights"], run.wanted[shown]
    num = len(all_index)
    kept = max(int((np.abs(all_weights[time]) >= LEAST).sum()) for time in (0, num // 2, -1))
    per_round = max(1, 2 * kept * len(shown) // all_weights.shape[1])
    times, notes = _evenly(num, int(np.clip(MAX_NUMBERS // per_round, 2, MAX_ROUNDS)), "of the matrix")
    digits = 3 if per_round * len(times) <= MAX_NUMBERS // 3 else 2
    order, found = found_groups(all_index[-1][shown], all_weights[-1][shown])
    rounds = np.asarray(run.used["round"])[times]
    weights = [rounded(all_weights[time][shown], digits) for time in times]
    used = [collaboration.rows_of(all_index[t][shown], own, LEAST) for t, own in zip(times, weights, strict=True)]
    means = [collaboration.sharing(all_index[time][shown], all_weights[time][shown], groups) for time in times]
    notes.append(f"The matrix leaves out weights below {LEAST:g} and rounds the others to {digits} digits.")
    return {
        "rounds": rounds,
        "models": run.num_models,
        "width": int(all_index.max()) + 1,
        "rows": [_flat(rows) for rows in used],
        "lengths": [rounded(rows.length, 5) for rows in used],
        "largest": max(float(rows.weight.max(initial=0)) for rows in used),
        "cosines": [_mean_cosines(*each) for each in zip(rounds.tolist(), means, strict=True)],
        "words": WORDS,
        "symbols": SYMBOLS,
        "colors": colors(np.arange(run.num_models or 0)),
        "order": order,
        "found": found,
        "agreement": collaboration.adjusted_rand_index(groups, found) if len(np.unique(groups)) > 1 else None,
    }, notes


def _mean_cosines(number: int, means: collaboration.Sharing) -> str:
    """Returns a sentence on the mean cosines of a round; "" if there is one group."""
    if np.isnan(means.across):
        return ""
    within = "" if np.isnan(means.within) else f"{means.within:.2f} within true groups, "
    return f"Round {number}: mean cosine {within}{means.across:.2f} between different groups."


def _flat(rows: collaboration.Rows) -> list[list]:
    """Returns each client's row as a list: the models that it uses, each followed by its weight."""
    cuts = np.searchsorted(rows.client, np.arange(len(rows.length) + 1))
    pairs = zip(rows.model.tolist(), rows.weight.tolist(), strict=True)
    flat = [value for pair in pairs for value in pair]
    return [flat[2 * a : 2 * b] for a, b in itertools.pairwise(cuts)]


def _matrices(
    run: Plots, shown: Int[np.ndarray, " n"], orders: dict[str, np.ndarray], sharing: dict[str, Any]
) -> dict[str, Panel]:
    """Returns the panels of the matrix, without values, by what is shown and by the order of clients."""
    blocks = {"group": run.wanted[shown], "found": sharing["found"]}
    return {
        f"{kind} {by}": pictures.matrix(
            kind,
            order,
            colors(run.wanted)[shown],
            run.ids[shown],
            run.num_models,
            limit=max(sharing["largest"], 1e-9),
            blocks=blocks.get(by),
        )
        for kind in pictures.RELATIONS
        for by, order in orders.items()
    }


def found_groups(
    index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"]
) -> tuple[Int[np.ndarray, " K"], Int[np.ndarray, " K"]]:
    """Groups clients that use similar models, by hierarchical clustering of the cosines of their weights.

    Uses average linkage. Cuts the tree in the widest gap between the distances of its last merges; distance 1, where
    clients have no model in common, counts as one more merge. Clients that share with no one form their own groups.

    Returns:
        The clients in the order of the tree's leaves, and each client's group, numbered in that order.
    """
    from scipy.cluster import hierarchy  # heavy
    from scipy.spatial.distance import squareform

    if len(index) < 2:
        return np.arange(len(index)), np.zeros(len(index), int)
    distances = np.clip(1 - collaboration.cosines(index, weights), 0, 2)
    np.fill_diagonal(distances, 0)
    tree = hierarchy.linkage(squareform(distances, checks=False), "average")
    order, merges = hierarchy.leaves_list(tree), tree[-MAX_MERGES:, 2]
    levels = np.append(merges, max(1.0, merges[-1]))
    widest = int(np.argmax(np.diff(levels)))
    height = (levels[widest] + levels[widest + 1]) / 2 if levels[0] < 1 - LEAST else 0.0
    label = hierarchy.fcluster(tree, height, "distance")
    first = {group: number for number, group in enumerate(dict.fromkeys(label[order].tolist()))}
    return order, np.array([first[group] for group in label.tolist()])
