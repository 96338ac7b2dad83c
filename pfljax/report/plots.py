"""Figures of a run, drawn on request, such as `result.plot.collaboration()`."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from pfljax.contract.errors import RunError
from pfljax.folder import files
from pfljax.report import pictures
from pfljax.report.draw import draw
from pfljax.report.picture import Panel, Picture

# Columns of metrics.jsonl that every method has, besides those of clients' scores.
COMMON = {"round", "seconds", "train_loss", "bytes_down", "bytes_up"}
MATRIX = (6.0, 5.2)  # inches


@dataclasses.dataclass(frozen=True)
class Plots:
    """Figures of a run. Every method that draws returns a figure, which notebooks show inline.

    Attributes:
        summary: Content of summary.json.
        rows: Rows of metrics.jsonl, one dict per evaluated round.
        results: Content of results.npz: "rounds" (T,) and scores by split, such as "accuracy_test" (T, K).
        used: Content of collaboration.npz: "round" (T,), "index" and "weights" (T, K, J), "topology" and, if
            available, "distribution" (K,), "target" (K,), "labels" (K, C) and "affinity" (T, K, K).
        curve: Content of curve.npz, if the data are a curve.
        config: Content of config.json.
    """

    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    results: Mapping[str, np.ndarray]
    used: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    curve: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> Plots:
        """Reads the run in a folder.

        Raises:
            RunError: if the files are damaged or do not belong to a run.
        """
        names = "results.npz", "collaboration.npz", "curve.npz"
        try:
            arrays = [files.read_npz(directory / name) if (directory / name).exists() else {} for name in names]
            summary, config = (files.read_json(directory / name) for name in ("summary.json", "config.json"))
            run = cls(summary, files.read_jsonl(directory / "metrics.jsonl"), *arrays, config)
            _ = run.summary["algorithm"], run.summary["last"]["round"], run.test
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            message = f"{directory}: the run's files are damaged, or this is not a run's folder: {error}"
            raise RunError(message) from error
        return run

    @property
    def score(self) -> pictures.Score:
        """The score that clients are ranked by: accuracy, or the loss for regression."""
        task = self.summary.get("task", "classification")
        return pictures.score_named("accuracy" if task == "classification" else "loss", task)

    @property
    def scores(self) -> list[pictures.Score]:
        """All scores that clients have, `score` first."""
        names = [name.removesuffix("_test") for name in self.results if name.endswith("_test")]
        others = (pictures.score_named(name, self.summary.get("task", "classification")) for name in sorted(names))
        return [self.score, *(score for score in others if score != self.score)]

    @property
    def rounds(self) -> Int[np.ndarray, " T"]:
        """The evaluated rounds."""
        return np.asarray(self.results["rounds"])

    @property
    def test(self) -> Float[np.ndarray, "T K"]:
        """Each client's score on its test examples, by evaluated round."""
        return self.results[f"{self.score.name}_test"]

    def mean(self, score: pictures.Score) -> Float[np.ndarray, " T"]:
        """The mean of a score over clients, weighted by numbers of examples, by evaluated round."""
        if len(self.rows) == len(self.test):
            return np.array([row.get(score.name, np.nan) for row in self.rows], float)
        return pictures.over_clients(np.nanmean, self.results[f"{score.name}_test"])

    @property
    def distribution(self) -> Int[np.ndarray, " K"]:
        """Each client's true distribution; all zero if unknown."""
        if "distribution" in self.used:
            return np.asarray(self.used["distribution"])
        per_client = self.summary.get("per_client") or [{}] * self.test.shape[1]
        return np.array([row.get("distribution", 0) for row in per_client])

    @property
    def knows_groups(self) -> bool:
        """Whether the clients' true distributions are known."""
        return "distribution" in self.used or any("distribution" in row for row in self.client_rows.values())

    @property
    def wanted(self) -> Int[np.ndarray, " K"]:
        """The distribution that each client's models should fit: that of its test data."""
        return np.asarray(self.used.get("target", self.distribution))

    @property
    def has_groups(self) -> bool:
        """Whether the clients are known to have several true distributions."""
        return len(np.unique(self.wanted)) > 1

    @property
    def num_models(self) -> int | None:
        """Number of shared models that clients use; None if models are the clients' own."""
        return int(np.max(self.used["index"])) + 1 if str(self.used["topology"]) == "shared" else None

    @property
    def chooses(self) -> bool:
        """Whether clients choose among models. With only own models, or one model for all, there is nothing to plot."""
        return "weights" in self.used and str(self.used["topology"]) != "own" and int(np.max(self.used["index"])) > 0

    @property
    def all_scored(self) -> bool:
        """Whether all clients were scored, and not only a sample of them."""
        return "clients" not in self.used

    @property
    def ids(self) -> Int[np.ndarray, " K"]:
        """The scored clients: all, or a sample."""
        clients = self.used.get("clients", self.results.get("clients"))
        return np.arange(self.test.shape[1]) if clients is None else np.asarray(clients)

    @property
    def client_rows(self) -> dict[int, Mapping[str, Any]]:
        """The per-client rows of summary.json, by client."""
        return {row["client"]: row for row in self.summary.get("per_client") or []}

    @property
    def megabytes(self) -> Float[np.ndarray, " T"] | None:
        """Megabytes received and sent per client up to each evaluated round; None if nothing was sent or counted."""
        sent = np.array([row.get("bytes_down", 0) + row.get("bytes_up", 0) for row in self.rows], float) / 1e6
        return sent if len(sent) == len(self.test) and sent.any() else None

    @property
    def measured(self) -> dict[str, Float[np.ndarray, " T"]]:
        """The method's own metrics over the evaluated rounds, by name; NaN for the initial models."""
        last = self.rows[-1] if len(self.rows) == len(self.test) else {}
        known = tuple(score.name for score in self.scores)
        own = [name for name in last if name not in COMMON and not name.startswith((*known, "validation_"))]
        return {name: np.array([row.get(name, np.nan) for row in self.rows], float) for name in own}

    def accuracy(self, metric: str = "") -> Figure:
        """Plots a score over rounds: the mean over clients, the worst tenth, and the range.

        Args:
            metric: Name of the score; by default accuracy, or the loss for regression.

        Raises:
            ValueError: if the run has no such score.
        """
        scores = {score.name: score for score in self.scores}
        if metric and metric not in scores:
            raise ValueError(f"metric: the run has no {metric}; accepted: {', '.join(scores)}")
        return draw(Picture([over_rounds(self, scores[metric or self.score.name])]))

    def per_client(self) -> Figure:
        """Plots each client's score in the last round."""
        return draw(Picture([pictures.per_client(self.test[-1], self.wanted, self.ids, self.score)], (7.2, 4.0)))

    def collaboration(self, evaluation: int = -1) -> Figure:
        """Plots which models each client used at one evaluated round, by default the last."""
        index, weights = (self._kept(name)[evaluation] for name in ("index", "weights"))
        return draw(Picture([pictures.weight_matrix(index, weights, self.wanted, self.num_models)], MATRIX))

    def sharing(self, evaluation: int = -1) -> Figure:
        """Plots which clients share models at one evaluated round, by default the last."""
        index, weights = (self._kept(name)[evaluation] for name in ("index", "weights"))
        return draw(Picture([pictures.sharing_matrix(index, weights, self.wanted)], MATRIX))

    def weights(self) -> Figure:
        """Plots each client's weights over rounds."""
        used = [self._kept(name) for name in ("round", "index", "weights")]
        panels = pictures.weights_over_rounds(*used, self.distribution, self.wanted, self.num_models)
        columns = min(4, len(panels))
        size = 2.6 * columns + 0.4, 2.3 * -(-len(panels) // columns) + 0.3
        return draw(Picture(panels, size, columns, alike=True))

    def affinity(self) -> Figure:
        """Plots how much each client has gained from others' models, at up to four rounds."""
        rounds, values = self._kept("round"), self._kept("affinity")
        shown = np.unique(np.linspace(0, len(rounds) - 1, 4).round().astype(int))
        panels = [pictures.affinity(values[t], self.distribution, f"after round {rounds[t]}") for t in shown]
        return draw(Picture(panels, (3.1 * len(panels) + 0.8, 3.3)))

    def traffic(self) -> Figure:
        """Plots the score against the megabytes received and sent per client."""
        panel = against_traffic(self)
        if panel is None:
            raise ValueError("no model was sent or received")
        return draw(Picture([panel]))

    def measures(self) -> Figure:
        """Plots the method's own metrics over rounds, one panel per metric."""
        panels = of_measures(self)
        if not panels:
            raise ValueError("the method has no metrics of its own")
        return draw(Picture(panels, (4.6 * len(panels), 3.4)))

    def _kept(self, name: str) -> np.ndarray:
        if name not in self.used:
            raise ValueError(f"collaboration.npz has no {name}")
        if not self.all_scored:
            raise ValueError("this figure needs all clients, but only a sample was scored (eval_clients)")
        return self.used[name]


def over_rounds(run: Plots, score: pictures.Score) -> Panel:
    """Describes a score of the run over rounds."""
    test, train = (run.results.get(f"{score.name}_{split}") for split in ("test", "train"))
    return pictures.scores_over_rounds(run.rounds, test, run.mean(score), train, score)


def against_traffic(run: Plots) -> Panel | None:
    """Describes the run's score against its traffic; None if there is none."""
    sent = run.megabytes
    return None if sent is None else pictures.score_against_traffic(sent, run.test, run.mean(run.score), run.score)


def of_measures(run: Plots) -> list[Panel]:
    """Describes the method's own metrics."""
    return [pictures.measure(run.rounds, values, name) for name, values in run.measured.items()]


def figures(plots: Plots) -> dict[str, Figure]:
    """Draws all figures that the run has data for. Returns them by file name."""
    name = plots.score.name
    out = {f"{name}_over_rounds": plots.accuracy(), f"per_client_{name}": plots.per_client(), **extras(plots)}
    out |= {f"{own.name}_over_rounds": plots.accuracy(own.name) for own in plots.scores[1:] if own.name != "loss"}
    if plots.chooses and plots.all_scored:
        out |= {"sharing_matrix": plots.sharing(), "collaboration_matrix": plots.collaboration()}
        out["weights_over_rounds"] = plots.weights()
    if plots.measured:
        out["measures"] = plots.measures()
    if plots.megabytes is not None:
        out[f"traffic_against_{name}"] = plots.traffic()
    return out


def extras(plots: Plots) -> dict[str, Figure]:
    """Draws the figures that only some runs have. The page shows them as images."""
    out = {}
    if plots.curve:
        out["curve"] = draw(Picture([pictures.curve(plots.curve)], (7.2, 4.2)))
    if "affinity" in plots.used and plots.all_scored:
        out["affinity_over_rounds"] = plots.affinity()
    return out
