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
from pfljax.training import describe
from pfljax.training.experiment import Execution, Experiment
from pfljax.training.folders import Resume
from pfljax.training.loop import EVERY, Schedule, Trainer, check
from pfljax.training.tracking import Tracker

Say = Callable[[str], None]


class Run:
    """A method, to be trained on clients.

    Attributes:
        experiment: What is trained on what; `experiment.problem` has the model and the numbers of clients.
        clients: The clients that train.
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
            eval_clients: Number of clients that are scored, a uniform sample of them; 0: all.
            server: How cohorts are drawn and models aggregated; uniformly and by their mean, if not given.
            attack: What a share of the clients does to harm the others; nothing, if not given.
            execution: Where clients live and in which order they are worked on.
            config: Further content of config.json; its "settings", by default these arguments, must agree on resuming.

        Raises:
            ArgumentError: naming the argument and what is accepted.
        """
        local, execution, attack = local or LocalTraining(), execution or Execution(), attack or Attack()
        check_arguments(method, clients, participation, fine_tune_epochs, eval_clients)
        problem = make_problem(clients, model, local, participation, execution)
        if config is None:
            options = {"seed": seed, "participation": participation, "fine_tune_epochs": fine_tune_epochs}
            options |= {"eval_clients": eval_clients, "server": repr(server or Server()), "attack": repr(attack)}
            config = {"settings": describe.settings(method, clients, model, local, options)}
        self.clients = clients.with_attackers(attack.attackers, seed) if attack.active else clients
        self.experiment = Experiment(
            method,
            problem,
            self.clients,
            local,
            seed=seed,
            unseen=unseen,
            fine_tune_epochs=fine_tune_epochs,
            client_store=execution.client_store,
            eval_clients=eval_clients,
            server=server or Server(),
            attack=attack,
            config=config | {"data": data.describe(clients)},
        )
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
        """Trains for some more rounds.

        Args:
            rounds: Number of rounds to add to those that were trained before.
            out: Folder that takes the files of the run, new or empty; None writes none. Later calls write there too.
            resume: True goes on from the newest whole checkpoint in `out`, or starts at round 0 where none was made
                yet; a folder that has lost its checkpoints is refused. "if_possible" starts over there, and
                "from_scratch" always does. `rounds` counts from round 0 of the run in `out`.
            eval_every: Number of rounds between evaluations, of which the first is of the initial models, at round 0.
            checkpoint_every: Least number of rounds between checkpoints, which are made after evaluations.
            say: Takes lines about plan and progress, such as `print`.
            progress: Whether to show a progress bar on a terminal or in a notebook.
            profile: Folder for a profiler's trace of a few rounds.
            tracker: Takes an `Evaluation` after every evaluation: `pfl.TensorBoard(folder)`, or a function of your own
                that logs to another tracker.

        Raises:
            ArgumentError: if `out` holds another run, or one with other settings.
            RunError: if a loss is not finite, or nothing fits into memory or on the disk.
            KeyboardInterrupt: on SIGINT and SIGTERM, after the rounds in flight were finished and saved.
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
        self._trainer.trackers = [tracker]
        total = self._trainer.done + rounds
        outcome = self._trainer.train(total, Schedule(eval_every, checkpoint_every))[0]
        return Result(self.experiment.with_rounds(total), outcome, self._out)


def check_arguments(method: Any, clients: Any, participation: float, fine_tune_epochs: int, eval_clients: int) -> None:
    """Raises `ArgumentError` for an argument of `Run` that is not accepted."""
    if isinstance(method, type) or not hasattr(method, "build"):
        raise ArgumentError("method", "accepted: a method with its knobs, such as FedAvg()", method)
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
    """What a method is built for; `rounds` is set where training starts."""
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
        num_distributions=len(np.unique(clients.distribution)),
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
    """The trainer of one run, or of several as replicates."""
    experiments = [run.experiment for run in runs]
    if outs:
        environment = describe.environment()
        configs = [environment | each.config for each in experiments]
        experiments = [dataclasses.replace(e, config=c) for e, c in zip(experiments, configs, strict=True)]
    folder = None if profile is None else Path(profile)
    options = {"bar": progress, "profile": folder, "keep_going": keep_going, "trackers": trackers}
    return Trainer(experiments, outs=outs, resume=resume, say=say, **options)


def padded_alike(runs: Sequence[Run]) -> Sequence[Run]:
    """The runs, changed so that their clients' data have the same shapes."""
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
    """Trains runs of one method, all in one kernel; they may differ in seed, data, learning rate and float knobs.

    Args:
        runs: The runs, not trained yet.
        rounds: Number of rounds.
        outs: A folder for each, as in `Run.train`.
        resume: As in `Run.train`; checkpoints of the same round in all folders, else all start anew.
        schedule: When the runs are evaluated and saved.
        say: As in `Run.train`.
        profile: As in `Run.train`.
        trackers: One for each run, as in `Run.train`.
    """
    folders = [Path(out) for out in outs] if outs else None
    trainer = start(padded_alike(runs), folders, resume, say, profile=profile, trackers=trackers)
    outcomes = trainer.train(rounds, schedule)
    directories = folders or [None] * len(runs)
    return [
        Result(run.experiment.with_rounds(rounds), outcome, directory)
        for run, outcome, directory in zip(runs, outcomes, directories, strict=True)
    ]
