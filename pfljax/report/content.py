"""The data for a run's page: its panels, and what its script shows of a client and of a round, thinned out."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from pfljax.evaluation import collaboration
from pfljax.report import markup, pictures
from pfljax.report.picture import SYMBOLS, colors, plain, rounded
from pfljax.report.run_data import RunData, evenly, over_clients

MAX_CLIENTS = 1000  # clients with their own values on a page
MAX_ROUNDS = 40  # rounds with a matrix
MAX_POINTS = 100_000  # numbers in all clients' curves
MAX_NUMBERS = 2_000_000  # numbers in all matrices
LEAST = 1e-4  # smaller weights are left out
MAX_MERGES = 50  # last merges of the clustering that are considered for the cut


class Content(NamedTuple):
    data: dict[str, Any]  # data for the scripts
    notes: list[str]  # sentences about what was left out


def collect(run: RunData) -> Content:
    """Returns the data of a run's page."""
    notes = []
    num = run.test.shape[1]
    score = run.score
    shown = _shown_clients(run)
    if len(shown) < num:
        notes.append(
            f"The page shows {len(shown):,} of {num:,} clients, evenly spaced from the worst to the best."
        )
    times = _times(len(run.test), MAX_POINTS // max(len(shown), 1), "of clients' curves", notes)
    sharing = _sharing(run, shown, notes) if run.chooses else None
    of_split = {split: run.results.get(f"{score.name}_{split}") for split in ("test", "train")}
    data = {
        name: None if values is None else rounded(values[times][:, shown].T, 4)
        for name, values in of_split.items()
    }
    labels = run.used.get("labels")
    data |= {
        "panels": _panels(run, shown, sharing),
        "orders": _orders(run, shown, sharing),
        "score": {"name": score.name} | plain(pictures.axis_of(score)),
        "rounds": run.rounds[times],
        "median": rounded(over_clients(np.nanmedian, run.test)[times], 4),
        "labels": None if labels is None else np.asarray(labels)[shown],
        "all_labels": None if labels is None else np.sum(labels, axis=0),
        "sharing": sharing,
    }
    return Content(data | _of_clients(run, shown, sharing), notes)


def _shown_clients(run: RunData) -> Int[np.ndarray, " n"]:
    """Returns the clients to show on the page: all, or evenly spaced from the worst to the best."""
    num = run.test.shape[1]
    limit = MAX_CLIENTS
    if run.chooses:  # leaves room for at least two rounds of models and weights
        limit = min(limit, max(2, MAX_NUMBERS // (4 * run.used["index"].shape[2])))
    return np.sort(pictures.worst_first(run, np.arange(num))[evenly(num, limit)])


def _times(num: int, most: int, what: str, notes: list[str]) -> Int[np.ndarray, " t"]:
    """Selects two or more of `num` evaluated rounds, at most `most`, and adds a note if some are left out."""
    times = evenly(num, max(2, most))
    if len(times) < num:
        notes.append(f"{len(times)} of {num} evaluated rounds {what} are shown.")
    return times


def _orders(
    run: RunData, shown: Int[np.ndarray, " n"], sharing: dict[str, Any] | None
) -> dict[str, np.ndarray]:
    orders = {
        "group": np.argsort(run.target[shown], kind="stable"),
        "score": pictures.worst_first(run, shown),
    }
    return orders if sharing is None else orders | {"found": sharing["order"]}


def _panels(
    run: RunData, shown: Int[np.ndarray, " n"], sharing: dict[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Returns the descriptions of the panels by plot and by choice, those of the matrix without its values."""
    panels = {"spread": {name: pictures.scores(run, score) for name, score in run.scores.items()}}
    panels["ranking"] = {"": pictures.ranking(run, shown)}
    panels |= {
        f"measure-{number}": {"": panel} for number, panel in enumerate(pictures.measures(run))
    }
    for name, panel in {
        "traffic": pictures.traffic(run),
        "duration": pictures.duration(run),
    }.items():
        if panel is not None:
            panels[name] = {"": panel}
    if sharing is not None:
        of = np.array(colors(run.target))[shown].tolist(), run.ids[shown], run.num_models
        blocks = {"group": run.target[shown], "found": sharing["found"]}
        panels["matrix"] = {
            f"{kind} {by}": pictures.matrix(
                kind, order, *of, largest=sharing["largest"], blocks=blocks.get(by)
            )
            for kind in pictures.RELATIONS
            for by, order in _orders(run, shown, sharing).items()
        }
    return {
        name: {choice: plain(panel) for choice, panel in choices.items()}
        for name, choices in panels.items()
    }


def _of_clients(
    run: RunData, shown: Int[np.ndarray, " n"], sharing: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns what the page says about each client, and its tables for downloading."""
    told = []
    texts = []
    named = []
    table = []
    entries = zip(
        run.ids[shown].tolist(),
        run.target[shown].tolist(),
        run.test[-1][shown].tolist(),
        strict=True,
    )
    for place, (k, group, value) in enumerate(entries):
        row = run.client_rows.get(k, {})
        of_group = [f"group {group}"] * run.has_groups
        found = [] if sharing is None else [int(sharing["found"][place])]
        sizes = [f"{row['n_train']} training and {row['n_test']} test examples"] if row else []
        score = "not scored" if np.isnan(value) else markup.score(run.score.name, value)
        named.append(f"{k} ({row['name']})" if row.get("name") is not None else str(k))
        texts.append(", ".join([f"client {k}", *of_group, score]))
        parts = [
            f"Client {named[-1]}",
            *of_group,
            *(f"found group {number}" for number in found),
            *sizes,
        ]
        told.append(f"{', '.join(parts)}, {run.score.label} {score} in the last round.")
        groups = {
            "group": group if run.has_groups else "",
            "found_group": found[0] if found else "",
        }
        table.append({"client": k} | groups | dict(row))
    return {
        "clients": run.ids[shown],
        "groups": [f" (group {group})" * run.has_groups for group in run.target[shown]],
        "colors": np.array(colors(run.target))[shown],
        "named": named,
        "texts": texts,
        "told": told,
        "csv": {"rounds": markup.cells(run.rows), "clients": markup.cells(table)},
    }


def _sharing(run: RunData, shown: Int[np.ndarray, " n"], notes: list[str]) -> dict[str, Any]:
    """Returns which models the clients use, by round, and the groups found from that."""
    all_index = run.used["index"]
    all_weights = run.used["weights"]
    groups = run.target[shown]
    num = len(all_index)
    kept = max(int((np.abs(all_weights[time]) >= LEAST).sum()) for time in (0, num // 2, -1))
    per_round = max(1, 2 * kept * len(shown) // all_weights.shape[1])
    times = _times(num, min(MAX_NUMBERS // per_round, MAX_ROUNDS), "of the matrix", notes)
    digits = 3 if per_round * len(times) <= MAX_NUMBERS // 3 else 2
    notes.append(
        f"The matrix leaves out weights below {LEAST:g} and rounds the others to {digits} digits."
    )
    rounds = np.asarray(run.used["round"])[times]
    used = [(all_index[t][shown], all_weights[t][shown]) for t in times]
    rows = [collaboration.rows_of(*each, LEAST) for each in used]
    rows = [each._replace(weight=rounded(each.weight, digits)) for each in rows]
    order, found = found_groups(all_index[-1][shown], all_weights[-1][shown])
    return {
        "rounds": rounds,
        "models": run.num_models,
        "width": int(all_index.max()) + 1,
        "rows": [_flat(each) for each in rows],
        "lengths": [rounded(each.length, 5) for each in rows],
        "largest": max(float(each.weight.max(initial=0)) for each in rows),
        "cosines": [
            _mean_cosines(number, collaboration.sharing(*each, groups))
            for number, each in zip(rounds.tolist(), used, strict=True)
        ],
        "symbols": SYMBOLS,
        "colors": colors(np.arange(run.num_models or 0)),
        "order": order,
        "found": found,
        "agreement": collaboration.adjusted_rand_index(groups, found)
        if len(np.unique(groups)) > 1
        else None,
    }


def _mean_cosines(number: int, means: collaboration.Sharing) -> str:
    """Returns a sentence on the mean cosines of a round; "" if there is one group."""
    if np.isnan(means.across):
        return ""
    within = "" if np.isnan(means.within) else f"{means.within:.2f} within true groups, "
    return f"Round {number}: mean cosine {within}{means.across:.2f} between different groups."


def _flat(rows: collaboration.Rows) -> list[list]:
    """Returns each client's row as a list: the models that it uses, each followed by its weight."""
    cuts = np.searchsorted(rows.client, np.arange(rows.num_clients + 1))
    pairs = zip(rows.model.tolist(), rows.weight.tolist(), strict=True)
    flat = [value for pair in pairs for value in pair]
    return [flat[2 * a : 2 * b] for a, b in itertools.pairwise(cuts)]


def found_groups(
    index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"]
) -> tuple[Int[np.ndarray, " K"], Int[np.ndarray, " K"]]:
    """Groups clients that use similar models, by hierarchical clustering of the cosines of their weights.

    Uses average linkage. Cuts the tree in the widest gap between the distances of its last merges; distance 1, where
    clients have no model in common, counts as one more merge. Clients that share with no one form their own groups.
    Returns the clients in the order of the tree's leaves, and each client's group, numbered in that order.
    """
    from scipy.cluster import hierarchy  # heavy
    from scipy.spatial.distance import squareform

    if len(index) < 2:
        return np.arange(len(index)), np.zeros(len(index), int)
    distances = np.clip(1 - collaboration.cosines(index, weights), 0, 2)
    np.fill_diagonal(distances, 0)
    tree = hierarchy.linkage(squareform(distances, checks=False), "average")
    order = hierarchy.leaves_list(tree)
    merges = tree[-MAX_MERGES:, 2]
    levels = np.append(merges, max(1.0, merges[-1]))
    widest = int(np.argmax(np.diff(levels)))
    height = (levels[widest] + levels[widest + 1]) / 2 if levels[0] < 1 - LEAST else 0.0
    label = hierarchy.fcluster(tree, height, "distance")
    first = {group: number for number, group in enumerate(dict.fromkeys(label[order].tolist()))}
    return order, np.array([first[group] for group in label.tolist()])
