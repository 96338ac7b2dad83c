"""Experiment trackers: what they receive at every evaluation, and trackers for TensorBoard, W&B and MLflow."""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from pfljax.contract import optional
from pfljax.contract.paths import expanded
from pfljax.evaluation import collaboration
from pfljax.folder import files
from pfljax.settings.fields import checked, hyperparameter

FLUSH_SECONDS = 1  # maximum delay until TensorBoard sees an evaluation
MAX_MATRIX = 2000  # no collaboration matrix with more clients or models
PROJECT = "pfljax"  # unless the user or the library's environment variable names another
NAME = "run.txt"  # contains the library's name of a run, by which a resumed run continues it

Folder = Annotated[str | Path, hyperparameter(accepted="the path of a folder")]


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

    Examples:
        A tracker that prints the test accuracy:

        >>> from pfljax.trackers import Evaluation
        >>> def tracker(evaluation):
        ...     print(evaluation.round, evaluation.scalars["accuracy/test"])
        >>> evaluation = Evaluation(
        ...     run="",
        ...     round=10,
        ...     resumed=0,
        ...     scalars={"accuracy/test": 0.9},
        ...     per_client={},
        ...     collaboration=None,
        ... )
        >>> tracker(evaluation)
        10 0.9
    """

    run: str
    round: int
    resumed: int
    scalars: dict[str, float]
    per_client: dict[str, np.ndarray]
    collaboration: np.ndarray | None


Tracker = Callable[[Evaluation], None]
"""A tracker: a function that is called with every `Evaluation` of a run.

Examples:
    A tracker that collects the test accuracy of every evaluation:

    >>> import pfljax as pfl
    >>> accuracies = {}
    >>> def tracker(evaluation: pfl.trackers.Evaluation) -> None:
    ...     accuracies[evaluation.round] = evaluation.scalars["accuracy/test"]
    >>> clients = pfl.data.digits(num_clients=4, train_examples=8)
    >>> run = pfl.Run(pfl.FedAvg(), clients, pfl.models.MLP(hidden=(4,)))
    >>> result = run.train(rounds=2, eval_every=1, tracker=tracker)
    >>> list(accuracies)
    [0, 1, 2]
"""


def named(tracker: Tracker | None, run: str) -> Tracker | None:
    """Returns a tracker that sets the run's name."""
    if tracker is None:
        return None

    def track(evaluation: Evaluation) -> None:
        tracker(evaluation._replace(run=run))

    return track


def make_evaluation(
    row: Mapping[str, float],
    means: Mapping[str, Mapping[str, float]],
    scores: Mapping[str, Mapping[str, np.ndarray]],
    used: Mapping[str, np.ndarray],
    *,
    shared: bool,
    resumed: int,
) -> Evaluation:
    """Makes the `Evaluation` for trackers, from a row of metrics.jsonl and by split the means of its scores.

    `scores` has one value for each scored client; NaN without examples. `used` has "index" and "weights" (K, J) of the
    models that clients use, which may be `shared`; it is empty if not all clients are scored.
    """
    scalars = {}
    for split, values in means.items():
        scalars |= {f"{name}/{split}": value for name, value in values.items()}
    # Scores of test and validation examples are in the row under other names.
    names = set(means["test"])
    renamed = {"round"} | names | {f"validation_{name}" for name in names}
    scalars |= {name: value for name, value in row.items() if name not in renamed}

    per_client = {}
    for split, arrays in scores.items():
        for name, values in arrays.items():
            per_client[f"{name}/{split}"] = values[~np.isnan(values)]

    matrix = None
    if used:
        index = used["index"]
        num_models = int(index.max()) + 1 if shared else len(index)
        if max(len(index), num_models) <= MAX_MATRIX:
            matrix = collaboration.dense(index, used["weights"], num_models)
    return Evaluation(
        run="",
        round=int(row["round"]),
        resumed=resumed,
        scalars=scalars,
        per_client=per_client,
        collaboration=matrix,
    )


class _Tracker:
    """What trackers of a library share: one open run for each run of a comparison.

    `package` is the library's, and `board` the folder in which the command line keeps a run's files of the tracker.
    """

    package = ""
    board = ""

    def __init__(self, folder: str | Path):
        self._library = optional.load(self.package, "tracker")
        self._folder = Path(expanded(folder, "folder"))
        files.check_writable(self._folder, "folder")
        self._runs: dict[str, Any] = {}

    def _run(self, evaluation: Evaluation) -> Any:
        """Returns the library's run, which `_open` opens at the first evaluation, and which is closed at last."""
        if evaluation.run not in self._runs:
            folder = self._folder / evaluation.run
            run, close = self._open(evaluation, folder)
            self._runs[evaluation.run] = run
            weakref.finalize(self, close)
        return self._runs[evaluation.run]

    def _open(self, evaluation: Evaluation, folder: Path) -> tuple[Any, Callable[[], Any]]:
        """Returns the run of an evaluation, and the function that closes it."""
        raise NotImplementedError

    def _title(self, evaluation: Evaluation) -> str:
        """Returns a run's name: that in the comparison, or the last two folders without the board's own."""
        if evaluation.run:
            return evaluation.run
        folders = [part for part in self._folder.parts if part != self.board]
        return "/".join(folders[-2:])


def _finite(evaluation: Evaluation) -> dict[str, np.ndarray]:
    """Returns the finite scores over clients by the name of their histogram; without those that have none."""
    finite = {}
    for name, values in evaluation.per_client.items():
        values = values[np.isfinite(values)]
        if values.size:
            finite[f"clients/{name}"] = values
    return finite


