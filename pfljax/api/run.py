"""A run of a method on clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfljax import data, models
from pfljax.algorithms.common.attacks import Attack
from pfljax.algorithms.common.server import Server
from pfljax.api.result import Result
from pfljax.core.errors import ArgumentError
from pfljax.core.method import out_of_range
from pfljax.data import Federation
from pfljax.local.problem import Problem
from pfljax.local.training import LocalTraining
from pfljax.training import describe, fingerprint
from pfljax.training.experiment import Execution, Experiment
from pfljax.training.folders import Resume
from pfljax.training.loop import EVERY, Schedule, Trainer, check
from pfljax.training.tracking import Tracker

Say = Callable[[str], None]


class Run:
    """A training run of one method on some clients.

    Attributes:
        experiment: The method, clients and settings; `experiment.problem` has the model and the numbers of clients.
        clients: The training clients.
    """

    _trainer: Trainer | None = None
    _out: Path | None = None

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
        eval_clients: int = 0,
        server: Server | None = None,
        attack: Attack | None = None,
        execution: Execution | None = None,
        config: dict | None = None,
    ):
        """Checks all arguments. Compiles nothing yet.

        Args:
            method: A method with its knobs, such as `FedeRiCo(neighbors=3)`.
            clients: The training clients.
            model: Any Flax module, Linen or NNX; a `Model`; or a function of the number of classes that returns one.
            local: How clients train on their own data. Default: Adam, learning rate 0.01, full batches.
            seed: Seed for initial models, cohorts, mini-batches and sampling.
            participation: Fraction of clients in each round's cohort, in (0, 1].
            unseen: Clients held out of training, to which trained models are adapted. Named classes match by name.
            fine_tune_epochs: Number of epochs that each client fine-tunes on its own data before evaluation.
            eval_clients: Number of clients to score, sampled uniformly; 0: all.
            server: How the server samples cohorts and aggregates models. Default: uniformly, and by the mean.
            attack: What the attacking clients do. Default: no attack.
            execution: Where clients' state and data are stored, and how clients are mapped to devices.
            config: Extra content for config.json. Its "settings" (default: these arguments) must agree on resuming.

        Raises:
            ArgumentError: if an argument is not accepted; the message names it and what is accepted.
        """
        local, execution, attack = local or LocalTraining(), execution or Execution(), attack or Attack()
        check_arguments(method, clients, participation, fine_tune_epochs, eval_clients)
        problem = make_problem(clients, model, local, participation, execution)
        options = {"seed": seed, "participation": participation, "fine_tune_epochs": fine_tune_epochs}
        options |= {"eval_clients": eval_clients, "server": (server := server or Server()), "attack": attack}
        config = config or describe.config(method, clients, model, local, options)
        self.clients = clients.with_attackers(attack.attackers, seed) if attack.active else clients
        self.experiment = Experiment(
            method,
            problem,
            self.clients,
            local,
            seed=seed,
            unseen=data.match_classes(unseen, clients),
            fine_tune_epochs=fine_tune_epochs,
            client_store=execution.client_store,
            eval_clients=eval_clients,
            server=server,
            attack=attack,
            config=config | {"data": data.describe(clients)},
        )
        self.experiment = fingerprint.identified(self.experiment)
        check(self.experiment)

    def train(
        self,
        rounds: int,
        *,
        out: str | Path | None = None,
        resume: Resume = False,
        eval_every: int = 10,
        checkpoint_every: int = 50,
        say: Say | None = None,
        progress: bool = True,
        profile: str | Path | None = None,
        tracker: Tracker | None = None,
    ) -> Result:
        """Trains for more rounds.

        Args:
            rounds: Number of rounds to train, in addition to earlier calls.
            out: Folder for the run's files, new or empty; None: write no files. Later calls write to the same folder.
            resume: True resumes from the newest intact checkpoint in `out`, or starts at round 0 if no checkpoint was
                saved yet; it raises an error if the checkpoints were lost. "if_possible" starts over in that case,
                and "from_scratch" always starts over. `rounds` then counts from round 0 of the run in `out`.
            eval_every: Number of rounds between evaluations. The initial models are evaluated too, as round 0.
            checkpoint_every: Minimum number of rounds between checkpoints. Checkpoints are saved after evaluations.
            say: Called with lines about the plan and progress, such as `print`.
            progress: Whether to show a progress bar in a terminal or notebook.
            profile: Folder for a profiler trace of a few rounds.
            tracker: Called with an `Evaluation` after each evaluation. Pass `pfl.TensorBoard(folder)`, or your own
                function that logs to another tracker.

        Raises:
            ArgumentError: if `out` contains another run, or this run with other settings.
            RunError: if a loss is not finite, or memory or disk space runs out.
            KeyboardInterrupt: on SIGINT and SIGTERM, after finishing and saving the current rounds.
        """
        for name, value in (("rounds", rounds), ("eval_every", eval_every), ("checkpoint_every", checkpoint_every)):
            if value < 1:
                raise ArgumentError(name, "accepted: 1 or more", value)
        out = None if out is None else Path(out)
        if resume and out is None:
            raise ArgumentError("resume", "needs the run's folder, `out`")
        if self._trainer is None:
            self._out = out
            self._trainer = start([self], [out] if out else None, resume, say, progress, profile)
        elif out not in (None, self._out):
            raise ArgumentError("out", f"this run already writes to {self._out or 'no folder'}", out)
        self._trainer.trackers = [tracker]
        total = self._trainer.done + rounds
        outcome = self._trainer.train(total, Schedule(eval_every, checkpoint_every))[0]
        return Result(self.experiment.with_rounds(total), outcome, self._out)


def check_arguments(method: Any, clients: Any, participation: float, fine_tune_epochs: int, eval_clients: int) -> None:
    """Raises `ArgumentError` if an argument of `Run` is not accepted."""
    if isinstance(method, type) or not hasattr(method, "info"):
        raise ArgumentError("method", "accepted: an instance of a class with @pfl.method, such as FedAvg()", method)
    if not isinstance(clients, Federation):
        raise ArgumentError("clients", "accepted: a Federation, such as Federation.from_arrays(x, y, client=ids)")
    for name, value, limits in (
        ("participation", participation, {"above": 0, "at_most": 1}),
        ("fine_tune_epochs", fine_tune_epochs, {"at_least": 0}),
        ("eval_clients", eval_clients, {"at_least": 0, "at_most": clients.num_clients}),
    ):
        if accepted := out_of_range(value, limits):
            raise ArgumentError(name, f"accepted: {accepted}", value)


def make_problem(
    clients: Federation, model: Any, local: LocalTraining, participation: float, execution: Execution
) -> Problem:
    """Returns the problem that a method is built for. Training sets `rounds` when it starts."""
    x = clients.train.x
    built = models.build(model, x.shape[2:], clients.task, clients.num_classes, dtype=x.dtype)
    return Problem(
        built,
        local.bind(built),
        execution.make_plan(),
        clients.num_clients,
        cohort_size=max(1, round(participation * clients.num_clients)),
        n_max=clients.train.y.shape[1],
        rounds=1,
        common_init=local.common_init,
        keep_optimizer=local.keep_optimizer,
        n_min=int(clients.train.size.min()),
        num_distributions=None if clients.distribution is None else len(np.unique(clients.distribution)),
        learning_rate=local.learning_rate,
    )


def start(
    runs: Sequence[Run],
    outs: Sequence[Path] | None,
    resume: Resume = False,
    say: Say | None = None,
    progress: bool = False,
    profile: str | Path | None = None,
    *,
    keep_going: bool = False,
    trackers: Sequence[Tracker | None] = (),
) -> Trainer:
    """Returns the trainer of one run, or of several runs as replicates."""
    experiments = [run.experiment for run in runs]
    if outs:
        environment = describe.environment()
        configs = [environment | each.config for each in experiments]
        experiments = [dataclasses.replace(e, config=c) for e, c in zip(experiments, configs, strict=True)]
    folder = None if profile is None else Path(profile)
    options = {"bar": progress, "profile": folder, "keep_going": keep_going, "trackers": trackers}
    return Trainer(experiments, outs=outs, resume=resume, say=say, **options)


def padded_alike(runs: Sequence[Run]) -> Sequence[Run]:
    """Pads the runs' client data in place so that all have the same shapes. Returns the runs."""
    padded = data.pad_alike([run.clients for run in runs])
    for run, clients in zip(runs, padded, strict=True):
        problem = run.experiment.problem._replace(n_max=clients.train.y.shape[1])
        run.experiment = dataclasses.replace(run.experiment, federation=clients, problem=problem)
    return runs


