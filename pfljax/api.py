"""What a user holds: a run of a method on clients, and its result."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfljax import data, models
from pfljax.core.errors import ArgumentError
from pfljax.core.types import Predictor, State
from pfljax.data import Federation
from pfljax.evaluation import metrics
from pfljax.local.problem import Problem
from pfljax.local.training import LocalTraining
from pfljax.training import describe
from pfljax.training.experiment import Execution, Experiment
from pfljax.training.history import History
from pfljax.training.loop import Outcome, Schedule, Trainer, check

Say = Callable[[str], None]


class Run:
    """A method, to be trained on clients.

    Attributes:
        experiment: What is trained on what; `experiment.problem` has the model and the numbers of clients.
        clients: The clients that train.
    """

    def __init__(
        self,
        method: Any,
        clients: Federation,
        model: Any,
        local: LocalTraining | None = None,
        *,
        seed: int = 0,
        participation: float = 1.0,
        unseen: Federation | None = None,
        fine_tune_epochs: int = 0,
        execution: Execution | None = None,
        config: dict | None = None,
    ):
        """Checks everything; nothing is compiled yet.

        Args:
            method: A method with its knobs, such as `FedeRiCo(neighbors=3)`.
            clients: The clients that train.
            model: Any Flax module, Linen or NNX; a `Model`; or a function of the number of classes that returns one.
            local: How clients train on their own data; Adam at rate 0.01, all examples in one batch, if not given.
            seed: Decides initial models, cohorts, mini-batches and sampling.
            participation: Share of the clients in a round's cohort, in (0, 1].
            unseen: Clients that are kept out of training and adapted to afterwards.
            fine_tune_epochs: Passes over its data with which each client tunes what is evaluated.
            execution: Where clients live and in which order they are worked on.
            config: Further content of config.json. Its "settings" must agree where a run is resumed; by default the
                arguments of this function.

        Raises:
            ArgumentError: naming the argument and what is accepted.
        """
        local, execution = local or LocalTraining(), execution or Execution()
        if isinstance(method, type) or not hasattr(method, "build"):
            raise ArgumentError("method", "accepted: a method with its knobs, such as FedAvg()", method)
        if not isinstance(clients, Federation):
            raise ArgumentError("clients", "accepted: a Federation, such as Federation.from_arrays(x, y, client=ids)")
        if not 0 < participation <= 1:
            raise ArgumentError("participation", "accepted: above 0, at most 1", participation)
        if fine_tune_epochs < 0:
            raise ArgumentError("fine_tune_epochs", "accepted: 0 or more", fine_tune_epochs)
        built = models.build(model, clients.train.x.shape[2:], clients.task, clients.num_classes)
        num_clients, n_max = clients.num_clients, clients.train.y.shape[1]
        problem = Problem(
            built,
            local.bind(built),
            execution.make_plan(),
            num_clients,
            cohort_size=max(1, round(participation * num_clients)),
            n_max=n_max,
            rounds=1,
            common_init=local.common_init,
            keep_optimizer=local.keep_optimizer,
            n_min=int(clients.train.size.min()),
            num_distributions=len(np.unique(clients.distribution)),
        )
        if config is None:
            options = {"seed": seed, "participation": participation, "fine_tune_epochs": fine_tune_epochs}
            config = {"settings": describe.settings(method, clients, model, local, options)}
        config = config | {"data": data.describe(clients)}
        self.clients = clients
        self.experiment = Experiment(
            method, problem, clients, seed, unseen, fine_tune_epochs, execution.client_store, config
        )
        check(self.experiment)
        self._trainer: Trainer | None = None
        self._out: Path | None = None

    def train(
        self,
        rounds: int,
        *,
        out: str | Path | None = None,
        resume: bool = False,
        eval_every: int = 10,
        checkpoint_every: int = 50,
        say: Say | None = None,
        progress: bool = True,
        profile: str | Path | None = None,
    ) -> Result:
        """Trains for some more rounds.

        Args:
            rounds: Number of rounds to add to those that were trained before.
            out: Folder that takes the files of the run, new or empty; None writes none. Later calls write there too.
            resume: Whether to go on from the newest whole checkpoint in `out`, if there is one. `rounds` then counts
                from the start of that run.
            eval_every: Number of rounds between evaluations.
            checkpoint_every: Least number of rounds between checkpoints, which are made after evaluations.
            say: Takes lines about plan and progress, such as `print`.
            progress: Whether to show a progress bar on a terminal or in a notebook.
            profile: Folder for a profiler's trace of a few rounds.

        Raises:
            ArgumentError: if `out` holds another run, or one with other settings.
            RunError: if a loss is not finite, or nothing fits into memory.
        """
        for name, value in (("rounds", rounds), ("eval_every", eval_every), ("checkpoint_every", checkpoint_every)):
            if value < 1:
                raise ArgumentError(name, "accepted: 1 or more", value)
        out = None if out is None else Path(out)
        if resume and out is None:
            raise ArgumentError("resume", "name the run's folder with `out`")
        if self._trainer is None:
            self._out = out
            self._trainer = start([self], [out] if out else None, resume, say, progress, profile)
        elif out not in (None, self._out):
            raise ArgumentError("out", f"this run already writes to {self._out or 'no folder'}", out)
        total = self._trainer.done + rounds
        outcome = self._trainer.train(total, Schedule(eval_every, checkpoint_every))[0]
        return Result(self.experiment.with_rounds(total), outcome, self._out)


def start(
    runs: Sequence[Run],
    outs: Sequence[Path] | None,
    resume: bool = False,
    say: Say | None = None,
    progress: bool = False,
    profile: str | Path | None = None,
) -> Trainer:
    """The trainer of one run, or of several as replicates."""
    experiments = [run.experiment for run in runs]
    if outs:
        environment = describe.environment()
        configs = [environment | each.config for each in experiments]
        experiments = [dataclasses.replace(e, config=c) for e, c in zip(experiments, configs, strict=True)]
    folder = None if profile is None else Path(profile)
    return Trainer(experiments, outs=outs, resume=resume, say=say, bar=progress, profile=folder)


def train_replicates(
    runs: Sequence[Run],
    rounds: int,
    *,
    outs: Sequence[str | Path] | None = None,
    resume: bool = False,
    schedule: Schedule = Schedule(),
    say: Say | None = None,
    progress: bool = False,
) -> list[Result]:
    """Trains runs that differ in their seeds and data only, all in one kernel.

    Args:
        runs: The runs, not trained yet.
        rounds: Number of rounds.
        outs: A folder for each, as in `Run.train`.
        resume: As in `Run.train`; checkpoints of the same round in all folders, else all start anew.
        schedule: When the runs are evaluated and saved.
        say: As in `Run.train`.
        progress: As in `Run.train`.
    """
    padded = data.pad_alike([run.clients for run in runs])
    for run, clients in zip(runs, padded, strict=True):
        problem = run.experiment.problem._replace(n_max=clients.train.y.shape[1])
        run.experiment = dataclasses.replace(run.experiment, federation=clients, problem=problem)
    folders = [Path(out) for out in outs] if outs else None
    trainer = start(runs, folders, resume, say, progress)
    outcomes = trainer.train(rounds, schedule)
    directories = folders or [None] * len(runs)
    return [
        Result(run.experiment.with_rounds(rounds), *each)
        for run, *each in zip(runs, outcomes, directories, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Collaboration:
    """Whose models each client used, at every evaluated round.

    Attributes:
        rounds: (T,) the evaluated rounds.
        index: (T, K, J) models.
        weights: (T, K, J) their weights, which sum to 1 over J.
        distribution: (K,) the clients' true distributions.
        topology: Unless "shared", models are the clients' own.
        arrays: Everything that is in collaboration.npz, such as "affinity" (T, K, K).
    """

    rounds: np.ndarray
    index: np.ndarray
    weights: np.ndarray
    distribution: np.ndarray
    topology: str
    arrays: dict[str, np.ndarray] = dataclasses.field(repr=False)

    def matrix(self, evaluation: int = -1) -> np.ndarray:
        """(K, N) weight that each client gave to each model, at one of the evaluated rounds; the last by default."""
        index, weights = self.index[evaluation], self.weights[evaluation]
        num_models = len(index) if self.topology != "shared" else int(self.index.max()) + 1
        dense = np.zeros((len(index), num_models))
        np.add.at(dense, (np.arange(len(index))[:, None], index), weights)
        return dense


class Result:
    """What training has given.

    Attributes:
        experiment: What was trained on what.
        out: The run's folder, or None.
    """

    def __init__(self, experiment: Experiment, outcome: Outcome, out: Path | None):
        self.experiment, self.out = experiment, out
        self._outcome = outcome
        history = outcome.history
        self._rows = [dict(row) for row in history.rows]
        self._results = history.results_arrays(outcome.compiled.algorithm.report.scored)
        self._collaboration = history.collaboration_arrays(experiment.federation)

    def __repr__(self) -> str:
        scored = self.summary["scored"]
        score = f"accuracy {self.accuracy:.3f}" if self.experiment.federation.task == "classification" else ""
        return f"Result({self.experiment.name}, round {self._rows[-1]['round']}: {score or f'loss {self.loss:.4f}'} of {scored})"

    @property
    def summary(self) -> dict:
        """The content of summary.json."""
        return self._outcome.summary

    @property
    def history(self) -> list[dict]:
        """One entry per evaluated round: round, seconds, losses, accuracies, traffic, and the method's own metrics."""
        return self._rows

    @property
    def results(self) -> dict[str, np.ndarray]:
        """The content of results.npz: per-client accuracy and loss (T, K) of each split, by name."""
        return self._results

    @property
    def accuracy(self) -> float:
        """Test accuracy after the last round, weighted by the clients' numbers of test examples."""
        return self._rows[-1].get("accuracy", float("nan"))

    @property
    def loss(self) -> float:
        """Test loss after the last round, weighted likewise."""
        return self._rows[-1]["loss"]

    @property
    def per_client_accuracy(self) -> np.ndarray:
        """(K,) every client's test accuracy after the last round."""
        if "accuracy_test" not in self._results:
            raise ArgumentError("per_client_accuracy", "a regression has no accuracy; see results['loss_test']")
        return self._results["accuracy_test"][-1]

    @property
    def collaboration(self) -> Collaboration:
        """Whose models each client used, at every evaluated round."""
        arrays = self._collaboration
        return Collaboration(
            *(arrays[name] for name in ("round", "index", "weights", "distribution")), str(arrays["topology"]), arrays
        )

    @property
    def state(self) -> State:
        """The final state: server, models, optimizer, clients. A later `train` of the same run may overwrite it."""
        return self._outcome.state

    @functools.cached_property
    def predictor(self) -> Predictor:
        """What clients predict with, as it was scored."""
        return self._outcome.predictor()

    def predict(self, x: Any, client: int) -> np.ndarray:
        """One client's predictions.

        Args:
            x: (B, *features), in the units of the training data.
            client: Number of the client, 0 to K - 1.

        Returns:
            (B, C) class probabilities, or (B,) values of a regression.
        """
        if not 0 <= client < self.experiment.federation.num_clients:
            raise ArgumentError("client", f"accepted: 0 to {self.experiment.federation.num_clients - 1}", client)
        x = self._checked(x)
        plan, model = self._outcome.compiled.plan, self.experiment.problem.model
        return np.asarray(metrics.predict_one(plan, model, self.predictor, client, x))

    def predictions(self, x: Any) -> np.ndarray:
        """All clients' predictions for the same x (B, *features): (K, B, C), or (K, B) of a regression."""
        x = self._checked(x)
        return np.asarray(
            metrics.predictions(self._outcome.compiled.plan, self.experiment.problem.model, self.predictor, x)
        )

    def _checked(self, x: Any) -> np.ndarray:
        train = self.experiment.federation.train.x
        x = np.asarray(x, train.dtype)
        if x.shape[1:] != train.shape[2:]:
            raise ArgumentError("x", f"has shape {x.shape}; accepted: (B, {', '.join(map(str, train.shape[2:]))})")
        return x

    @property
    def plot(self) -> Plots:
        """Figures of this result, which a notebook shows inline."""
        return Plots(self)

    def write_report(self) -> Path:
        """Draws the figures and writes report.html into the run's folder.

        Raises:
            ArgumentError: if the run was trained without a folder.
        """
        from pfljax import report

        if self.out is None:
            raise ArgumentError("out", "the run was trained without a folder; give `train` one")
        return report.write(self.out)


