"""The figures of a run, each drawn when it is asked for: `result.plot.collaboration()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from pfljax.report import figures
from pfljax.training import files

# What every method's rows of metrics.jsonl have; the rest are its own measures.
COMMON = {"round", "seconds", "train_loss", "loss", "bytes_down", "bytes_up"} | {
    f"accuracy{kind}" for kind in ("", "_mean", "_std", "_bottom_decile", "_min")
}


@dataclasses.dataclass(frozen=True)
class Plots:
    """What a run leaves behind, drawn. Every method returns a figure, which a notebook shows inline.

    Attributes:
        summary: As in summary.json.
        rows: As in metrics.jsonl, a dict per evaluated round.
        results: As in results.npz; "rounds" (T,) and scores by split, as "accuracy_test" (T, K).
        used: As in collaboration.npz: "round" (T,), "index" and "weights" (T, K, J), "distribution" (K,),
            "topology", and where there are any "target" (K,), "labels" (K, C) and "affinity" (T, K, K).
    """

    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    results: Mapping[str, np.ndarray]
    used: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> Plots:
        """The figures of the run in a folder."""
        optional = lambda name: files.read_npz(directory / name) if (directory / name).exists() else {}
        summary, rows = files.read_json(directory / "summary.json"), files.read_jsonl(directory / "metrics.jsonl")
        return cls(summary, rows, optional("results.npz"), optional("collaboration.npz"))

    @property
    def task(self) -> str:
        """What the models do: "classification" or "regression"."""
        return self.summary.get("task", "classification")

    @property
    def score(self) -> str:
        """What their predictions are scored by: "accuracy" or "loss"."""
        return "accuracy" if self.task == "classification" else "loss"

    @property
    def test(self) -> Float[np.ndarray, "T K"]:
        """Each client's score on its test examples, by evaluated round."""
        return self.results[f"{self.score}_test"]

    @property
    def sizes(self) -> Int[np.ndarray, " K"] | None:
        """Number of test examples per client, where the run knows it."""
        per_client = self.summary.get("per_client")
        return np.array([row["n_test"] for row in per_client]) if per_client else None

    @property
    def distribution(self) -> Int[np.ndarray, " K"]:
        """Each client's true distribution; all zero where nothing is known of it."""
        if "distribution" in self.used:
            return np.asarray(self.used["distribution"])
        per_client = self.summary.get("per_client") or []
        return np.array([row["distribution"] for row in per_client] or [0] * self.test.shape[1])

    @property
    def target(self) -> Int[np.ndarray, " K"] | None:
        """Distribution of each client's test data, where it is not that of its training data."""
        return self.used.get("target")

    @property
    def wanted(self) -> Int[np.ndarray, " K"]:
        """The distribution that each client's models should suit: that of its test data."""
        return self.distribution if self.target is None else np.asarray(self.target)

    @property
    def topology(self) -> str:
        """Whose models clients use."""
        return str(self.used["topology"])

    @property
    def collaborates(self) -> bool:
        """Whether clients choose among models; own models only, or one model for all, would make empty pictures."""
        return self.chooses and "clients" not in self.used  # who uses whom is known of a sample only

    @property
    def chooses(self) -> bool:
        """Whether there is something to see of who uses whom, if only of a sample of the clients."""
        return "weights" in self.used and self.topology != "own" and int(np.max(self.used["index"])) > 0

    @property
    def ids(self) -> Int[np.ndarray, " K"]:
        """The clients that were scored: all, or the sample."""
        clients = self.used.get("clients", self.results.get("clients"))
        return np.arange(self.test.shape[1]) if clients is None else np.asarray(clients)

    @property
    def client_rows(self) -> dict[int, Mapping[str, Any]]:
        """The rows of summary.json on each client, by client."""
        return {row["client"]: row for row in self.summary.get("per_client") or []}

    @property
    def bytes_sent(self) -> Float[np.ndarray, " T"]:
        """Bytes that a client has received and sent by each evaluated round."""
        return np.array([row.get("bytes_down", 0) + row.get("bytes_up", 0) for row in self.rows], float)

    @property
    def measured(self) -> dict[str, list[float]]:
        """What the method measures of itself, by name, over the evaluated rounds; NaN for the initial models."""
        last = self.rows[-1] if len(self.rows) == len(self.test) else {}
        names = [name for name in last if name not in COMMON and not name.startswith("validation_")]
        return {name: [row.get(name, np.nan) for row in self.rows] for name in names}

    def accuracy(self) -> Figure:
        """The score over rounds: the clients' mean, and the worst tenth."""
        train = self.results.get(f"{self.score}_train")
        rounds = self.results["rounds"]
        return figures.accuracy_over_rounds(rounds, self.test, sizes=self.sizes, train=train, task=self.task)

    def per_client(self) -> Figure:
        """Each client's score in the last round."""
        return figures.per_client(self.test[-1], self.distribution, task=self.task)

    def collaboration(self, evaluation: int = -1) -> Figure:
        """Whose models each client used at one of the evaluated rounds, by default the last."""
        index, weights = (self._kept(name)[evaluation] for name in ("index", "weights"))
        return figures.collaboration_matrix(index, weights, self.distribution, topology=self.topology)

    def sharing(self, evaluation: int = -1) -> Figure:
        """Which clients share models at one of the evaluated rounds, by default the last."""
        index, weights = (self._kept(name)[evaluation] for name in ("index", "weights"))
        return figures.sharing_matrix(index, weights, self.wanted)

    def weights(self) -> Figure:
        """Each client's weights over rounds."""
        rounds, index, weights = (self._kept(name) for name in ("round", "index", "weights"))
        return figures.weights_over_rounds(
            rounds, index, weights, self.distribution, topology=self.topology, target=self.target
        )

    def affinity(self) -> Figure:
        """How much each client has gained from others' models, over rounds."""
        return figures.affinity_over_rounds(self._kept("round"), self._kept("affinity"), self.distribution)

    def traffic(self) -> Figure:
        """The score against what a client has received and sent."""
        return figures.traffic_against_accuracy(self.bytes_sent, self.test, sizes=self.sizes, task=self.task)

    def measures(self) -> Figure:
        """What the method measures of itself, over rounds."""
        if not self.measured:
            raise ValueError("the method measures nothing of itself")
        return figures.measures(self.results["rounds"], self.measured)

    def _kept(self, name: str) -> np.ndarray:
        if name not in self.used:
            raise ValueError(f"the run has kept no {name} of its clients' collaboration")
        if "clients" in self.used:
            raise ValueError("the run has scored a sample of its clients (eval_clients); this figure needs them all")
        return self.used[name]
