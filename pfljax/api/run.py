"""A run of a method on clients."""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
from pfljax.data.drift import Drifts, Phases, make_phases
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
from pfljax.models.torch_modules import wrapped
from pfljax.planner.profiling import profiler
from pfljax.run.experiment import Execution, Experiment, NeverTrained
from pfljax.run.replicates import check_alike
from pfljax.settings.fields import Seed, checked, hyperparameter, nearest
from pfljax.settings.method import METHODS, tell
from pfljax.stages.attacks import Attack
from pfljax.stages.client_privacy import ClientPrivacy
from pfljax.stages.compression import Compression
from pfljax.stages.devices import Clock
from pfljax.stages.faults import Faults
from pfljax.stages.server import Server
from pfljax.training import describe
from pfljax.training.conformance import RESERVED
from pfljax.training.evaluating import EvalEvery
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

    Examples:
        >>> import pfljax as pfl
        >>> clients = pfl.data.digits(num_clients=4, train_examples=8)
        >>> run = pfl.Run(pfl.Ditto(), clients, pfl.models.MLP(hidden=(4,)), seed=1)
        >>> result = run.train(rounds=2, progress=False)
        >>> result.per_client_accuracy.shape
        (4,)
        >>> run.train(rounds=1, progress=False).history[-1]["round"]  # goes on
        3
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
        drift: Drifts = (),
        stages: Stages = (),
        execution: Execution | None = None,
        config: dict | None = None,
    ):
        """Checks all arguments. Compiles nothing yet.

        Args:
            method: A method with its hyperparameters, such as `FedeRiCo(neighbors=3)`, or the name of a method, such as
                "ditto", for its default hyperparameters.
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
            tell_groups: Whether methods get the true number of groups, unless you set it.
            metrics: Further metrics of each client's predictions, by name: see `evaluation.measures`.
            score: The score by which clients, rounds and methods are ordered: "accuracy", "loss", the name of one of
                `metrics` or of `METRICS`, in upper or lower case, or a function as in `metrics`. The best round, the
                bottom decile, `patience` and comparisons follow it. Default: accuracy, or loss for regression.
            stop: Rows of `Result.history` -> whether to stop, or why, after an evaluation; None: train all rounds.
            planned_rounds: Number of rounds for which a method's schedules are planned. Default: those of the first
                call of `train`. Methods that depend on it train no more rounds than these; see `train`.
            server: How the server samples cohorts and aggregates models. Default: uniformly, and by the mean.
            attack: Attack of some clients. Default: no attack.
            compression: Compression of messages. Default: none.
            faults: Client failures and handling of divergence. Default: no failures; see `Faults`.
            clock: Simulated times of computing and sending. Default: no time is simulated.
            client_privacy: Clipping and noise for clients' whole updates. Default: neither.
            drift: Changes of the clients' data after given rounds, one or several. Default: none. See
                `pfljax.data.Drift`.
            stages: Your own stages, between faults and privacy: functions (problem, pipeline) -> `stages.Stage`, or
                None for no stage.
            execution: Where clients' state and data are stored, and how clients are mapped to devices.
            config: Extra content for config.json. Its "settings" (default: these arguments) must agree on resuming.

        Raises:
            ArgumentError: if an argument is not accepted; the message names what is.
        """
        local = local or LocalTraining()
        execution = execution or Execution()
        cores.check_settings(compiled=execution.plan != "python")
        method, knows = tell(check_method(method), tell_groups, clients.group)

        # Metrics, and the score among them that `patience` follows.
        known_metrics = measures.named(metrics, RESERVED, clients.task)
        scored = measures.scored(score, known_metrics, RESERVED, clients.task)
        if isinstance(stop, Patience) and scored.name != score_of_task(clients.task):
            stop = stop.with_score(scored.name, scored.higher_is_better)

        # The problem that the method is built for.
        clients = scaled_as(model, clients)
        self.clients = clients
        phases = make_phases(clients, drift, seed) if drift else None
        check_drift(phases, local)
        local = with_class_weights(local, phases.clients[0] if phases else clients)
        client_privacy = client_privacy or ClientPrivacy()
        plan = execution.make_plan()
        problem = make_problem(clients, model, local, participation, plan, client_privacy)
        problem = problem._replace(clock=clock)

        # Settings, which config.json describes.
        attack = attack or Attack()
        settings = {
            "server": server or Server(),
            "attack": attack,
            "compression": compression or Compression(),
            "faults": faults or Faults(),
            "client_privacy": client_privacy,
            "stop": stop,
            "knows": knows,
        }
        if stages:
            settings["own_stages"] = tuple(stages)
        settings["seed"] = seed
        settings["fine_tune_epochs"] = fine_tune_epochs
        settings["eval_clients"] = eval_clients
        settings["never_trained"] = never_trained
        check_config(config)
        if not config:
            described = settings | ({"clock": clock} if clock else {})
            described |= {"drift": phases.drifts} if phases else {}
            modules = modules_of(model)
            config = describe.config(method, clients, modules, local, participation, described)

        # The data, with attackers' labels.
        def as_trained(federation: Federation) -> Federation:
            if attack.active:
                federation = federation.with_attackers(attack.attackers, seed)
            return federation.standardized

        unseen = data.match_classes(unseen, clients)
        attacked = clients.with_attackers(attack.attackers, seed) if attack.active else clients
        recorded = {"score": scored.name, "data": data.describe(attacked, unseen)}
        if phases:
            phases = phases.map(as_trained)
            recorded["data"]["drift"] = ", ".join(map(repr, phases.drifts))
        experiment = Experiment(
            method,
            problem,
            phases.clients[0] if phases else as_trained(clients),
            local,
            unseen=unseen and unseen.standardized,
            planned_rounds=planned_rounds,
            client_store=execution.client_store,
            config=config | recorded,
            metrics=scored.metrics,
            score=scored.name,
            clients=self.clients,
            drift=phases.drifts if phases else (),
            phases=phases,
            **settings,
        )
        identified = fingerprint.identified(experiment)
        self.experiment = check(with_features(identified, execution.cache_features))

    def __repr__(self) -> str:
        method = self.experiment.method.info.name
        return f"Run({method}, seed {self.experiment.seed}, on {self.clients!r})"

    @with_former_say
    @checked()
    def train(
        self,
        rounds: Rounds,
        *,
        out: Folder | None = None,
        resume: Resume = False,
        eval_every: EvalEvery = AUTO,
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
            eval_every: Number of rounds between evaluations. The initial models are evaluated too, as round 0, and so
                are those after the last round. "auto": 10, or a larger number if evaluations would take more than a
                tenth of the time, as estimated from numbers of examples; the plan then says it. With plan="python",
                "auto" evaluates only the trained models, so that debugging starts soon.
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
        # The trainer, which later calls go on with.
        out = None if out is None else Path(out)
        if resume and out is None:
            raise ArgumentError("resume", "needs the run's folder, `out`")
        if self._trainer is None:
            self._out = out
            outs = [out] if out else None
            self._trainer = start([self], outs, profile, resume=resume, bar=progress)
        elif out not in (None, self._out):
            text = f"this run already writes to {self._out or 'no folder'}"
            raise ArgumentError("out", text, out)
        self._trainer.trackers = [tracker]

        # When to evaluate and save.
        total = self._trainer.done + rounds
        in_python = isinstance(self.experiment.problem.plan, PythonPlan)
        schedule = Schedule(eval_every, checkpoint_every)
        if in_python and eval_every == AUTO:
            schedule = Schedule(total, checkpoint_every, initial=False)

        (outcome,) = self._trainer.train(total, schedule)
        planned_rounds = outcome.experiment.planned_rounds
        planned = dataclasses.replace(self.experiment, planned_rounds=planned_rounds)
        return result_of(planned.with_rounds(total), outcome, self._out)


def result_of(experiment: Experiment, outcome: Outcome, out: Path | None) -> Result:
    """Returns the result of a run that was trained in this process."""
    return Result(Scores.from_outcome(outcome), Predictor(experiment, outcome), out)


def check_method(method: Any, argument: str = "method") -> Any:
    """Returns a method, given as such or by its name; see `default_method`.

    Raises:
        ArgumentError: if the object is none.
    """
    if isinstance(method, str):
        return default_method(method, argument)
    is_class = isinstance(method, type)
    is_built = hasattr(method, "build")
    if not is_class and is_built and hasattr(method, "info"):
        return method
    text = "accepted: a method with its hyperparameters, such as FedAvg()"
    if not is_class and is_built and dataclasses.is_dataclass(method):
        text += "; decorate its class with @pfl.author.method"
    raise ArgumentError(argument, text, method)


def default_method(name: str, argument: str = "method") -> Any:
    """Returns the method of a registered name or of a class, in upper or lower case, with its default hyperparameters.

    Raises:
        ArgumentError: if there is none.
    """
    classes = {kind.__name__: registered for registered, kind in METHODS.items()}
    known = measures.matching(name, METHODS)
    if known is None:
        known = classes.get(measures.matching(name, classes) or "")
    if known is None:
        raise ArgumentError(argument, f"unknown method; {nearest(name, METHODS)}", name)
    return METHODS[known]()


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
    by_split = {}
    for split in splits_of(trials):
        by_split[split] = with_unseen(call_for_clients(clients, split), unseen, split)
    return {trial: by_split[trial.data_seed] for trial in trials}


def data_to_tune_on(
    data_by_trial: Mapping[Trial, SplitData], trials: Sequence[Trial], table: Sequence[Trial]
) -> dict[Trial, SplitData]:
    """Returns the clients of trials to tune on, whose validation examples are no test examples of a table.

    Args:
        data_by_trial: The clients of all trials.
        trials: Trials to tune on.
        table: Trials of the table.

    Raises:
        ArgumentError: if clients have no validation examples.
    """
    tuned = distinct_splits(data_by_trial, trials)
    if not all(split.clients.validation.size.sum() for split in tuned):
        text = "have no validation examples to tune on; set validation_fraction above 0"
        raise ArgumentError("clients", text)

    # Validation examples that the table does not test on.
    tested = []
    for split in distinct_splits(data_by_trial, table):
        tested += [clients for clients in split if clients is not None]
    untested = data.without_tested([split.clients for split in tuned], tested)

    # Trials on the same split share their clients.
    untested_by_split = {}
    for split, clients in zip(tuned, untested, strict=True):
        untested_by_split[id(split)] = SplitData(clients)
    return {trial: untested_by_split[id(data_by_trial[trial])] for trial in trials}


def distinct_splits(
    data_by_trial: Mapping[Trial, SplitData], trials: Sequence[Trial]
) -> list[SplitData]:
    """The data of trials, each split once."""
    by_identity = {id(data_by_trial[trial]): data_by_trial[trial] for trial in trials}
    return list(by_identity.values())


def splits_of(trials: Sequence[Trial]) -> list[int]:
    """The different splits of trials."""
    return list(dict.fromkeys(trial.data_seed for trial in trials))


def call_for_clients(function: Callable[[int], Any], split: int) -> Any:
    """Calls a user's function for the clients of a split. Raises `ArgumentError` if it fails or returns none."""
    try:
        clients = function(split)
    except ArgumentError:
        raise
    except Exception as error:
        line = f"raised {type(error).__name__}: {error}".partition("\n")[0]
        text = f"{line}, for {split}; accepted: a function of the split"
        raise ArgumentError("clients", text) from error
    is_pair = isinstance(clients, tuple) and len(clients) == 2
    training, unseen = clients if is_pair else (clients, None)
    if not isinstance(training, Federation) or not isinstance(unseen, Federation | None):
        raise ArgumentError("clients", "accepted: a function that returns a Federation", clients)
    return clients


def with_unseen(clients: Any, unseen: Federation | float | None, split: int) -> SplitData:
    """The clients of a split, with a share of them, or other clients, held out of training.

    Args:
        clients: The clients; or a pair of them and of unseen clients.
        unseen: See `compare`.
        split: The number of the split.

    Raises:
        ArgumentError: if unseen clients are passed twice.
    """
    if isinstance(clients, tuple):
        if unseen is not None:
            text = "accepted only if `clients` does not return unseen clients itself"
            raise ArgumentError("unseen", text)
        return SplitData(*clients)
    if unseen is None or isinstance(unseen, Federation):
        return SplitData(clients, unseen)
    return SplitData(*data.split_unseen(clients, unseen, split))


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
    """The clients, with the scaling of inputs that a model has from `Result.export`, if it has one.

    Raises:
        ArgumentError: if it is that of other arrays.
    """
    if isinstance(model, Mapping | Networks):
        return clients
    statistics = (
        model.input_statistics if isinstance(model, models.Model) else inside(wrapped(model))[1]
    )
    if not statistics:
        return clients
    used = set()

    def matching(path: Any, x: Any, kind: str) -> np.ndarray | None:
        """The statistics of an array of x; None if the model has none."""
        name = array_name(path)
        if name not in statistics[kind]:
            return None
        used.add(name)
        values = np.asarray(statistics[kind][name], np.float64)
        expected = x.shape[x.ndim - values.ndim :]
        if values.shape[1:] == (1,) * len(values.shape[1:]):  # channels first
            expected = (*expected[:1], *values.shape[1:])
        if values.shape != expected:
            shape = x.shape[2:]
            text = f"standardizes {name} with statistics of shape {values.shape}; the clients' examples have {shape}"
            raise ArgumentError("model", text)
        return values

    def tree_of(kind: str) -> Any:
        function = functools.partial(matching, kind=kind)
        return jax.tree_util.tree_map_with_path(function, clients.train.x, is_leaf=is_pooled)

    scaling = Scaling(tree_of("mean"), tree_of("std"))
    missing = statistics["mean"].keys() - used
    if missing:
        text = f"standardizes {', '.join(sorted(missing))}, which the clients' x lacks"
        raise ArgumentError("model", text)
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


def check_drift(phases: Phases | None, local: LocalTraining) -> None:
    """Raises `ArgumentError` for changes that the privacy ledger of clients' examples does not cover."""
    if phases is None or not local.privacy.active:
        return
    changes = {drift.change for drift in phases.drifts} - {"labels"}
    if changes:
        text = "changes the examples that the privacy ledger counts; accepted with privacy: labels"
        raise ArgumentError("drift.change", text, min(changes))


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
    networks = model.networks if isinstance(model, Networks) else [("", model)]

    # The networks, with the scaling of inputs that they compute themselves.
    built = []
    late = clients.late_scaling
    computes_in: Any = local.dtype  # "float32" or "bfloat16"
    for _, network in networks:
        built_network = models.build(
            network,
            clients.inputs,
            clients.task,
            clients.num_classes,
            target_shape=clients.train.y.shape[2:],
            loss=local.loss,
            computes_in=computes_in,
        )
        if late is not None:
            scaling = (late.mean, late.std)
            built_network = dataclasses.replace(built_network, scaling=scaling)
        built.append(built_network)
    for network in built:
        shapes = jax.eval_shape(network.init, jax.random.key(0))
        if not jax.tree.leaves(shapes):
            text = "has no parameters to train; accepted: networks with at least one"
            raise ArgumentError("model", text)

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
    # What cannot be trained.
    experiments = [run.experiment for run in runs]
    cores.check_settings(compiled=not isinstance(experiments[0].problem.plan, PythonPlan))
    jax_config: Any = jax.config
    for experiment in experiments:
        check_memory(experiment.problem.model)
        if jax_config.jax_debug_nans and experiment.attack.active:
            text = "attackers have no scores, which are NaN; accepted with an attack: False"
            raise ArgumentError("JAX_DEBUG_NANS", text, True)
    for out in outs or ():
        processes.first(functools.partial(files.check_writable, out))

    # config.json also describes the environment.
    if outs:
        environment = describe.environment()
        experiments = [
            dataclasses.replace(experiment, config=environment | experiment.config)
            for experiment in experiments
        ]
    folder = None if profile is None else Path(profile)
    if folder:
        files.check_writable(folder, "profile")
    profile_rounds = profiler(folder) if folder else None
    return Trainer(experiments, outs=outs, profile=profile_rounds, **options)


def padded_alike(runs: Sequence[Run]) -> Sequence[Run]:
    """Pads the runs' client data in place so that all have the same shapes. Returns the runs."""
    federations: list[Federation] = []
    for run in runs:
        phases = run.experiment.phases
        federations += phases.clients if phases else [run.experiment.federation]
    padded = iter(data.pad_alike(federations))
    for run in runs:
        experiment = run.experiment
        phases = experiment.phases
        if phases:
            num_phases = len(phases.clients)
            phases = dataclasses.replace(
                phases, clients=tuple(itertools.islice(padded, num_phases))
            )
        clients = phases.clients[0] if phases else next(padded)
        problem = experiment.problem._replace(n_max=clients.train.y.shape[1])
        run.experiment = dataclasses.replace(
            experiment, federation=clients, problem=problem, phases=phases
        )
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

    Examples:
        >>> import pfljax as pfl
        >>> clients = pfl.data.digits(num_clients=4, train_examples=8)
        >>> model = pfl.models.MLP(hidden=(4,))
        >>> runs = [pfl.Run(pfl.Local(), clients, model, seed=seed) for seed in (0, 1)]
        >>> results = pfl.train_replicates(runs, rounds=2)
        >>> len(results), results[0].summary["seed"]
        (2, 0)
    """
    if len(runs) > 1 and any(run.experiment.stop for run in runs):
        text = "accepted in one kernel: runs without a stop rule, since all train to the end"
        raise ArgumentError("runs", text)
    for name, values in (("outs", outs), ("trackers", trackers)):
        if values and len(values) != len(runs):
            text = f"accepted: one for each of the {len(runs)} runs"
            raise ArgumentError(name, text, len(values))
    check_alike([run.experiment for run in runs])
    folders = [Path(out) for out in outs] if outs else None
    trainer = start(padded_alike(runs), folders, profile, resume=resume, trackers=trackers)
    outcomes = trainer.train(rounds, schedule)
    results = []
    for run, outcome, folder in zip(runs, outcomes, folders or [None] * len(runs), strict=True):
        experiment = run.experiment.with_rounds(rounds)
        results.append(result_of(experiment, outcome, folder))
    return results
