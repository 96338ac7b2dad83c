"""A run of a method on clients."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from pfljax import data, models
from pfljax.api.features import with_features
from pfljax.api.predicting import Predictor
from pfljax.api.result import Result, Scores
from pfljax.contract import cores, processes, tree
from pfljax.contract.errors import ArgumentError
from pfljax.contract.host import free_memory, readable
from pfljax.contract.pooled import is_pooled
from pfljax.contract.speech import with_former_say
from pfljax.data import Federation
from pfljax.data.sources.source import Scaling
from pfljax.evaluation import measures
from pfljax.evaluation.metrics import score_of_task
from pfljax.evaluation.statistics import Trial
from pfljax.exchange.in_python import PythonPlan
from pfljax.exchange.plan import ExecutionPlan
from pfljax.folder import files, fingerprint
from pfljax.folder.folders import Resume
from pfljax.local.problem import Problem
from pfljax.local.training import LocalTraining
from pfljax.models.groups import Networks, grouped, modules_of
from pfljax.models.standardizing import array_name, inside
from pfljax.planner.profiling import profiler
from pfljax.run.experiment import Execution, Experiment, NeverTrained
from pfljax.run.replicates import check_alike
from pfljax.settings.fields import Seed, checked, hyperparameter
from pfljax.settings.method import tell
from pfljax.stages.attacks import Attack
from pfljax.stages.client_privacy import ClientPrivacy
from pfljax.stages.compression import Compression
from pfljax.stages.devices import Clock
from pfljax.stages.faults import Faults
from pfljax.stages.server import Server
from pfljax.training import describe
from pfljax.training.conformance import RESERVED
from pfljax.training.loop import EVERY, Rounds, Schedule, Trainer, check
from pfljax.training.outcome import Outcome
from pfljax.training.saving import AUTO, CheckpointEvery
from pfljax.training.stopping import Patience, Stop
from pfljax.training.tracking import Tracker

Folder = str | Path
Clients = Annotated[
    Federation,
    hyperparameter(accepted="a Federation, such as Federation.from_arrays(x, y, client=ids)"),
]
ClientsOfSplit = Annotated[
    Federation | Callable[[int], Any],
    hyperparameter(accepted="a Federation, or a function split -> Federation"),
]


AskedEvalEvery = Annotated[
    int | None, hyperparameter(at_least=1, help="number of rounds between evaluations")
]
PlannedRounds = Annotated[int | None, hyperparameter(at_least=1)]
Metrics = Annotated[
    Mapping[str, Callable] | Sequence[str],
    hyperparameter(accepted="functions (outputs, y) -> number, by name, or a list of names"),
]
Score = Annotated[
    str | Callable | None,
    hyperparameter(accepted="the name of a metric, or a function (outputs, y) -> number"),
]

Stages = Annotated[
    Sequence[Callable],
    hyperparameter(
        accepted="functions (problem, pipeline) -> Stage or None, see docs/howto/stage.md"
    ),
]


class Run:
    """A training run of one method on some clients.

    Attributes:
        experiment: The method, clients and settings; `experiment.problem` has the model and the numbers of clients.
        clients: The training clients.
    """

    _trainer: Trainer | None = None
    _out: Path | None = None

    @checked()
    def __init__(
        self,
        method: Any,
        clients: Clients,
        model: Any,
        local: LocalTraining | None = None,
        *,
        seed: Seed = 0,
        participation: Annotated[float, hyperparameter(above=0, at_most=1)] = 1.0,
        unseen: Federation | None = None,
        fine_tune_epochs: Annotated[int, hyperparameter(at_least=0)] = 0,
        eval_clients: Annotated[int, hyperparameter(at_least=0)] = 0,
        never_trained: NeverTrained = "global",
        tell_groups: bool = False,
        metrics: Metrics | None = None,
        score: Score = None,
        stop: Annotated[
            Stop | None,
            hyperparameter(accepted="a function of the history, such as pfljax.patience(20)"),
        ] = None,
        planned_rounds: PlannedRounds = None,
        server: Server | None = None,
        attack: Attack | None = None,
        compression: Compression | None = None,
        faults: Faults | None = None,
        clock: Clock | None = None,
        client_privacy: ClientPrivacy | None = None,
        stages: Stages = (),
        execution: Execution | None = None,
        config: dict | None = None,
    ):
        """Checks all arguments, and raises an `ArgumentError` that names what is accepted. Compiles nothing yet.

        Args:
            method: A method with its hyperparameters, such as `FedeRiCo(neighbors=3)`.
            clients: The training clients.
            model: A Flax module, a `Model`, or a function of the number of classes; or several by name, as `Networks`.
            local: How clients train on their own data. Default: Adam, learning rate 0.01, full batches.
            seed: Seed for initial models, cohorts, mini-batches and sampling.
            participation: Fraction of clients that take part in a round; with `client_privacy`, each one's chance.
            unseen: Clients held out of training, to which trained models are adapted. Named classes match by name.
            fine_tune_epochs: Number of epochs that each client fine-tunes on its own data before evaluation.
            eval_clients: Number of clients to score, sampled uniformly; 0: all.
            never_trained: Predictions of clients that have never trained, for methods with personal models beside a
                global one: those of the "global" model, or of the client's "initial" model.
            tell_groups: Whether methods get the true number of groups, for hyperparameters of this kind that have
                their default.
            metrics: Further metrics of each client's predictions, by name: see `evaluation.measures`.
            score: The score by which clients, rounds and methods are ordered: "accuracy", "loss", the name of one of
                `metrics` or of `METRICS`, in upper or lower case, or a function as in `metrics`. The best round, the
                bottom decile, `patience` and comparisons follow it. Default: accuracy, or loss for regression.
            stop: Rows of `Result.history` -> whether to stop, or why, after an evaluation; None: train all rounds.
            planned_rounds: Number of rounds for which a method's schedules are planned. Default: those of the first
                call of `train`. Methods that depend on it train no more rounds than these; see `train`.
            server: How the server samples cohorts and aggregates models. Default: uniformly, and by the mean.
            attack: What the attacking clients do. Default: no attack.
            compression: How messages are compressed. Default: not at all.
            faults: Which clients fail, and what follows if a loss is not finite. Default: none fails, and see `Faults`.
            clock: How long clients compute and send. Default: no time is simulated.
            client_privacy: Clipping and noise for clients' whole updates. Default: neither.
            stages: Stages of your own, which stand behind faults and before privacy and robust rules: functions
                (problem, pipeline) -> a `stages.Stage`, or None if there is nothing to do.
            execution: Where clients' state and data are stored, and how clients are mapped to devices.
            config: Extra content for config.json. Its "settings" (default: these arguments) must agree on resuming.
        """
        local = local or LocalTraining()
        execution = execution or Execution()
        cores.check_settings(compiled=execution.plan != "python")
        method, knows = tell(check_method(method), tell_groups, clients.group)
        chosen = measures.scored(
            score, measures.named(metrics, RESERVED, clients.task), RESERVED, clients.task
        )
        if isinstance(stop, Patience) and chosen.name != score_of_task(clients.task):
            stop = stop.with_score(chosen.name, chosen.higher_is_better)
        told = filled(server, attack, compression, faults, client_privacy) | {
            "stop": stop,
            "knows": knows,
        }
        if stages:
            told["own_stages"] = tuple(stages)
        told |= {"seed": seed, "fine_tune_epochs": fine_tune_epochs, "eval_clients": eval_clients}
        told |= {"never_trained": never_trained}
        clients = scaled_as(model, clients)
        local = with_class_weights(local, clients)
        self.clients = clients
        problem = make_problem(
            clients, model, local, participation, execution.make_plan(), told["client_privacy"]
        )
        problem = problem._replace(clock=clock)
        timed = {"clock": clock} if clock else {}
        check_config(config)
        config = config or describe.config(
            method, clients, modules_of(model), local, participation, told | timed
        )
        clients = (
            clients.with_attackers(told["attack"].attackers, seed)
            if told["attack"].active
            else clients
        )
        unseen = data.match_classes(unseen, clients)
        told |= {"planned_rounds": planned_rounds, "client_store": execution.client_store}
        told |= {"config": config | {"score": chosen.name, "data": data.describe(clients, unseen)}}
        told |= {"metrics": chosen.metrics, "score": chosen.name}
        told["clients"] = self.clients
        unseen = unseen and unseen.standardized
        found = Experiment(method, problem, clients.standardized, local, unseen=unseen, **told)
        self.experiment = check(
            with_features(fingerprint.identified(found), execution.cache_features)
        )

    @with_former_say
    @checked()
    def train(
        self,
        rounds: Rounds,
        *,
        out: Folder | None = None,
        resume: Resume = False,
        eval_every: AskedEvalEvery = None,
        checkpoint_every: CheckpointEvery = AUTO,
        progress: bool = True,
        profile: Folder | None = None,
        tracker: Tracker | None = None,
    ) -> Result:
        """Trains for more rounds.

        Training for 4 rounds and then for 8 equals training for 12 at once. A few methods depend on the planned number
        of rounds, such as Floco, whose clients get their regions after half of them: with `Run(planned_rounds=12)`,
        they may be trained up to round 12 in several calls. Further rounds are refused.

        Args:
            rounds: Number of rounds to train, in addition to earlier calls.
            out: Folder for the run's files, new or empty; None: write no files. Later calls write to the same folder.
            resume: True resumes from the newest intact checkpoint in `out`, or starts at round 0 if no checkpoint was
                saved yet; it raises an error if the checkpoints were lost. "if_possible" starts over in that case,
                and "from_scratch" always starts over. `rounds` then counts from round 0 of the run in `out`.
            eval_every: Number of rounds between evaluations. The initial models are evaluated too, as round 0.
                Default: 10; with plan="python", only the trained models are evaluated, so that debugging starts soon.
            checkpoint_every: Number of rounds between checkpoints, or of seconds, such as "60s". "auto": a minute, or
                longer if saving would take more than a tenth of the time. The last round is always saved.
            progress: Whether to show a progress bar in a terminal or notebook.
            profile: Folder for a profiler trace of a few rounds; prints a summary.
            tracker: Called with an `Evaluation` after each evaluation. Pass `pfl.trackers.TensorBoard(folder)`, or
                your own function that logs to another tracker. An exception that it raises ends the training, as one
                that prunes a search must, and reaches the caller as it is.

        Raises:
            ArgumentError: if `out` contains another run, or this run with other settings; or if the method depends on
                the planned number of rounds, and these are more, or `out` was planned for another number.
            RunError: if a loss is not finite and its client cannot be dropped, or memory or disk space runs out.
            KeyboardInterrupt: on SIGINT and SIGTERM, after finishing and saving the current rounds.
        """
        out = None if out is None else Path(out)
        if resume and out is None:
            raise ArgumentError("resume", "needs the run's folder, `out`")
        if self._trainer is None:
            self._out = out
            self._trainer = start(
                [self], [out] if out else None, profile, resume=resume, bar=progress
            )
        elif out not in (None, self._out):
            raise ArgumentError(
                "out", f"this run already writes to {self._out or 'no folder'}", out
            )
        self._trainer.trackers = [tracker]
        total = self._trainer.done + rounds
        in_python = isinstance(self.experiment.problem.plan, PythonPlan)
        if eval_every is not None:
            schedule = Schedule(eval_every, checkpoint_every)
        elif in_python:
            schedule = Schedule(total, checkpoint_every, initial=False)
        else:
            schedule = EVERY._replace(checkpoint_every=checkpoint_every)
        outcome = self._trainer.train(total, schedule)[0]
        planned = dataclasses.replace(
            self.experiment, planned_rounds=outcome.experiment.planned_rounds
        )
        return made_result(planned.with_rounds(total), outcome, self._out)


def made_result(experiment: Experiment, outcome: Outcome, out: Path | None) -> Result:
    """Returns the result of a run that was trained in this process."""
    return Result(Scores.of_outcome(outcome), Predictor(experiment, outcome), out)


def check_method(method: Any, argument: str = "method") -> Any:
    """Returns a method. Raises `ArgumentError` if the object is none."""
    if isinstance(method, type) or not hasattr(method, "build") or not hasattr(method, "info"):
        own = dataclasses.is_dataclass(method) and hasattr(method, "build")
        text = (
            "; decorate its class with @pfl.author.method"
            if own and not isinstance(method, type)
            else ""
        )
        raise ArgumentError(
            argument, f"accepted: a method with its hyperparameters, such as FedAvg(){text}", method
        )
    return method


def filled(*stages: Any) -> dict[str, Any]:
    """Returns what stands between clients and server, by name; defaults replace None."""
    kinds = {"server": Server, "attack": Attack, "compression": Compression, "faults": Faults}
    kinds["client_privacy"] = ClientPrivacy
    return {name: part or kinds[name]() for name, part in zip(kinds, stages, strict=True)}


class SplitData(NamedTuple):
    """The clients of a split of the data.

    Attributes:
        clients: The training clients.
        unseen: Clients held out of training; None: none.
    """

    clients: Federation
    unseen: Federation | None = None

    def with_validation_returned(self) -> SplitData:
        """Returns the clients with their validation examples for training; see `pfljax.data.return_validation`."""
        unseen = None if self.unseen is None else data.return_validation(self.unseen)
        return SplitData(data.return_validation(self.clients), unseen)


def data_of_trials(
    clients: Federation | Callable[[int], Any],
    trials: Sequence[Trial],
    unseen: Federation | float | None = None,
) -> dict[Trial, SplitData]:
    """Returns the clients of each trial; see `compare`. Trials on the same split share them."""
    if isinstance(clients, Federation):
        shared = with_unseen(clients, unseen, 0)
        return dict.fromkeys(trials, shared)
    of_split = {
        split: with_unseen(made_clients(clients, split), unseen, split)
        for split in splits_of(trials)
    }
    return {trial: of_split[trial.data_seed] for trial in trials}


def data_to_tune_on(
    found: Mapping[Trial, SplitData], trials: Sequence[Trial], table: Sequence[Trial]
) -> dict[Trial, SplitData]:
    """Returns the clients of trials to tune on, whose validation examples are no test examples of a table.

    Args:
        found: The clients of all trials.
        trials: Trials to tune on.
        table: Trials of the table.

    Raises:
        ArgumentError: if clients have no validation examples.
    """
    distinct = list({id(found[trial]): found[trial] for trial in trials}.values())
    if not all(each.clients.validation.size.sum() for each in distinct):
        raise ArgumentError(
            "clients", "have no validation examples to tune on; set validation_fraction above 0"
        )
    of_table = {id(found[trial]): found[trial] for trial in table}.values()
    tested = [clients for each in of_table for clients in each if clients is not None]
    clients = data.without_tested([each.clients for each in distinct], tested)
    of_split = {id(each): SplitData(kept) for each, kept in zip(distinct, clients, strict=True)}
    return {trial: of_split[id(found[trial])] for trial in trials}


def splits_of(trials: Sequence[Trial]) -> list[int]:
    """The different splits of trials."""
    return list(dict.fromkeys(trial.data_seed for trial in trials))


def made_clients(make: Callable[[int], Any], split: int) -> Any:
    """Calls a user's function for the clients of a split. Raises `ArgumentError` if it fails or returns none."""
    try:
        found = make(split)
    except ArgumentError:
        raise
    except Exception as error:
        line = f"raised {type(error).__name__}: {error}".partition("\n")[0]
        raise ArgumentError(
            "clients", f"{line}, for {split}; accepted: a function of the split"
        ) from error
    parts = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(parts[0], Federation) or not isinstance(parts[1], Federation | None):
        raise ArgumentError("clients", "accepted: a function that returns a Federation", found)
    return found


