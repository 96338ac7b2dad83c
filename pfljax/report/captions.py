"""All figures of a run, and captions for those that its page shows as pictures."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from pfljax.report import figures
from pfljax.report.plots import Plots


class Captioned(NamedTuple):
    """A figure, and what to look for in it."""

    figure: Figure
    caption: str


def draw(plots: Plots, curve: dict[str, np.ndarray]) -> dict[str, Figure]:
    """All figures that the run has values for, by file name.

    Args:
        plots: The run.
        curve: The arrays of curve.npz, or none.
    """
    score = plots.score
    out = {name: captioned.figure for name, captioned in extras(plots, curve).items()}
    out[f"{score}_over_rounds"], out[f"per_client_{score}"] = plots.accuracy(), plots.per_client()
    if plots.collaborates:
        out["sharing_matrix"], out["collaboration_matrix"] = plots.sharing(), plots.collaboration()
        out["weights_over_rounds"] = plots.weights()
    if plots.measured:
        out["measures"] = plots.measures()
    if len(plots.bytes_sent) == len(plots.test) and plots.bytes_sent.any():
        out[f"traffic_against_{score}"] = plots.traffic()
    return out


def extras(plots: Plots, curve: dict[str, np.ndarray]) -> dict[str, Captioned]:
    """The figures that a page shows as they are, as some runs alone have them."""
    out = {}
    if curve:
        arrays = {**curve, "reference_name": str(curve.get("reference_name", ""))}
        caption = (
            "Noisy training points, and each client's personal model on its own interval. Check whether the lines "
            "follow the curve where one model for all cannot."
        )
        out["curve"] = Captioned(figures.curve(**arrays), caption)
    if "affinity" in plots.used and "clients" not in plots.used:
        out["affinity_over_rounds"] = _affinity(plots)
    return out


def _affinity(plots: Plots) -> Captioned:
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
    return Captioned(plots.affinity(), caption)


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
