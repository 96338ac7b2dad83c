"""Figures of a run, drawn on request, such as `result.plot.collaboration()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from pfljax.folder import files
from pfljax.report import figures

# Columns of metrics.jsonl that every method has. All others are the method's own metrics.
COMMON = {"round", "seconds", "train_loss", "loss", "bytes_down", "bytes_up"} | {
    f"accuracy{kind}" for kind in ("", "_mean", "_std", "_bottom_decile", "_min")
}


@dataclasses.dataclass(frozen=True)
class Plots:
    """Figures of a run. Every method returns a figure, which notebooks show inline.

    Attributes:
        summary: Content of summary.json.
        rows: Rows of metrics.jsonl, one dict per evaluated round.
        results: Content of results.npz: "rounds" (T,) and scores by split, such as "accuracy_test" (T, K).
        used: Content of collaboration.npz: "round" (T,), "index" and "weights" (T, K, J), "topology" and, if
            available, "distribution" (K,), "target" (K,), "labels" (K, C) and "affinity" (T, K, K).
    """

    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    results: Mapping[str, np.ndarray]
    used: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> Plots:
        """Reads the run in a folder."""
        optional = lambda name: files.read_npz(directory / name) if (directory / name).exists() else {}
        summary, rows = files.read_json(directory / "summary.json"), files.read_jsonl(directory / "metrics.jsonl")
        return cls(summary, rows, optional("results.npz"), optional("collaboration.npz"))

    @property
    def task(self) -> str:
        """The models' task: "classification" or "regression"."""
        return self.summary.get("task", "classification")

    @property
    def score(self) -> str:
        """The metric of their predictions: "accuracy" or "loss"."""
        return "accuracy" if self.task == "classification" else "loss"

    @property
    def test(self) -> Float[np.ndarray, "T K"]:
        """Each client's score on its test examples, by evaluated round."""
        return self.results[f"{self.score}_test"]

    @property
    def sizes(self) -> Int[np.ndarray, " K"] | None:
        """Number of test examples per client, if known."""
        per_client = self.summary.get("per_client")
        return np.array([row["n_test"] for row in per_client]) if per_client else None

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
    def has_groups(self) -> bool:
        """Whether the clients are known to have several true distributions."""
        return len(np.unique(self.wanted)) > 1

    @property
    def target(self) -> Int[np.ndarray, " K"] | None:
        """Distribution of each client's test data, if it differs from that of its training data."""
        return self.used.get("target")

    @property
    def wanted(self) -> Int[np.ndarray, " K"]:
        """The distribution that each client's models should fit: that of its test data."""
        return self.distribution if self.target is None else np.asarray(self.target)

    @property
    def topology(self) -> str:
        """Which models clients use: their own, or shared ones."""
        return str(self.used["topology"])

    @property
    def collaborates(self) -> bool:
        """Whether clients choose among models. With only own models, or one model for all, there is nothing to plot."""
        return self.chooses and "clients" not in self.used  # the matrix needs all clients, not a sample

    @property
    def chooses(self) -> bool:
        """Whether clients choose among models, even if only a sample of the clients was scored."""
        return "weights" in self.used and self.topology != "own" and int(np.max(self.used["index"])) > 0

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
    def bytes_sent(self) -> Float[np.ndarray, " T"]:
        """Bytes received and sent per client up to each evaluated round."""
        return np.array([row.get("bytes_down", 0) + row.get("bytes_up", 0) for row in self.rows], float)

    @property
    def measured(self) -> dict[str, list[float]]:
        """The method's own metrics over the evaluated rounds, by name; NaN for the initial models."""
        last = self.rows[-1] if len(self.rows) == len(self.test) else {}
        names = [name for name in last if name not in COMMON and not name.startswith("validation_")]
        return {name: [row.get(name, np.nan) for row in self.rows] for name in names}

    def accuracy(self) -> Figure:
        """Plots the score over rounds: the mean over clients, and the worst tenth."""
        train = self.results.get(f"{self.score}_train")
        rounds = self.results["rounds"]
        return figures.accuracy_over_rounds(rounds, self.test, sizes=self.sizes, train=train, task=self.task)

    def per_client(self) -> Figure:
        """Plots each client's score in the last round."""
        return figures.per_client(self.test[-1], self.distribution, task=self.task)

    def collaboration(self, evaluation: int = -1) -> Figure:
        """Plots which models each client used at one evaluated round, by default the last."""
        index, weights = (self._kept(name)[evaluation] for name in ("index", "weights"))
        return figures.collaboration_matrix(index, weights, self.distribution, topology=self.topology)

    def sharing(self, evaluation: int = -1) -> Figure:
        """Plots which clients share models at one evaluated round, by default the last."""
        index, weights = (self._kept(name)[evaluation] for name in ("index", "weights"))
        return figures.sharing_matrix(index, weights, self.wanted)

    def weights(self) -> Figure:
        """Plots each client's weights over rounds."""
        rounds, index, weights = (self._kept(name) for name in ("round", "index", "weights"))
        return figures.weights_over_rounds(
            rounds, index, weights, self.distribution, topology=self.topology, target=self.target
        )

    def affinity(self) -> Figure:
        """Plots how much each client has gained from others' models, over rounds."""
        return figures.affinity_over_rounds(self._kept("round"), self._kept("affinity"), self.distribution)

    def traffic(self) -> Figure:
        """Plots the score against the bytes received and sent per client."""
        return figures.traffic_against_accuracy(self.bytes_sent, self.test, sizes=self.sizes, task=self.task)

    def measures(self) -> Figure:
        """Plots the method's own metrics over rounds."""
        if not self.measured:
            raise ValueError("the method has no metrics of its own")
        return figures.measures(self.results["rounds"], self.measured)

    def _kept(self, name: str) -> np.ndarray:
        if name not in self.used:
            raise ValueError(f"collaboration.npz has no {name}")
        if "clients" in self.used:
            raise ValueError("this figure needs all clients, but only a sample was scored (eval_clients)")
        return self.used[name]