def with_unseen(found: Any, unseen: Federation | float | None, split: int) -> SplitData:
    """The clients of a split, a share of which is held out of training, or beside others."""
    if isinstance(found, tuple):
        if unseen is not None:
            raise ArgumentError(
                "unseen", "accepted only if `clients` does not return unseen clients itself"
            )
        return SplitData(*found)
    if unseen is None or isinstance(unseen, Federation):
        return SplitData(found, unseen)
    return SplitData(*data.split_unseen(found, unseen, split))


def check_splits(clients: Any, splits: Sequence[int] | None) -> None:
    """Raises `ArgumentError` for splits of clients that are divided already."""
    if splits is not None and isinstance(clients, Federation):
        text = "accepted only if clients are a function of the split, such as "
        text += "lambda split: pfl.data.digits(num_clients=8, seed=split)"
        raise ArgumentError("splits", text)


def check_config(config: dict | None) -> None:
    """Raises `ArgumentError` for content of config.json that JSON does not have."""
    try:
        json.dumps(files.plain(config))
    except (TypeError, ValueError, RecursionError) as error:
        line = str(error).partition("\n")[0]
        accepted = "accepted: dicts, lists, texts, numbers and None"
        raise ArgumentError("config", f"is no JSON ({line}); {accepted}") from error


