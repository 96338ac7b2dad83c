"""Experiment trackers: what they receive at every evaluation, and a tracker for TensorBoard."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from pfljax.contract import optional
from pfljax.contract.fields import checked, knob
from pfljax.evaluation import collaboration
from pfljax.folder import files

FLUSH_SECONDS = 1  # maximum delay until TensorBoard sees an evaluation
MAX_MATRIX = 2000  # no collaboration matrix with more clients or models


class Evaluation(NamedTuple):
    """One evaluation of a run, in Python numbers and NumPy arrays on the host.

    Attributes:
        run: Name of the run in a comparison, such as "fedavg/seed-0"; "" for a single run.
        round: Number of rounds done.
        resumed: Round that training continued from, after a checkpoint or an earlier call; 0 for a new run. Later
            rounds that were tracked before are tracked again.
        scalars: Scalars by name: "accuracy/test", "accuracy_bottom_decile/test", "loss/train" and so on; also
            "train_loss", "bytes_down", "bytes_up" (per client, so far), "seconds" and the method's own metrics, as in
            metrics.jsonl.
        per_client: Arrays by name, such as "accuracy/test": one value for each client with examples in the split.
        collaboration: Weight that each client gives to each model. Shape (K, N). None with `eval_clients`, and with
            more than 2,000 clients or models.
    """

    run: str
    round: int
    resumed: int
    scalars: dict[str, float]
    per_client: dict[str, np.ndarray]
    collaboration: np.ndarray | None


Tracker = Callable[[Evaluation], None]


def named(tracker: Tracker | None, run: str) -> Tracker | None:
    """Returns a tracker that sets the run's name."""
    return tracker and (lambda evaluation: tracker(evaluation._replace(run=run)))


def make_evaluation(
    row: Mapping[str, float],
    means: Mapping[str, Mapping[str, float]],
    scores: Mapping[str, Mapping[str, np.ndarray]],
    used: Mapping[str, np.ndarray],
    *,
    shared: bool,
    resumed: int,
) -> Evaluation:
    """Makes the `Evaluation` for trackers.

    Args:
        row: The row of metrics.jsonl.
        means: By split: the summary of its scores by `metrics.summarize`.
        scores: By split and metric: one value for each scored client; NaN without examples.
        used: "index" and "weights" (K, J) of the models that clients use; empty if not all clients are scored.
        shared: Whether the models are shared rather than the clients' own.
        resumed: See `Evaluation`.
    """
    scalars = {f"{name}/{split}": value for split, found in means.items() for name, value in found.items()}
    told = {"round", *means["test"], *(f"validation_{name}" for name in means["test"])}
    scalars |= {name: value for name, value in row.items() if name not in told}
    per_client = {
        f"{name}/{split}": values[~np.isnan(values)]
        for split, found in scores.items()
        for name, values in found.items()
    }
    matrix = None
    if used:
        index = used["index"]
        num_models = int(index.max()) + 1 if shared else len(index)
        if max(len(index), num_models) <= MAX_MATRIX:
            matrix = collaboration.dense(index, used["weights"], num_models)
    return Evaluation("", int(row["round"]), resumed, scalars, per_client, matrix)


class TensorBoard:
    """A tracker that writes scalars, histograms over clients and the collaboration matrix for TensorBoard.

    A resumed run writes another event file. It tells TensorBoard to drop earlier values of repeated rounds, so every
    curve has one value per round.
    """

    @checked()
    def __init__(self, folder: Annotated[str | Path, knob(accepted="the path of a folder")]):
        """Sets the folder, which is created at the first evaluation.

        Args:
            folder: Folder of one run. Runs of a comparison get subfolders with their names.

        Raises:
            ArgumentError: if tensorboardX is not installed.
        """
        self._make = optional.load("tensorboardX", "tensorboard").SummaryWriter
        self._folder = Path(folder)
        files.check_writable(self._folder, "folder")
        self._writers: dict[str, Any] = {}

    def __call__(self, evaluation: Evaluation) -> None:
        """Writes one evaluation."""
        writer = self._writer(evaluation)
        step = evaluation.round
        for name, value in evaluation.scalars.items():
            writer.add_scalar(name, value, step)
        for name, values in evaluation.per_client.items():
            finite = values[np.isfinite(values)]
            if finite.size:
                writer.add_histogram(f"clients/{name}", finite, step)
        if evaluation.collaboration is not None:
            writer.add_image("collaboration", np.clip(evaluation.collaboration, 0, 1), step, dataformats="HW")

    def _writer(self, evaluation: Evaluation) -> Any:
        if evaluation.run not in self._writers:
            purge = evaluation.resumed + 1 if evaluation.resumed else 0
            suffix = f".{time.time_ns()}"  # files of the same second get distinct, ordered names
            options = {"purge_step": purge, "filename_suffix": suffix, "flush_secs": FLUSH_SECONDS}
            writer = self._make(str(self._folder / evaluation.run), **options)
            weakref.finalize(self, writer.close)
            self._writers[evaluation.run] = writer
        return self._writers[evaluation.run]
