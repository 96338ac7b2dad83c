"""The data for a run's page: its panels, and what its script shows of a client and of a round, thinned out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from pfljax.evaluation import collaboration
from pfljax.report import pictures
from pfljax.report.picture import SYMBOLS, Panel, colors, plain, rounded
from pfljax.report.run_data import RunData, evenly, over_clients
from pfljax.report.sections import score_text

MAX_CLIENTS = 1000  # clients with their own values on a page
MAX_ROUNDS = 40  # rounds with a matrix
MAX_POINTS = 100_000  # numbers in all clients' curves
MAX_NUMBERS = 2_000_000  # numbers in all matrices
LEAST = 1e-4  # smaller weights are left out
MAX_MERGES = 50  # last merges of the clustering that are considered for the cut

Clients = Int[np.ndarray, " n"]


class Content(NamedTuple):
    """The data of a run's page.

    Attributes:
        data: Data for the scripts.
        notes: Sentences about what was left out.
    """

    data: dict[str, Any]
    notes: list[str]


def collect(run: RunData) -> Content:
    """Returns the data of a run's page."""
    notes = []
    num_clients = run.test.shape[1]
    score = run.score

    # What is shown of clients and rounds.
    shown = _shown_clients(run)
    if len(shown) < num_clients:
        notes.append(
            f"The page shows {len(shown):,} of {num_clients:,} clients, evenly spaced from the worst to the best."
        )
    most_times = MAX_POINTS // max(len(shown), 1)
    times = _shown_times(len(run.test), most_times, "of clients' curves", notes)
    sharing = _sharing(run, shown, notes) if run.chooses else None

    data: dict[str, Any] = {}
    for split in ("test", "train"):
        scores = run.results.get(f"{score.name}_{split}")
        data[split] = None if scores is None else rounded(scores[times][:, shown].T, 4)
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
    return Content(data | _client_data(run, shown, sharing), notes)


def table_cells(rows: Sequence[Mapping[str, Any]]) -> list[list]:
    """Returns the cells of a table with a row per entry, headings first."""
    heads = list(dict.fromkeys(name for row in rows for name in row))
    body = [[row.get(name) for name in heads] for row in rows]
    return [heads, *body]


def flat_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a client's row with a column for each entry of a mapping, such as the examples of a class."""
    flat = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}_{key}": entry for key, entry in value.items()}
        else:
            flat[name] = value
    return flat


