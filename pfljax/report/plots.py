"""Figures of a run, such as `plot_collaboration(run)`. Each function returns a figure, which notebooks show inline."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from pfljax.contract.errors import ArgumentError
from pfljax.report import pictures
from pfljax.report.draw import draw
from pfljax.report.run_data import RunData

MATRIX = (6.0, 5.2)  # inches


def plot_scores(run: RunData, metric: str = "") -> Figure:
    """Plots a score over rounds: the mean over clients, the worst tenth, and the range.

    Args:
        run: The run.
        metric: Name of the score; by default the one that clients are ranked by.

    Raises:
        ArgumentError: if the run has no such score.
    """
    if metric and metric not in run.scores:
        text = f"the run has no {metric}; accepted: {', '.join(run.scores)}"
        raise ArgumentError("metric", text)
    score = run.scores[metric or run.score.name]
    return draw([pictures.scores(run, score)])


def plot_per_client(run: RunData) -> Figure:
    """Plots each client's score in the last round."""
    everyone = np.arange(len(run.ids))
    return draw([pictures.ranking(run, everyone)], (7.2, 4.0))


def plot_collaboration(run: RunData, evaluation: int = -1) -> Figure:
    """Plots which models each client used at one evaluated round, by default the last."""
    check_collaboration(run, "index")
    return draw([pictures.weight_matrix(run, evaluation)], MATRIX)


def plot_sharing(run: RunData, evaluation: int = -1) -> Figure:
    """Plots which clients share models at one evaluated round, by default the last."""
    check_collaboration(run, "index")
    return draw([pictures.sharing_matrix(run, evaluation)], MATRIX)


def plot_weights(run: RunData) -> Figure:
    """Plots each client's weights over rounds."""
    check_collaboration(run, "index")
    panels = pictures.weights(run)
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    size = (2.6 * columns + 0.4, 2.3 * rows + 0.3)
    return draw(panels, size, columns, alike=True)


def plot_affinity(run: RunData) -> Figure:
    """Plots how much each client has gained from others' models, at up to four rounds."""
    check_collaboration(run, "affinity")
    panels = pictures.affinities(run)
    return draw(panels, (3.1 * len(panels) + 0.8, 3.3))


def plot_traffic(run: RunData) -> Figure:
    """Plots the score against the megabytes received and sent per client."""
    panel = pictures.traffic(run)
    if panel is None:
        raise ArgumentError("traffic", "no model was sent or received")
    return draw([panel])


def plot_duration(run: RunData) -> Figure:
    """Plots the score against simulated seconds."""
    panel = pictures.duration(run)
    if panel is None:
        raise ArgumentError("clock", "the run has no clock")
    return draw([panel])


def plot_measures(run: RunData) -> Figure:
    """Plots the method's own metrics over rounds, one panel per metric."""
    panels = pictures.measures(run)
    if not panels:
        raise ArgumentError("metrics", "the method has no metrics of its own")
    return draw(panels, (4.6 * len(panels), 3.4))


def plot_curve(run: RunData) -> Figure:
    """Plots the clients' curve, their training points and their models' predictions."""
    if not run.curve:
        raise ArgumentError("data", "the clients' data are no curve")
    return draw([pictures.curve(run)], (7.2, 4.2))


def check_collaboration(run: RunData, name: str) -> None:
    """Raises `ArgumentError` if a run does not have an array of collaboration.npz for all clients."""
    if name not in run.used:
        raise ArgumentError("run", f"collaboration.npz has no {name}")
    if not run.all_scored:
        text = "this figure needs all clients, but only a sample was scored"
        raise ArgumentError("eval_clients", text)


def extra_figures(run: RunData) -> dict[str, Figure]:
    """Draws the figures that only some runs have, by file name. The page shows them as images."""
    figures = {}
    if run.curve:
        figures["curve"] = plot_curve(run)
    if "affinity" in run.used and run.all_scored:
        figures["affinity_over_rounds"] = plot_affinity(run)
    return figures


def all_figures(run: RunData) -> dict[str, Figure]:
    """Draws all figures that a run has data for, by file name."""
    # Scores.
    main = run.score.name
    names = [main]
    for name in run.scores:
        if name not in (main, "loss"):
            names.append(name)
    figures = {f"{name}_over_rounds": plot_scores(run, name) for name in names}
    figures |= extra_figures(run)
    figures[f"per_client_{main}"] = plot_per_client(run)

    # Collaboration.
    if run.chooses and run.all_scored:
        figures["sharing_matrix"] = plot_sharing(run)
        figures["collaboration_matrix"] = plot_collaboration(run)
        figures["weights_over_rounds"] = plot_weights(run)

    # Metrics of the method, and costs.
    if run.measured:
        figures["measures"] = plot_measures(run)
    if run.megabytes is not None:
        figures[f"traffic_against_{main}"] = plot_traffic(run)
    if run.simulated is not None:
        figures[f"simulated_seconds_against_{main}"] = plot_duration(run)
    return figures


class Plots(RunData):
    """Figures of a run by their former names, which work for one more release; see the functions of this module."""

    def accuracy(self, metric: str = "") -> Figure:
        """Is now `plot_scores`."""
        return plot_scores(self, metric)

    def per_client(self) -> Figure:
        """Is now `plot_per_client`."""
        return plot_per_client(self)

    def collaboration(self, evaluation: int = -1) -> Figure:
        """Is now `plot_collaboration`."""
        return plot_collaboration(self, evaluation)

    def sharing(self, evaluation: int = -1) -> Figure:
        """Is now `plot_sharing`."""
        return plot_sharing(self, evaluation)

    def weights(self) -> Figure:
        """Is now `plot_weights`."""
        return plot_weights(self)

    def affinity(self) -> Figure:
        """Is now `plot_affinity`."""
        return plot_affinity(self)

    def traffic(self) -> Figure:
        """Is now `plot_traffic`."""
        return plot_traffic(self)

    def duration(self) -> Figure:
        """Is now `plot_duration`."""
        return plot_duration(self)

    def measures(self) -> Figure:
        """Is now `plot_measures`."""
        return plot_measures(self)

    def figures(self) -> dict[str, Figure]:
        """Is now `all_figures`."""
        return all_figures(self)