def scaled_as(model: Any, clients: Federation) -> Federation:
    """The clients, with the scaling of inputs that a model brings along from `Result.export`, if it does.

    Raises:
        ArgumentError: if it is that of other arrays.
    """
    if isinstance(model, Mapping | Networks):
        return clients
    brought = model.input_statistics if isinstance(model, models.Model) else inside(model)[1]
    if not brought:
        return clients
    used = set()

    def one(path: Any, x: Any, kind: str) -> np.ndarray | None:
        name = array_name(path)
        if name not in brought[kind]:
            return None
        used.add(name)
        values = np.asarray(brought[kind][name], np.float64)
        if values.ndim and values.shape != x.shape[x.ndim - values.ndim :]:
            shape = x.shape[2:]
            text = f"standardizes {name} with statistics of shape {values.shape}; the clients' examples have {shape}"
            raise ArgumentError("model", text)
        return values

    def tree_of(kind: str) -> Any:
        return jax.tree_util.tree_map_with_path(
            functools.partial(one, kind=kind), clients.train.x, is_leaf=is_pooled
        )

    scaling = Scaling(tree_of("mean"), tree_of("std"))
    if missing := brought["mean"].keys() - used:
        raise ArgumentError(
            "model", f"standardizes {', '.join(sorted(missing))}, which the clients' x lacks"
        )
    return dataclasses.replace(clients, scaling=scaling)