class Plots:
    """The figures of a result: each method returns a matplotlib Figure."""

    def __init__(self, result: Result):
        federation = result.experiment.federation
        self._result, self._task = result, federation.task
        self._score = "accuracy" if self._task == "classification" else "loss"
        self._sizes, self._distribution = federation.test.size, federation.distribution

    def accuracy(self) -> Any:
        """Mean over clients and the worst tenth of them, over rounds."""
        from pfljax.report import figures

        results = self._result.results
        test, train = (results.get(f"{self._score}_{split}") for split in ("test", "train"))
        return figures.accuracy_over_rounds(results["rounds"], test, sizes=self._sizes, train=train, task=self._task)

    def per_client(self) -> Any:
        """Every client's last score, sorted, colored by its true distribution."""
        from pfljax.report import figures

        return figures.per_client(self._result.results[f"{self._score}_test"][-1], self._distribution, task=self._task)

    def collaboration(self, evaluation: int = -1) -> Any:
        """Whose models each client used, clients ordered by their true distribution."""
        from pfljax.report import figures

        found = self._result.collaboration
        return figures.collaboration_matrix(
            found.index[evaluation], found.weights[evaluation], found.distribution, topology=found.topology
        )

    def weights(self) -> Any:
        """Clients' weights over rounds, colored by distribution."""
        from pfljax.report import figures

        found = self._result.collaboration
        target = found.arrays.get("target")
        return figures.weights_over_rounds(
            found.rounds, found.index, found.weights, found.distribution, topology=found.topology, target=target
        )

    def traffic(self) -> Any:
        """Mean score against the bytes that a client has received and sent."""
        from pfljax.report import figures

        rows = self._result.history
        moved = np.array([row["bytes_down"] + row["bytes_up"] for row in rows], float)
        test = self._result.results[f"{self._score}_test"]
        return figures.traffic_against_accuracy(moved, test, sizes=self._sizes, task=self._task)
