"""The figures of a run's page, each with a caption that says what to look for."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from pfljax.evaluation import collaboration
from pfljax.report import figures
from pfljax.report.plots import Plots

Captioned = dict[str, tuple[Figure, str]]  # by file name


def draw(plots: Plots, curve: dict[str, np.ndarray]) -> Captioned:
    """All figures that the run has values for.

    Args:
        plots: The run.
        curve: The arrays of curve.npz, or none.
    """
    score = plots.score
    word = "accuracy" if plots.task == "classification" else "mean squared error"
    out = _curve(curve) if curve else {}
    out[f"{score}_over_rounds"] = (
        plots.accuracy(),
        f"Test {word} over rounds. Check whether the worst tenth of the clients gains along with the mean, and whether "
        "the run was still improving at the end.",
    )
    out[f"per_client_{score}"] = (
        plots.per_client(),
        f"Each client's {word} in the last round. Check whether the bad ones share a distribution.",
    )
    if plots.collaborates:
        out |= {
            "sharing_matrix": _sharing(plots),
            "collaboration_matrix": _matrix(plots),
            "weights_over_rounds": _weights(plots),
        }
    if "affinity" in plots.used:
        out["affinity_over_rounds"] = _affinity(plots)
    if plots.measured:
        out["measures"] = (
            plots.measures(),
            "What the method measures of itself in the last round before each evaluation. Check whether what it "
            "minimizes still falls.",
        )
    if len(plots.bytes_sent) == len(plots.test) and plots.bytes_sent.any():
        out[f"traffic_against_{score}"] = (
            plots.traffic(),
            f"Test {word} against what a client has sent and received. Look for the point where more traffic stops "
            "paying.",
        )
    return out


def _curve(arrays: dict[str, np.ndarray]) -> Captioned:
    figure = figures.curve(**{**arrays, "reference_name": str(arrays.get("reference_name", ""))})
    caption = (
        "Noisy training points, and each client's personal model on its own interval. Check whether the lines follow "
        "the curve where one model for all cannot."
    )
    return {"curve": (figure, caption)}


def _sharing(plots: Plots) -> tuple[Figure, str]:
    caption = (
        "Which clients share models in the last round: how alike the weights are that two clients give to all models. "
        "Clients are ordered by the distributions of their test data. Check whether the blocks on the diagonal are "
        "dark, and the rest is white. "
    )
    index, weights = (plots.used[name][-1] for name in ("index", "weights"))
    return plots.sharing(), caption + alike(index, weights, plots.wanted)


def _matrix(plots: Plots) -> tuple[Figure, str]:
    if plots.topology == "shared":
        caption = (
            "The models that each client predicts with in the last round. Check whether clients of one distribution "
            "choose the same ones."
        )
    else:
        caption = (
            "Whose models each client has used in the last round; clients are ordered by their true distributions. A "
            "model belongs to those who use it, whoever owned it at the start."
        )
    return plots.collaboration(), caption


def _weights(plots: Plots) -> tuple[Figure, str]:
    num_clients = len(plots.distribution)
    lead = f"Weights over rounds of {min(num_clients, figures.MAX_PANELS)} of {num_clients} clients"
    if plots.topology == "shared":
        rest = (
            ", one line per shared model or branch. Check when a client settles, and whether one of them is never used."
        )
    else:
        rest = (
            ". The bar above a panel has the color of the distribution of the client's test data. Check when a client "
            "settles, and whether its lines have the color of its bar."
        )
    return plots.weights(), lead + rest


def _affinity(plots: Plots) -> tuple[Figure, str]:
    target = plots.distribution if plots.target is None else plots.target
    share = top_affinities(plots.used["affinity"][-1], plots.distribution, target)
    other = "" if plots.target is None else " (or the block of the distribution that a client wants)"
    caption = (
        "How much each client has gained from others' models so far, its own left out. Clients are ordered by their "
        f"distributions. Check whether the blocks on the diagonal{other} turn blue."
    )
    if not math.isnan(share):
        caption += (
            f" The two highest affinities lie in the wanted distribution for {share:.0%} of the clients that have two "
            "others there."
        )
    return plots.affinity(), caption


def alike(index: Int[np.ndarray, "K J"], weights: Float[np.ndarray, "K J"], distribution: Int[np.ndarray, " K"]) -> str:
    """How much clients share models within their distributions and across, in a sentence."""
    found = collaboration.sharing(index, weights, distribution)
    parts = {"clients of one distribution": found.within, "clients of different ones": found.across}
    said = [f"{value:.2f} between {who}" for who, value in parts.items() if not math.isnan(value)]
    return f"The mean cosine is {' and '.join(said)}." if said else ""


def top_affinities(
    affinity: Float[np.ndarray, "K K"], distribution: Int[np.ndarray, " K"], target: Int[np.ndarray, " K"]
) -> float:
    """The share of clients whose two highest affinities, their own left out, are to clients of their target.

    Only those count for whom there are two others of it; NaN if there are none.
    """
    others = np.where(np.eye(len(affinity), dtype=bool), -np.inf, affinity)
    wanted = np.equal(distribution[None, :], target[:, None]) & ~np.eye(len(affinity), dtype=bool)
    top = np.argsort(-others, axis=1, kind="stable")[:, :2]
    able = wanted.sum(axis=1) >= 2
    found = wanted[np.arange(len(top))[:, None], top].sum(axis=1) == 2
    return float(np.mean(found, where=able)) if able.any() else float("nan")
