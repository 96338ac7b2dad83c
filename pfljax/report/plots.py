"""Figures of a run, drawn on request, such as `result.plot_collaboration()`."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from pfljax.contract.errors import ArgumentError
from pfljax.report import pictures
from pfljax.report.draw import draw
from pfljax.report.run_data import RunData

MATRIX = (6.0, 5.2)  # inches


class Plots(RunData):
    """Figures of a run. Every method that draws returns a figure, which notebooks show inline."""

    def accuracy(self, metric: str = "") -> Figure:
        """Plots a score over rounds: the mean over clients, the worst tenth, and the range.

        Args:
            metric: Name of the score; by default accuracy, or the loss for regression.
        """
        if metric and metric not in self.scores:
            text = f"the run has no {metric}; accepted: {', '.join(self.scores)}"
            raise ArgumentError("metric", text)
        return draw([pictures.scores(self, self.scores[metric or self.score.name])])

    def per_client(self) -> Figure:
        """Plots each client's score in the last round."""
        return draw([pictures.ranking(self, np.arange(len(self.ids)))], (7.2, 4.0))

    def collaboration(self, evaluation: int = -1) -> Figure:
        """Plots which models each client used at one evaluated round, by default the last."""
        self._check("index")
        return draw([pictures.weight_matrix(self, evaluation)], MATRIX)

    def sharing(self, evaluation: int = -1) -> Figure:
        """Plots which clients share models at one evaluated round, by default the last."""
        self._check("index")
        return draw([pictures.sharing_matrix(self, evaluation)], MATRIX)

    def weights(self) -> Figure:
        """Plots each client's weights over rounds."""
        self._check("index")
        panels = pictures.weights(self)
        columns = min(4, len(panels))
        size = 2.6 * columns + 0.4, 2.3 * -(-len(panels) // columns) + 0.3
        return draw(panels, size, columns, alike=True)

    def affinity(self) -> Figure:
        """Plots how much each client has gained from others' models, at up to four rounds."""
        self._check("affinity")
        panels = pictures.affinities(self)
        return draw(panels, (3.1 * len(panels) + 0.8, 3.3))

    def traffic(self) -> Figure:
        """Plots the score against the megabytes received and sent per client."""
        panel = pictures.traffic(self)
        if panel is None:
            raise ArgumentError("traffic", "no model was sent or received")
        return draw([panel])

    def duration(self) -> Figure:
        """Plots the score against simulated seconds."""
        panel = pictures.duration(self)
        if panel is None:
            raise ArgumentError("clock", "the run has none")
        return draw([panel])

    def measures(self) -> Figure:
        """Plots the method's own metrics over rounds, one panel per metric."""
        panels = pictures.measures(self)
        if not panels:
            raise ArgumentError("method", "has no metrics of its own")
        return draw(panels, (4.6 * len(panels), 3.4))

    def _check(self, name: str) -> None:
        if name not in self.used:
            raise ArgumentError(name, "the run does not record it")
        if not self.all_scored:
            text = "only a sample of the clients was scored, and this figure needs all"
            raise ArgumentError("eval_clients", text)

    def extras(self) -> dict[str, Figure]:
        """Draws the figures that only some runs have, by file name. The page shows them as images."""
        out = {"curve": draw([pictures.curve(self)], (7.2, 4.2))} if self.curve else {}
        return out | (
            {"affinity_over_rounds": self.affinity()}
            if "affinity" in self.used and self.all_scored
            else {}
        )

    def figures(self) -> dict[str, Figure]:
        """Draws all figures that the run has data for, by file name."""
        name = self.score.name
        others = [score for score in self.scores if score not in (self.score.name, "loss")]
        out = {
            f"{score}_over_rounds": self.accuracy(score) for score in (name, *others)
        } | self.extras()
        out[f"per_client_{name}"] = self.per_client()
        if self.chooses and self.all_scored:
            out |= {"sharing_matrix": self.sharing(), "collaboration_matrix": self.collaboration()}
            out["weights_over_rounds"] = self.weights()
        if self.measured:
            out["measures"] = self.measures()
        if self.megabytes is not None:
            out[f"traffic_against_{name}"] = self.traffic()
        if self.simulated is not None:
            out[f"simulated_seconds_against_{name}"] = self.duration()
        return out
