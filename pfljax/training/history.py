"""What a run has evaluated so far, kept in its files, and whether a folder is the run's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pfljax.core.types import UsageError
from pfljax.data import Federation
from pfljax.training import files


class History:
    """What has been evaluated so far, kept in the run's files, from which a resumed run takes it up again."""

    def __init__(self, directory: Path, num_rounds: int, topology: str):
        """Takes up what the files hold of the first `num_rounds` rounds; `topology` is that of the weighed models."""
        self.directory, self.topology = directory, topology
        self.rows: list[dict] = []
        self.results: dict[str, list[np.ndarray]] = {}
        self.collaboration: dict[str, list[np.ndarray]] = {}
        if num_rounds:
            self.rows = [row for row in files.read_jsonl(directory / "metrics.jsonl") if row["round"] <= num_rounds]
            count = len(self.rows)
            results = files.read_npz(directory / "results.npz")
            self.results = {k: list(v[:count]) for k, v in results.items() if k not in ("rounds", "scored")}
            collaboration = files.read_npz(directory / "collaboration.npz")
            fixed = ("topology", "distribution", "target")
            self.collaboration = {k: list(v[:count]) for k, v in collaboration.items() if k not in fixed}

    def add(self, row: dict, metrics: dict[str, dict[str, np.ndarray]], collaboration: dict[str, np.ndarray]) -> None:
        """Adds one evaluation: metrics by split and name, leaves (K,), and who used whom."""
        self.rows.append(row)
        for split, values in metrics.items():
            for name, value in values.items():
                self.results.setdefault(f"{name}_{split}", []).append(value)
        for name, value in ({"round": row["round"]} | collaboration).items():
            self.collaboration.setdefault(name, []).append(np.asarray(value))

    def write_rows(self) -> None:
        """Writes metrics.jsonl."""
        files.write_jsonl(self.directory / "metrics.jsonl", self.rows)

    def write(self, scored: str, federation: Federation) -> None:
        """Writes metrics.jsonl, results.npz and collaboration.npz."""
        self.write_rows()
        rounds = np.array([row["round"] for row in self.rows], np.int64)
        results = {name: np.stack(values) for name, values in self.results.items()}
        files.write_npz(self.directory / "results.npz", {"rounds": rounds, "scored": scored, **results})
        stacked = {name: np.stack(values) for name, values in self.collaboration.items()}
        stacked |= {"topology": self.topology, "distribution": federation.distribution}
        if federation.target is not None:
            stacked["target"] = federation.target
        files.write_npz(self.directory / "collaboration.npz", stacked)


def check_directory(out: Path, config: dict, resume: bool) -> None:
    """Sees to it that a run neither overwrites another nor goes on from one with other settings.

    Raises:
        UsageError: naming --out or the flags that differ.
    """
    path = out / "config.json"
    if not path.exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"--out={out}: holds something that is not a run; name an empty or a new folder")
        return
    if not resume:
        raise UsageError(f"--out={out}: holds another run; add --resume to go on with it, or name a new folder")
    before = files.read_json(path).get("flags", {})
    free = {"resume", "rounds", "eval_every", "checkpoint_every", "plan", "chunk", "devices", "out"}
    free |= {"exchange", "client_store", "profile", "coordinator", "num_processes", "process_id"}
    free |= {"algorithms", "seeds", "tune", "replicate"}  # which other cells a sweep has
    if config["flags"].get("lr_schedule") == "multistep":
        free -= {"rounds"}  # by which the rates fall
    changed = [
        f"--{name} was {before[name]!r} and is {value!r}"
        for name, value in files.plain(config["flags"]).items()
        if name not in free and name in before and before[name] != value
    ]
    if changed:
        raise UsageError(f"--resume: --out={out} was run with other settings: {'; '.join(changed)}")
