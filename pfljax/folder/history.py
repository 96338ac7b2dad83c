"""The evaluations of a run so far, kept in its files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from pfljax.contract.types import Topology
from pfljax.folder import files
from pfljax.run.experiment import Experiment

COUNTS = ("down", "up", "seconds", "simulated")
NUMBER = re.compile("[1-9][0-9]{0,8}")


class History:
    """All evaluations of a run, saved to its files if it has a directory.

    Attributes:
        experiment: The run. If it scores only some clients (n,), n replaces K in all shapes.
        directory: The run's directory, or None.
        topology: Topology of the models that clients use.
        model: Which of them is scored, in words.
        rows: One entry per evaluated round, as in metrics.jsonl.
        results: By name, such as "accuracy_test": one array (K,) per evaluated round.
        collaboration: By name: one array per evaluated round.
        down: Bytes downloaded so far, per client.
        up: Bytes uploaded so far, per client.
        seconds: Seconds spent on rounds so far.
        parts: Seconds spent on other parts of the run so far, such as "evaluation".
        simulated: Seconds on the simulated clock so far.
        dropped: How often clients were dropped so far, since their results were not finite, by client.
        trained: Number of rounds in which each client trained, int32 (K,); None: an earlier version did not record it.
    """

    def __init__(
        self,
        experiment: Experiment,
        directory: Path | None,
        num_rounds: int,
        topology: Topology,
        model: str,
    ):
        """Reads the history that was saved with the checkpoint after `num_rounds` rounds."""
        self.experiment = experiment
        self.directory = directory
        self.topology = topology
        self.model = model
        self.rows: list[dict] = []
        self.results: dict[str, list[np.ndarray]] = {}
        self.collaboration: dict[str, list[np.ndarray]] = {}
        self.trained: np.ndarray | None = np.zeros(experiment.federation.num_clients, np.int32)
        counts: dict[str, Any] = dict.fromkeys(COUNTS, 0.0)
        if num_rounds and directory is not None:
            arrays = files.read_npz(kept_with(directory / "checkpoints", num_rounds))
            self.rows = json.loads(str(arrays.pop("rows")))
            counts |= json.loads(str(arrays.pop("counts")))
            self.trained = arrays.pop("trained", None)
            series = {"results": self.results, "collaboration": self.collaboration}
            for path, values in arrays.items():
                part, _, name = path.partition("/")
                series[part][name] = list(values)
        self.down = counts["down"]
        self.up = counts["up"]
        self.seconds = counts["seconds"]
        self.simulated = counts["simulated"]
        self.parts: dict[str, float] = counts.get("parts", {})
        dropped = counts.get("dropped", {})
        self.dropped: dict[int, int] = {int(client): times for client, times in dropped.items()}

    def count_trained(self, clients: np.ndarray) -> None:
        """Counts the clients that trained in some rounds, (rounds, S); negative numbers are no clients."""
        if self.trained is not None:
            np.add.at(self.trained, clients[clients >= 0], 1)

    @property
    def has_trained(self) -> np.ndarray:
        """Which clients have ever trained, (K,) bool; all before anyone has, and if it was not recorded."""
        num_clients = self.experiment.federation.num_clients
        if self.trained is None or not self.trained.any():
            return np.ones(num_clients, bool)
        return self.trained > 0

    @property
    def last(self) -> dict:
        """The newest row; empty before the first evaluation."""
        return self.rows[-1] if self.rows else {}

    def add(
        self,
        row: dict,
        metrics: dict[str, dict[str, np.ndarray]],
        collaboration: dict[str, np.ndarray],
    ) -> None:
        """Adds one evaluation: metrics (K,) by split and name, and which models clients used."""
        self.rows.append(row)
        results = {}
        for split, values in metrics.items():
            results |= {f"{name}_{split}": value for name, value in values.items()}
        # A metric may have been added or dropped since the last evaluation; it is NaN where it is missing.
        num_earlier = len(self.rows) - 1
        for name in self.results | results:
            if name not in self.results:
                self.results[name] = [np.full_like(results[name], np.nan)] * num_earlier
            series = self.results[name]
            if name in results:
                series.append(results[name])
            else:
                series.append(np.full_like(series[-1], np.nan))
        for name, value in ({"round": row["round"]} | collaboration).items():
            self.collaboration.setdefault(name, []).append(np.asarray(value))

    def take_back(self, num_rounds: int) -> dict:
        """Removes the last evaluation if it is that after `num_rounds` rounds, and returns its row; otherwise {}."""
        if self.last.get("round") != num_rounds:
            return {}
        for values in (*self.results.values(), *self.collaboration.values()):
            values.pop()
        return self.rows.pop()

    def write_rows(self) -> None:
        """Writes metrics.jsonl."""
        if self.directory is not None:
            files.write_jsonl(self.directory / "metrics.jsonl", self.rows)

    def write(self) -> None:
        """Writes metrics.jsonl, results.npz and collaboration.npz."""
        if self.directory is None:
            return
        self.write_rows()
        files.write_npz(self.directory / "results.npz", self.results_arrays())
        files.write_npz(self.directory / "collaboration.npz", self.collaboration_arrays())

    def keep(self, num_rounds: int) -> None:
        """Saves the history with the checkpoint after `num_rounds` rounds, so that no other file is needed."""
        if self.directory is None:
            return
        arrays: dict[str, Any] = {}
        for name, values in self.results.items():
            arrays[f"results/{name}"] = np.stack(values)
        for name, values in self.collaboration.items():
            arrays[f"collaboration/{name}"] = np.stack(values)
        # The counts include rounds after the last row.
        counts = {name: getattr(self, name) for name in (*COUNTS, "dropped", "parts")}
        if self.trained is not None:
            arrays["trained"] = self.trained
        arrays["rows"] = np.asarray(json.dumps(files.plain(self.rows)))
        arrays["counts"] = np.asarray(json.dumps(counts))
        path = kept_with(self.directory / "checkpoints", num_rounds)
        files.write_npz(path, arrays)

    @property
    def num_bytes(self) -> int:
        """Size of the arrays that `write` and `keep` write."""
        series = (*self.results.values(), *self.collaboration.values())
        return 2 * sum(value.nbytes for values in series for value in values)

    def results_arrays(self) -> dict[str, Any]:
        """Returns the content of results.npz: accuracy and loss (T, K) per split, and the evaluated rounds (T,)."""
        rounds = np.array([row["round"] for row in self.rows], np.int64)
        arrays: dict[str, Any] = {"rounds": rounds, "scored": self.model}
        arrays |= self._clients
        arrays |= {name: np.stack(values) for name, values in self.results.items()}
        return arrays

    def collaboration_arrays(self) -> dict[str, Any]:
        """Returns the content of collaboration.npz: round (T,), index and weights (T, K, J), and related arrays."""
        arrays: dict[str, Any] = {
            name: np.stack(values) for name, values in self.collaboration.items()
        }
        arrays["topology"] = self.topology
        federation = self.experiment.federation
        scored = slice(None) if self.experiment.scored is None else self.experiment.scored
        if federation.group is not None:
            arrays["group"] = federation.group[scored]
        if federation.target is not None:
            arrays["target"] = federation.target[scored]
        class_counts = federation.class_counts()
        if class_counts is not None:
            arrays["labels"] = class_counts[scored]
        return arrays | self._clients

    @property
    def _clients(self) -> dict[str, np.ndarray]:
        scored = self.experiment.scored
        return {} if scored is None else {"clients": scored}


def checkpoints(directory: Path) -> list[int]:
    """Returns the rounds of the checkpoints in a folder, newest first. Ignores Orbax's temporary folders."""
    if not directory.exists():
        return []
    names = [path.name for path in directory.iterdir() if NUMBER.fullmatch(path.name)]
    return sorted(map(int, names), reverse=True)


def kept_with(directory: Path, num_rounds: int) -> Path:
    """Returns the path of the history that belongs to a checkpoint."""
    return directory / f"history-{num_rounds}.npz"


def saved_rows(directory: Path, num_rounds: int) -> list[dict]:
    """Returns the rows of the history that belongs to a checkpoint, with NaN as it was."""
    arrays = files.read_npz(kept_with(directory, num_rounds))
    return json.loads(str(arrays["rows"]))


def is_whole(directory: Path, num_rounds: int) -> bool:
    """Whether the history that belongs to a checkpoint can be read."""
    try:
        arrays = files.read_npz(kept_with(directory, num_rounds))
        json.loads(str(arrays["rows"]))
    except Exception:  # a truncated file can make NumPy raise anything
        return False
    return True