def with_class_weights(local: LocalTraining, clients: Federation) -> LocalTraining:
    """Local training with the class weights of the clients' labels, if they are to be measured.

    Raises:
        ArgumentError: if gradients have noise, since the labels of all clients are counted without any.
    """
    if local.class_weights != "inverse":
        return local
    if local.privacy.noise_multiplier:
        text = "uses clients' label counts, which are not private; accepted with noise: your own weights, or none"
        raise ArgumentError("class_weights", text, local.class_weights)
    return dataclasses.replace(local, class_weights=data.inverse_frequency_weights(clients))


def check_memory(model: models.Model) -> None:
    """Raises `ArgumentError` for a network whose parameters are larger than the memory of this machine's CPUs."""
    size = tree.num_bytes(jax.eval_shape(model.init, jax.random.key(0)))
    if cores.on_cpu() and size > free_memory():
        text = f"has parameters of {readable(size)}, but only {readable(free_memory())} of memory is free"
        raise ArgumentError("model", f"{text}; accepted: a smaller network")


def make_problem(
    clients: Federation,
    model: Any,
    local: LocalTraining,
    participation: float,
    plan: ExecutionPlan,
    client_privacy: ClientPrivacy | None = None,
) -> Problem:
    """Returns the problem that a method is built for. Training sets `rounds` when it starts."""
    model = Networks(model) if isinstance(model, Mapping) else model
    options = {
        "target_shape": clients.train.y.shape[2:],
        "loss": local.loss,
        "computes_in": local.dtype,
    }

    def build(each):
        return models.build(each, clients.inputs, clients.task, clients.num_classes, **options)

    networks = model.networks if isinstance(model, Networks) else [("", model)]
    built = [build(each) for _, each in networks]
    if not all(jax.tree.leaves(jax.eval_shape(each.init, jax.random.key(0))) for each in built):
        raise ArgumentError(
            "model", "has no parameters to train; accepted: networks with at least one"
        )
    if (late := clients.late_scaling) is not None:
        built = [dataclasses.replace(each, scaling=(late.mean, late.std)) for each in built]
    problem = Problem(
        built[0],
        local.bind(built[0]),
        plan,
        clients.num_clients,
        cohort_size=max(1, round(participation * clients.num_clients)),
        n_max=clients.train.y.shape[1],
        rounds=1,
        common_init=local.common_init,
        keep_optimizer=local.keep_optimizer,
        learning_rate=local.learning_rate,
        groups=grouped(model, built, clients.num_clients) if isinstance(model, Networks) else None,
    )
    return (client_privacy or ClientPrivacy()).seated(problem, participation)