def _shown_clients(run: RunData) -> Clients:
    """Returns the clients to show on the page: all, or evenly spaced from the worst to the best."""
    num_clients = run.test.shape[1]
    most = MAX_CLIENTS
    if run.chooses:  # leaves room for at least two rounds of models and weights
        models_per_client = run.used["index"].shape[2]
        most = min(most, max(2, MAX_NUMBERS // (4 * models_per_client)))
    ranked = pictures.worst_first(run, np.arange(num_clients))
    return np.sort(ranked[evenly(num_clients, most)])


def _shown_times(num: int, most: int, subject: str, notes: list[str]) -> Int[np.ndarray, " t"]:
    """Selects two or more of `num` evaluated rounds, at most `most`, and adds a note if some are left out."""
    times = evenly(num, max(2, most))
    if len(times) < num:
        notes.append(f"{len(times)} of {num} evaluated rounds {subject} are shown.")
    return times


def _orders(run: RunData, shown: Clients, sharing: dict[str, Any] | None) -> dict[str, np.ndarray]:
    """Returns the orders of the clients, by name."""
    orders = {
        "group": np.argsort(run.target[shown], kind="stable"),
        "score": pictures.worst_first(run, shown),
    }
    if sharing is not None:
        orders["found"] = sharing["order"]
    return orders


def _panels(
    run: RunData, shown: Clients, sharing: dict[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Returns the descriptions of the panels by plot and by choice, those of the matrix without its values."""
    panels: dict[str, dict[str, Panel]] = {
        "spread": {name: pictures.scores(run, score) for name, score in run.scores.items()},
        "ranking": {"": pictures.ranking(run, shown)},
    }
    for number, panel in enumerate(pictures.measures(run)):
        panels[f"measure-{number}"] = {"": panel}
    costs = {"traffic": pictures.traffic(run), "duration": pictures.duration(run)}
    for name, panel in costs.items():
        if panel is not None:
            panels[name] = {"": panel}
    if sharing is not None:
        panels["matrix"] = _matrices(run, shown, sharing)

    described = {}
    for name, choices in panels.items():
        described[name] = {choice: plain(panel) for choice, panel in choices.items()}
    return described


def _matrices(run: RunData, shown: Clients, sharing: dict[str, Any]) -> dict[str, Panel]:
    """Returns the panels of the matrix by relation and order."""
    shades = np.array(colors(run.target))[shown].tolist()
    blocks = {"group": run.target[shown], "found": sharing["found"]}
    panels = {}
    for relation in pictures.RELATIONS:
        for name, order in _orders(run, shown, sharing).items():
            panels[f"{relation} {name}"] = pictures.matrix(
                relation,
                order,
                shades,
                run.ids[shown],
                run.num_models,
                largest=sharing["largest"],
                blocks=blocks.get(name),
            )
    return panels


def _client_data(run: RunData, shown: Clients, sharing: dict[str, Any] | None) -> dict[str, Any]:
    """Returns what the page says about each client, and its tables for downloading."""
    names = []
    pointer_texts = []
    sentences = []
    table = []
    for position, client in enumerate(shown.tolist()):
        number = int(run.ids[client])
        row = run.client_rows.get(number, {})
        group = int(run.target[client])
        value = float(run.test[-1][client])
        score = score_text(run.score.name, value) or "not scored"

        # Its name, and what the pointer shows.
        name = str(number) if row.get("name") is None else f"{number} ({row['name']})"
        names.append(name)
        groups = [f"group {group}"] if run.has_groups else []
        pointer_texts.append(", ".join([f"client {number}", *groups, score]))

        # A sentence on the selected client.
        cluster = "" if sharing is None else int(sharing["found"][position])
        facts = [f"Client {name}", *groups]
        if sharing is not None:
            facts.append(f"found group {cluster}")
        if row:
            facts.append(f"{row['n_train']} training and {row['n_test']} test examples")
        sentences.append(f"{', '.join(facts)}, {run.score.label} {score} in the last round.")

        entry = {
            "client": number,
            "group": group if run.has_groups else "",
            "found_group": cluster,
        }
        table.append(entry | flat_row(row))
    suffixes = []
    for group in run.target[shown]:
        suffixes.append(f" (group {group})" if run.has_groups else "")
    return {
        "clients": run.ids[shown],
        "groups": suffixes,
        "colors": np.array(colors(run.target))[shown],
        "names": names,
        "texts": pointer_texts,
        "sentences": sentences,
        "csv": {"rounds": table_cells(run.rows), "clients": table_cells(table)},
    }


def _sharing(run: RunData, shown: Clients, notes: list[str]) -> dict[str, Any]:
    """Returns which models the clients use, by round, and the groups found from that."""
    all_index = run.used["index"]
    all_weights = run.used["weights"]
    num_times = len(all_index)

    # As many rounds and digits as the page has room for.
    num_weights = [
        int((np.abs(all_weights[time]) >= LEAST).sum()) for time in (0, num_times // 2, -1)
    ]
    per_round = max(1, 2 * max(num_weights) * len(shown) // all_weights.shape[1])
    most_times = min(MAX_NUMBERS // per_round, MAX_ROUNDS)
    times = _shown_times(num_times, most_times, "of the matrix", notes)
    digits = 3 if per_round * len(times) <= MAX_NUMBERS // 3 else 2
    notes.append(
        f"The matrix leaves out weights below {LEAST:g} and rounds the others to {digits} digits."
    )

    # The matrix and the mean cosines of each round.
    groups = run.target[shown]
    rounds = np.asarray(run.used["round"])[times]
    matrices = []
    cosines = []
    for time, number in zip(times, rounds.tolist(), strict=True):
        index = all_index[time][shown]
        weights = all_weights[time][shown]
        rows = collaboration.rows_of(index, weights, LEAST)
        matrices.append(rows._replace(weight=rounded(rows.weight, digits)))
        cosines.append(_mean_cosines(number, collaboration.sharing(index, weights, groups)))

    order, clusters = found_groups(all_index[-1][shown], all_weights[-1][shown])
    agreement = None
    if len(np.unique(groups)) > 1:
        agreement = collaboration.adjusted_rand_index(groups, clusters)
    return {
        "rounds": rounds,
        "models": run.num_models,
        "width": int(all_index.max()) + 1,
        "rows": [_flat(rows) for rows in matrices],
        "lengths": [rounded(rows.length, 5) for rows in matrices],
        "largest": max(float(rows.weight.max(initial=0)) for rows in matrices),
        "cosines": cosines,
        "symbols": SYMBOLS,
        "colors": colors(np.arange(run.num_models or 0)),
        "order": order,
        "found": clusters,
        "agreement": agreement,
    }


def _mean_cosines(number: int, means: collaboration.Sharing) -> str:
    """Returns a sentence on the mean cosines of a round; "" if there is one group."""
    if np.isnan(means.across):
        return ""
    within = "" if np.isnan(means.within) else f"{means.within:.2f} within true groups, "
    return f"Round {number}: mean cosine {within}{means.across:.2f} between different groups."


def _flat(rows: collaboration.Rows) -> list[list]:
    """Returns each client's row as a list: the models that it uses, each followed by its weight."""
    flat = []
    for model, weight in zip(rows.model.tolist(), rows.weight.tolist(), strict=True):
        flat += [model, weight]
    cuts = np.searchsorted(rows.client, np.arange(rows.num_clients + 1))
    return [flat[2 * start : 2 * stop] for start, stop in itertools.pairwise(cuts)]


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

    # The tree.
    distances = np.clip(1 - collaboration.cosines(index, weights), 0, 2)
    np.fill_diagonal(distances, 0)
    tree = hierarchy.linkage(squareform(distances, checks=False), "average")
    order = hierarchy.leaves_list(tree)

    # Its widest gap.
    merges = tree[-MAX_MERGES:, 2]
    levels = np.append(merges, max(1.0, merges[-1]))
    widest = int(np.argmax(np.diff(levels)))
    height = (levels[widest] + levels[widest + 1]) / 2 if levels[0] < 1 - LEAST else 0.0

    # Groups, numbered in the order of the leaves.
    labels = hierarchy.fcluster(tree, height, "distance")
    in_order = dict.fromkeys(labels[order].tolist())
    numbers = {label: number for number, label in enumerate(in_order)}
    return order, np.array([numbers[label] for label in labels.tolist()])