def _continued_run(evaluation: Evaluation, folder: Path) -> str | None:
    """Returns the library's name of the run that a resumed run continues; None for a new run."""
    path = folder / NAME
    if not evaluation.resumed or not path.is_file():
        return None
    return path.read_text()


class TensorBoard(_Tracker):
    """A tracker that writes scalars, histograms over clients and the collaboration matrix for TensorBoard.

    A resumed run writes another event file. It tells TensorBoard to drop earlier values of repeated rounds, so every
    curve has one value per round.

    Examples:
        >>> import pfljax as pfl
        >>> tracker = pfl.trackers.TensorBoard("logs")
    """

    package = "tensorboardX"
    board = "tensorboard"

    @checked()
    def __init__(self, folder: Folder):
        """Sets the folder, which is created at the first evaluation.

        Args:
            folder: Folder of one run. Runs of a comparison get subfolders with their names.

        Raises:
            ArgumentError: if tensorboardX is not installed.
        """
        super().__init__(folder)

    def __call__(self, evaluation: Evaluation) -> None:
        """Writes one evaluation."""
        writer = self._run(evaluation)
        step = evaluation.round
        for name, value in evaluation.scalars.items():
            writer.add_scalar(name, value, step)
        for name, values in _finite(evaluation).items():
            writer.add_histogram(name, values, step)
        if evaluation.collaboration is not None:
            image = np.clip(evaluation.collaboration, 0, 1)
            writer.add_image("collaboration", image, step, dataformats="HW")

    def _open(self, evaluation: Evaluation, folder: Path) -> tuple[Any, Callable[[], Any]]:
        purge = evaluation.resumed + 1 if evaluation.resumed else 0
        suffix = f".{time.time_ns()}"  # files of the same second get distinct, ordered names
        writer = self._library.SummaryWriter(
            str(folder), purge_step=purge, filename_suffix=suffix, flush_secs=FLUSH_SECONDS
        )
        return writer, writer.close


class WandB(_Tracker):
    """A tracker that logs scalars and histograms over clients to Weights & Biases.

    Each run of a comparison is a run of W&B. A resumed run continues it; W&B keeps the first values of repeated rounds.

    Examples:
        >>> import pfljax as pfl
        >>> tracker = pfl.trackers.WandB("logs", project="digits")  # doctest: +SKIP
    """

    package = "wandb"
    board = "wandb"

    @checked()
    def __init__(self, folder: Folder, project: str | None = None):
        """Sets folder and project. Nothing is sent before the first evaluation.

        Args:
            folder: Folder for W&B's local files and the run's id. Runs of a comparison get subfolders with their names.
            project: The project; None: that of WANDB_PROJECT, or pfljax.

        Raises:
            ArgumentError: if wandb is not installed.
        """
        super().__init__(folder)
        self._project = project or os.environ.get("WANDB_PROJECT", PROJECT)

    def __call__(self, evaluation: Evaluation) -> None:
        """Logs one evaluation."""
        histograms = {}
        for name, values in _finite(evaluation).items():
            histograms[name] = self._library.Histogram(values)
        run = self._run(evaluation)
        run.log(evaluation.scalars | histograms, step=evaluation.round)

    def _open(self, evaluation: Evaluation, folder: Path) -> tuple[Any, Callable[[], Any]]:
        folder.mkdir(parents=True, exist_ok=True)
        options = {"project": self._project, "name": self._title(evaluation), "dir": str(folder)}
        continued = _continued_run(evaluation, folder)
        if continued:
            options |= {"id": continued, "resume": "allow"}
        run = self._library.init(**options, reinit="create_new")  # several runs may be open at once
        files.write_text(folder / NAME, run.id)
        return run, run.finish


class MLflow(_Tracker):
    """A tracker that logs scalars to MLflow, which has no histograms. The server is that of MLFLOW_TRACKING_URI.

    Each run of a comparison is a run of MLflow. A resumed run continues it; repeated rounds are not logged again.

    Examples:
        >>> import pfljax as pfl
        >>> tracker = pfl.trackers.MLflow("logs", experiment="digits")  # doctest: +SKIP
    """

    package = "mlflow"
    board = "mlflow"

    @checked()
    def __init__(self, folder: Folder, experiment: str | None = None):
        """Sets folder and experiment. Nothing is sent before the first evaluation.

        Args:
            folder: Folder for the run's id. Runs of a comparison get subfolders with their names.
            experiment: The experiment; None: that of MLFLOW_EXPERIMENT_NAME, or pfljax.

        Raises:
            ArgumentError: if mlflow is not installed.
        """
        super().__init__(folder)
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)

    def __call__(self, evaluation: Evaluation) -> None:
        """Logs one evaluation."""
        client, run, last = self._run(evaluation)
        step = evaluation.round
        if step <= last:
            return
        metric = self._library.entities.Metric
        now = int(1000 * time.time())
        metrics = [metric(name, value, now, step) for name, value in evaluation.scalars.items()]
        client.log_batch(run, metrics)

    def _open(self, evaluation: Evaluation, folder: Path) -> tuple[Any, Callable[[], Any]]:
        client = self._library.MlflowClient()
        run = _continued_run(evaluation, folder)
        last = -1
        if run is not None:
            client.update_run(run, status="RUNNING")
            earlier = client.get_metric_history(run, "train_loss")
            last = max((metric.step for metric in earlier), default=-1)
        else:
            experiment = self._library.set_experiment(self._experiment).experiment_id
            created = client.create_run(experiment, run_name=self._title(evaluation))
            run = created.info.run_id
            files.write_text(folder / NAME, run)
        return (client, run, last), functools.partial(client.set_terminated, run)


TRACKERS = {tracker.board: tracker for tracker in (TensorBoard, WandB, MLflow)}