def start(
    runs: Sequence[Run],
    outs: Sequence[Path] | None = None,
    profile: str | Path | None = None,
    **options: Any,
) -> Trainer:
    """Returns the trainer of one run, or of several runs as replicates; further `options` are those of `Trainer`."""
    experiments = [run.experiment for run in runs]
    cores.check_settings(compiled=not isinstance(experiments[0].problem.plan, PythonPlan))
    config: Any = jax.config
    for each in experiments:
        check_memory(each.problem.model)
        if config.jax_debug_nans and each.attack.active:
            text = "attackers have no scores, which are NaN; accepted with an attack: False"
            raise ArgumentError("JAX_DEBUG_NANS", text, True)
    for out in outs or ():
        processes.first(functools.partial(files.check_writable, out))
    if outs:
        environment = describe.environment()
        configs = [environment | each.config for each in experiments]
        experiments = [
            dataclasses.replace(e, config=c) for e, c in zip(experiments, configs, strict=True)
        ]
    folder = None if profile is None else Path(profile)
    if folder:
        files.check_writable(folder, "profile")
    profile_rounds = profiler(folder) if folder else None
    return Trainer(experiments, outs=outs, profile=profile_rounds, **options)


def padded_alike(runs: Sequence[Run]) -> Sequence[Run]:
    """Pads the runs' client data in place so that all have the same shapes. Returns the runs."""
    padded = data.pad_alike([run.experiment.federation for run in runs])
    for run, clients in zip(runs, padded, strict=True):
        problem = run.experiment.problem._replace(n_max=clients.train.y.shape[1])
        run.experiment = dataclasses.replace(run.experiment, federation=clients, problem=problem)
    return runs