def train_replicates(
    runs: Sequence[Run],
    rounds: int,
    *,
    outs: Sequence[str | Path] | None = None,
    resume: Resume = False,
    schedule: Schedule = EVERY,
    say: Say | None = None,
    profile: str | Path | None = None,
    trackers: Sequence[Tracker | None] = (),
) -> list[Result]:
    """Trains several runs of one method in one kernel. They may differ in seed, data, learning rate and float knobs.

    Args:
        runs: The runs, not trained yet.
        rounds: Number of rounds.
        outs: A folder for each run; see `Run.train`.
        resume: See `Run.train`. All folders need a checkpoint of the same round; otherwise all runs start over.
        schedule: When to evaluate and save the runs.
        say: See `Run.train`.
        profile: See `Run.train`.
        trackers: A tracker for each run; see `Run.train`.

    Returns:
        The result of each run.
    """
    folders = [Path(out) for out in outs] if outs else None
    trainer = start(padded_alike(runs), folders, resume, say, profile=profile, trackers=trackers)
    outcomes = trainer.train(rounds, schedule)
    directories = folders or [None] * len(runs)
    return [
        Result(run.experiment.with_rounds(rounds), outcome, directory)
        for run, outcome, directory in zip(runs, outcomes, directories, strict=True)
    ]
