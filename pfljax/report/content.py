"""The data for the plots of a run's page: thinned out, rounded, with clients grouped by shared models."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from pfljax.evaluation import collaboration
from pfljax.report.markup import rounded
from pfljax.report.plots import Plots

MAX_CLIENTS = 1000  # clients with their own values on a page
MAX_ROUNDS = 40  # rounds with a matrix
MAX_POINTS = 100_000  # numbers in all clients' curves
MAX_NUMBERS = 2_000_000  # numbers in all matrices
LEAST = 1e-4  # smaller weights are left out
MAX_MERGES = 50  # last merges of the clustering that are considered for the cut
LEVELS = (0, 10, 25, 50, 75, 90, 100)  # percentiles over clients


class Content(NamedTuple):
    """The data of a page.

    Attributes:
        data: Data for the scripts.
        notes: Sentences about what was left out.
    """

    data: dict[str, Any]
    notes: list[str]


def collect(plots: Plots) -> Content:
    """Returns the data of a run's page."""
    shown, notes = _shown_clients(plots)
    test = plots.test
    times, told = _evenly(len(test), max(2, MAX_POINTS // max(len(shown), 1)), "of clients' curves")
    notes += told
    rounds = np.asarray(plots.results["rounds"])
    train = plots.results.get(f"{plots.score}_train")
    ids = plots.ids[shown]
    rows = plots.client_rows
    group = plots.wanted[shown]
    data = {
        "score": plots.score,
        "rounds": rounds[times],
        "clients": ids,
        "group": group,
        "test": rounded(test[times][:, shown].T, 4),
        "train": None if train is None else rounded(train[times][:, shown].T, 4),
        "labels": None if "labels" not in plots.used else np.asarray(plots.used["labels"])[shown],
        "rows": [rows[int(k)] for k in ids] if rows else None,
        "spread": _spread(plots),
        "history": list(plots.rows),
        "measured": {name: np.array(values) for name, values in plots.measured.items()},
        "bytes": plots.bytes_sent if plots.bytes_sent.any() else None,
        "sharing": None,
    }
    if plots.chooses:
        data["sharing"], told = _sharing(plots, shown)
        notes += told
    return Content(data, notes)


def _shown_clients(plots: Plots) -> tuple[Int[np.ndarray, " n"], list[str]]:
    """Returns the clients to show on the page: all, or evenly spaced from the worst to the best."""
    num, limit = plots.test.shape[1], MAX_CLIENTS
    if plots.chooses:  # leaves room for at least two rounds of models and weights
        limit = min(limit, max(2, MAX_NUMBERS // (4 * plots.used["index"].shape[2])))
    if num <= limit:
        return np.arange(num), []
    order = np.argsort(plots.test[-1], kind="stable")
    shown = np.sort(order[np.linspace(0, num - 1, limit).round().astype(int)])
    return shown, [f"The page shows {limit:,} of {num:,} clients, evenly spaced from the worst to the best."]


def _evenly(num: int, most: int, what: str) -> tuple[Int[np.ndarray, " n"], list[str]]:
    """Selects at most `most` of `num` entries, including the first and last. Returns a note if some are left out."""
    if num <= most:
        return np.arange(num), []
    return np.linspace(0, num - 1, most).round().astype(int), [f"{most} of {num} evaluated rounds {what} are shown."]


def _spread(plots: Plots) -> dict[str, Any]:
    """Returns the distribution of all clients' scores at every evaluated round."""
    test = plots.test
    scored = test[:, ~np.isnan(test).all(axis=0)]
    levels = np.nanpercentile(scored, LEVELS, axis=1) if scored.size else np.full((len(LEVELS), len(test)), np.nan)
    means = [row.get(plots.score) for row in plots.rows]
    return {
        "rounds": np.asarray(plots.results["rounds"]),
        "levels": LEVELS,
        "values": rounded(levels, 4),
        "mean": means if len(means) == len(test) else None,
    }


def _sharing(plots: Plots, shown: Int[np.ndarray, " n"]) -> tuple[dict[str, Any], list[str]]:
    """Returns which models the clients use, by round, and the groups found from that."""
    all_index, all_weights = plots.used["index"], plots.used["weights"]
    num = len(all_index)
    kept = max(int((np.abs(all_weights[time]) >= LEAST).sum()) for time in (0, num // 2, -1))
    per_round = max(1, 2 * kept * len(shown) // all_weights.shape[1])
    times, notes = _evenly(num, int(np.clip(MAX_NUMBERS // per_round, 2, MAX_ROUNDS)), "of the matrix")
    digits = 3 if per_round * len(times) <= MAX_NUMBERS // 3 else 2
    shared = plots.topology == "shared"
    order, found = found_groups(all_index[-1][shown], all_weights[-1][shown])
    rows = [_rows(all_index[time][shown], all_weights[time][shown], digits) for time in times]
    notes.append(f"The matrix leaves out weights below {LEAST:g} and rounds the others to {digits} digits.")
    return {
        "rounds": np.asarray(plots.used["round"])[times],
        "models": int(all_index.max()) + 1 if shared else None,
        "used": rows,
        "largest": float(np.max(all_weights[times][:, shown])),
        "order": order,
        "found": found,
        "agreement": _agreement(found, plots.wanted[shown]),
    }, notes


def _rows(index: Int[np.ndarray, "n J"], weights: Float[np.ndarray, "n J"], digits: int) -> list[list]:
    """Returns for each client the models that it uses, each followed by its weight. Repeated indices add up."""
    client = np.repeat(np.arange(len(index)), index.shape[1])
    width = int(index.max()) + 1
    pairs, place = np.unique(client * width + index.ravel(), return_inverse=True)
    totals = np.bincount(place.ravel(), weights.ravel())
    pairs, totals = pairs[np.abs(totals) >= LEAST], totals[np.abs(totals) >= LEAST]
    totals = rounded(totals, digits)
    owner, model = np.divmod(pairs, width)
    cuts = np.searchsorted(owner, np.arange(len(index) + 1))
    flat = [value for pair in zip(model.tolist(), totals.tolist(), strict=True) for value in pair]
    return [flat[2 * a : 2 * b] for a, b in itertools.pairwise(cuts)]


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


def _agreement(found: np.ndarray, true: np.ndarray) -> float | None:
    """Returns the adjusted Rand index of found and true groups; None if there is only one true group."""
    return collaboration.adjusted_rand_index(true, found) if len(np.unique(true)) > 1 else None
