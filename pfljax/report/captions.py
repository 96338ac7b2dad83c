"""All figures of a run, and captions for those that its page shows as images."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from pfljax.report import figures
from pfljax.report.plots import Plots


class Captioned(NamedTuple):
    """A figure and its caption."""

    figure: Figure
    caption: str


def draw(plots: Plots, curve: dict[str, np.ndarray]) -> dict[str, Figure]:
    """Draws all figures that the run has data for. Returns them by file name.

    Args:
        plots: The run.
        curve: Arrays of curve.npz; empty if the file does not exist.
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
    """Draws the figures that only some runs have. The page shows them as images."""
    out = {}
    if curve:
        arrays = {**curve, "reference_name": str(curve.get("reference_name", ""))}
        caption = (
            "Noisy training points, and each client's personal model on its own interval. Personal models should "
            "follow the curve where a single model cannot."
        )
        out["curve"] = Captioned(figures.curve(**arrays), caption)
    if "affinity" in plots.used and "clients" not in plots.used:
        out["affinity_over_rounds"] = _affinity(plots)
    return out


def _affinity(plots: Plots) -> Captioned:
    caption = "How much each client has gained from other clients' models so far."
    if not plots.has_groups:
        return Captioned(plots.affinity(), caption)
    target = plots.distribution if plots.target is None else plots.target
    share = top_affinities(plots.used["affinity"][-1], plots.distribution, target)
    other = "" if plots.target is None else " (or the block of each client's target distribution)"
    caption += f" Clients are ordered by distribution. The blocks on the diagonal{other} should turn blue."
    if not math.isnan(share):
        caption += (
            f" For {share:.0%} of the clients with two others in their target distribution, the two highest affinities "
            "are to such clients."
        )
    return Captioned(plots.affinity(), caption)


def top_affinities(
    affinity: Float[np.ndarray, "K K"], distribution: Int[np.ndarray, " K"], target: Int[np.ndarray, " K"]
) -> float:
    """Returns the fraction of clients whose two highest affinities to others are to clients of their target.

    Counts only clients with at least two others of their target; NaN if there are none.
    """
    others = np.where(np.eye(len(affinity), dtype=bool), -np.inf, affinity)
    wanted = np.equal(distribution[None, :], target[:, None]) & ~np.eye(len(affinity), dtype=bool)
    top = np.argsort(-others, axis=1, kind="stable")[:, :2]
    able = wanted.sum(axis=1) >= 2
    found = wanted[np.arange(len(top))[:, None], top].sum(axis=1) == 2
    return float(np.mean(found, where=able)) if able.any() else float("nan")