@with_former_say
@checked()
def train_replicates(
    runs: Annotated[Sequence[Run], hyperparameter(empty=False)],
    rounds: Rounds,
    *,
    outs: Annotated[Sequence[Folder], hyperparameter(distinct=True)] | None = None,
    resume: Resume = False,
    schedule: Schedule = EVERY,
    profile: Folder | None = None,
    trackers: Sequence[Tracker | None] = (),
) -> list[Result]:
    """Trains several runs of one method in one kernel.

    They may differ in seed, data, learning rate and the method's float hyperparameters, which are inputs of the
    kernel. All other settings are part of the program and must agree: batch size, epochs, participation, network,
    fine-tuning, schedule, privacy noise and so on. `compare` and `tune` train runs that differ in these one kernel
    after the other.

    Args:
        runs: The runs, not trained yet.
        rounds: Number of rounds.
        outs: A folder for each run; see `Run.train`.
        resume: See `Run.train`. All folders need a checkpoint of the same round; otherwise all runs start over.
        schedule: When to evaluate and save the runs.
        profile: See `Run.train`.
        trackers: A tracker for each run; see `Run.train`.

    Returns:
        The result of each run.

    Raises:
        ArgumentError: if the runs differ in anything else, or have a stop rule; before anything is trained or written.
    """
    if len(runs) > 1 and any(run.experiment.stop for run in runs):
        raise ArgumentError(
            "runs", "accepted in one kernel: runs without a stop rule, since all train to the end"
        )
    for name, given in (("outs", outs), ("trackers", trackers)):
        if given and len(given) != len(runs):
            raise ArgumentError(name, f"accepted: one for each of the {len(runs)} runs", len(given))
    check_alike([run.experiment for run in runs])
    folders = [Path(out) for out in outs] if outs else None
    trainer = start(padded_alike(runs), folders, profile, resume=resume, trackers=trackers)
    outcomes = trainer.train(rounds, schedule)
    found = zip(runs, outcomes, folders or [None] * len(runs), strict=True)
    return [
        made_result(run.experiment.with_rounds(rounds), outcome, folder)
        for run, outcome, folder in found
    ]
