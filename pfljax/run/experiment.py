"""The definition of a run: method, federation, model and local training, and how the run is executed."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.contract import cores, tree
from pfljax.contract.alike import alike, derived
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Algorithm, Key, PyTree
from pfljax.data import Federation
from pfljax.data.drift import Drift, Phases
from pfljax.data.sources.source import generator
from pfljax.evaluation.fine_tuning import fine_tuned
from pfljax.evaluation.measures import Metric
from pfljax.evaluation.metrics import outputs, score_of_task
from pfljax.exchange.in_python import PythonPlan
from pfljax.exchange.plan import ExecutionPlan, Peers, Plan, make_plan
from pfljax.local.problem import Problem
from pfljax.local.training import LocalTraining
from pfljax.settings.fields import hyperparameter, settings
from pfljax.stages.asynchrony import clock_stage
from pfljax.stages.attacks import Attack
from pfljax.stages.client_privacy import ClientPrivacy
from pfljax.stages.compression import Compression
from pfljax.stages.faults import Faults
from pfljax.stages.latecomers import latecomers_stage
from pfljax.stages.networks import Mixed
from pfljax.stages.optimizers import OptimizerStages
from pfljax.stages.pipeline import pipelined
from pfljax.stages.server import Server
from pfljax.stages.stage import StageMaker

NeverTrained = Literal["global", "initial"]


@settings
class Execution:
    """Where clients are stored and how they are mapped to devices. Every choice gives the same results.

    Attributes:
        plan: How a device processes its clients: one after the other ("map"), all at once ("vmap"), or `chunk` at a
            time ("chunk"). "auto" means map on CPUs; on TPUs and GPUs of a known kind, what compiles to the least
            estimated time within memory; vmap elsewhere. "python" compiles only networks and works in plain loops, so
            that a method can be debugged with `print` and `breakpoint`.
        chunk: Number of clients at a time under "chunk".
        devices: Number of devices to use; 0: all (on a CPU, one per core).
        model_devices: Number of devices that one client's model is spread over, a divisor of the number of devices.
        exchange: How clients' models reach other devices: copied to all devices ("gather"), or passed around the ring
            of devices ("ring"). "auto" picks what fits in memory, and on TPUs and GPUs what plays a round faster.
        client_store: Where clients' state and data are kept between rounds: on the "device"; in "host" memory, for
            more clients than fit on the devices; or on "disk", which stores the state of clients that have taken part.
        cache_features: Whether the outputs of frozen layers before anything trained are computed once per example
            instead of in every step, where that is possible and saves enough.

    Examples:
        >>> import numpy as np
        >>> import pfljax as pfl
        >>> clients = pfl.data.digits(num_clients=4, train_examples=8)
        >>> model = pfl.models.MLP(hidden=(4,))
        >>> results = []
        >>> for client_store in ("device", "host"):
        ...     execution = pfl.Execution(client_store=client_store, devices=1)
        ...     run = pfl.Run(pfl.Ditto(), clients, model, execution=execution)
        ...     results.append(run.train(rounds=1, progress=False))
        >>> bool(np.allclose(results[0].per_client_accuracy, results[1].per_client_accuracy))
        True
    """

    plan: Plan = "auto"
    chunk: int = hyperparameter(8, at_least=1, read_with=("plan", "chunk"))
    devices: int = hyperparameter(0, at_least=0, at_most=1024)
    model_devices: int = hyperparameter(1, at_least=1, at_most=1024)
    exchange: Peers = "auto"
    client_store: Literal["device", "host", "disk"] = "device"
    cache_features: bool = True

    def make_plan(self) -> ExecutionPlan:
        """Returns the execution plan on the available devices."""
        cores.start()
        if not self.devices:
            cores.warn_once()
        if self.plan == "python":
            return self._python_plan()
        return make_plan(
            kind=self.plan,
            chunk=self.chunk,
            devices=self.devices,
            peers=self.exchange,
            model_devices=self.model_devices,
        )

    def _python_plan(self) -> PythonPlan:
        """Returns the plan in Python; raises if other choices need compiled code."""
        if self.client_store != "device":
            text = "accepted with plan=python: device"
            raise ArgumentError("client_store", text, self.client_store)
        if self.model_devices > 1:
            text = "accepted with plan=python: 1"
            raise ArgumentError("model_devices", text, self.model_devices)
        one_device = make_plan("map", devices=1)
        return PythonPlan(one_device.mesh, 1)


class Numbers(NamedTuple):
    """Numbers that may differ between runs in one kernel, where they are traced arrays.

    Attributes:
        learning_rate: Learning rate of local training; None: unknown, or the experiment's own.
        hyperparameters: The method's float hyperparameters, by name.
    """

    learning_rate: Any
    hyperparameters: dict[str, Any]


OWN = Numbers(None, {})
# metadata of fields that may differ between runs in one kernel
PER_RUN = types.MappingProxyType({"per_run": True})
SHARED = (
    "seed, data, learning rate and the method's float hyperparameters"  # what may differ, in words
)


def unknown(planned: int) -> dict[str, Any]:
    """The program of a run that nobody has described."""
    return {}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The definition of one run.

    What runs in one kernel may differ in is declared here: fields that are `PER_RUN`, and `Numbers`. All else must
    agree; see `differences`.

    Attributes:
        method: A registered method with its hyperparameters.
        problem: The problem that the method is built for.
        federation: The training clients.
        local: How clients train; `problem.solver` is made from it. None: the learning rate cannot be changed.
        seed: Seed for initial models, cohorts, mini-batches and sampling.
        unseen: Clients held out of training, or None.
        fine_tune_epochs: Number of epochs that each client fine-tunes on its own data before evaluation.
        client_store: "device", "host" or "disk"; see `Execution`.
        directory: Folder for the clients' rows under "disk"; None: a temporary folder.
        eval_clients: Number of clients to score, the same ones in every evaluation; 0: all.
        never_trained: What clients predict with that have never trained, if the method has a global model: that
            ("global"), or what they began with ("initial").
        server: How the server samples cohorts and aggregates models.
        attack: What the attacking clients do. The federation determines which clients attack.
        compression: How messages are compressed.
        faults: Which clients fail.
        checked: Whether clients are dropped whose results are not finite; set when a run starts over.
        client_privacy: Clipping and noise for clients' whole updates.
        knows: What the method is told that others are not, in words.
        metrics: Further metrics of clients' predictions, by name; see `evaluation.measures`.
        score: The name of the score by which clients, rounds and methods are ordered; "": that of the task.
        own_stages: What makes the user's own stages; see `stages`.
        stop: (rows of the history) -> whether the run stops, or why; None: it does not.
        config: Content of config.json. Its "settings" must agree when a run is resumed.
        planned_rounds: Number of rounds that the method's schedules are planned for; None: `problem.rounds`, those
            that are trained.
        programs: Planned number of rounds -> what the run computes; see `fingerprint.program`. Traced when it is first
            called.
        features: What is computed once per example, if `federation` has features in place of inputs.
        not_cached: Why frozen layers are computed in every step; "": they are not, or nothing is frozen.
        clients: The training clients as they were passed to the run: `federation` before x is standardized, clients
            attack and features replace inputs. None: unknown.
        drift: The changes of the clients' data.
        phases: The clients' data over rounds, with the shapes of `federation`; None: they do not change.
    """

    method: Any
    problem: Problem
    federation: Federation = dataclasses.field(metadata=PER_RUN)
    local: LocalTraining | None = None
    seed: int = dataclasses.field(default=0, metadata=PER_RUN)
    unseen: Federation | None = dataclasses.field(default=None, metadata=PER_RUN)
    fine_tune_epochs: int = 0
    client_store: str = "device"
    directory: Path | None = dataclasses.field(default=None, metadata=PER_RUN)
    eval_clients: int = 0
    never_trained: NeverTrained = "global"
    server: Server = dataclasses.field(default_factory=Server)
    attack: Attack = dataclasses.field(default_factory=Attack)
    compression: Compression = dataclasses.field(default_factory=Compression)
    faults: Faults = dataclasses.field(default_factory=Faults)
    checked: bool = False
    client_privacy: ClientPrivacy = dataclasses.field(default_factory=ClientPrivacy)
    knows: str = dataclasses.field(default="", metadata=PER_RUN)
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    score: str = dataclasses.field(default="", metadata=PER_RUN)
    own_stages: tuple[StageMaker, ...] = ()
    stop: Callable[[Sequence[dict]], bool | str] | None = None
    config: dict = dataclasses.field(default_factory=dict, metadata=PER_RUN)
    planned_rounds: int | None = None
    programs: Callable[[int], dict] = dataclasses.field(default=unknown, metadata=PER_RUN)
    features: Any = dataclasses.field(default=None, metadata=PER_RUN)
    not_cached: str = ""
    clients: Federation | None = dataclasses.field(default=None, metadata=PER_RUN)
    drift: tuple[Drift, ...] = ()
    phases: Phases | None = dataclasses.field(default=None, metadata=PER_RUN)

    def in_round(self, number: int) -> Experiment:
        """The run with the clients' data of a round; 0: those of the initial models."""
        if self.phases is None:
            return self
        federation = self.phases.clients[self.phases.number(number)]
        return dataclasses.replace(self, federation=federation)

    @property
    def inputs(self) -> PyTree:
        """Shape and type of an example, or of each array in it, as the user gives it."""
        return self.features.inputs if self.features else self.federation.inputs

    @property
    def described(self) -> dict:
        """Content of config.json with the number of rounds and the run's program."""
        checked = {"checked": True} if self.checked else {}
        return self.config | {"rounds": self.problem.rounds, "program": self.program()} | checked

    @property
    def planned(self) -> int:
        """Number of rounds that the method's schedules are planned for."""
        return self.problem.rounds if self.planned_rounds is None else self.planned_rounds

    def program(self) -> dict[str, Any]:
        """Describes what the run computes; see `fingerprint.program`."""
        return self.programs(self.planned)

    @property
    def depends_on_rounds(self) -> bool:
        """Whether training depends on the planned number of rounds, so that a run cannot go on for more of them.

        True where that is not known: under plan=python, functions may read values, so that they cannot be traced.
        """
        try:
            return self.program().get("planned_rounds") is not None
        except jax.errors.JAXTypeError:
            if isinstance(self.problem.plan, PythonPlan):
                return True
            raise

    @property
    def name(self) -> str:
        """The method's registered name."""
        return self.method.info.name

    @property
    def measures(self) -> list[str]:
        """Names of all further metrics: the run's own and its attack's."""
        return [*self.metrics, *self.attack.measures]

    @property
    def score_name(self) -> str:
        """The name of the score by which clients, rounds and methods are ordered."""
        return self.score or score_of_task(self.federation.task)

    @property
    def lower_is_better(self) -> list[str]:
        """Names of those among `measures` of which low values are good; an attack's success is not."""
        metrics = [name for name, metric in self.metrics.items() if not metric.higher_is_better]
        return [*metrics, *self.attack.measures]

    @functools.cached_property
    def scored(self) -> np.ndarray | None:
        """The scored clients: a uniform sample drawn with the seed, sorted, int32 (n,); None: all."""
        num_clients = self.federation.num_clients
        if not 0 < self.eval_clients < num_clients:
            return None
        rng = generator(self.seed, "evaluation")
        clients = rng.choice(num_clients, self.eval_clients, replace=False)
        return np.sort(clients).astype(np.int32)

    @property
    def numbers(self) -> Numbers:
        """The numbers that `algorithm` can replace: not those that a method declares as static."""
        hyperparameters: dict[str, Any] = {}
        for field in dataclasses.fields(self.method):
            is_float = field.type in (float, "float")
            if is_float and not field.metadata.get("static"):
                hyperparameters[field.name] = getattr(self.method, field.name)
        learning_rate = self.local.learning_rate if self.local else None
        return Numbers(learning_rate, hyperparameters)

    @property
    def fixed(self) -> dict[str, Any]:
        """What must agree for runs to share a kernel, by name: every field but what is `PER_RUN` and `numbers`."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            if "per_run" not in field.metadata:
                values |= entries(field.name, getattr(self, field.name))

        # What is traced, and a shape of the data.
        left_out = {f"method.{name}" for name in self.numbers.hyperparameters}
        left_out |= {"local.learning_rate", "problem.learning_rate", "problem.n_max"}
        # The solver is made from `local`, if that is known.
        derived_from_local = ("problem.solver",) if self.local is not None else ()

        return {
            name: value
            for name, value in values.items()
            if name not in left_out and not name.startswith(derived_from_local)
        }

    def algorithm(self, plan: ExecutionPlan, numbers: Numbers = OWN) -> Algorithm:
        """Builds the method for this run under an execution plan.

        Schedules are those of the planned number of rounds. Newcomers, who come after training, are adapted for the
        number of rounds that were trained, as if no more had been planned.

        Args:
            plan: How clients are mapped to devices.
            numbers: Numbers that replace the run's own, if given.
        """
        problem = self.problem._replace(plan=plan)
        if self.planned_rounds is None or self.planned_rounds == problem.rounds:
            return self._built(problem, numbers)
        planned = self._built(problem._replace(rounds=self.planned_rounds), numbers)
        trained = self._built(problem, numbers)
        return dataclasses.replace(planned, adapt=trained.adapt)

    def _built(self, problem: Problem, numbers: Numbers) -> Algorithm:
        """The method with all stages for a problem with the run's plan and number of rounds."""
        method = self.method
        learning_rate = numbers.learning_rate
        if learning_rate is not None:
            assert self.local is not None
            local = dataclasses.replace(self.local, learning_rate=learning_rate)
            solver = local.bind(problem.model)
            problem = problem._replace(solver=solver, learning_rate=learning_rate)
        if numbers.hyperparameters:
            method = dataclasses.replace(method, **numbers.hyperparameters)

        algorithm = self.built(problem, method, learning_rate)
        algorithm = pipelined(problem, algorithm, self.stages)
        if self.never_trained == "initial":
            algorithm = dataclasses.replace(algorithm, global_model=None)
        if self.local is None:
            return algorithm
        engine = algorithm.engine._replace(matmul_precision=self.local.matmul_precision)
        return dataclasses.replace(algorithm, engine=engine)

    @property
    def stages(self) -> list[StageMaker]:
        """What makes the stages between clients and server, from the client to the server.

        This is the only list of stages: a new one is entered here. Those of `own_stages`, which
        users hand over, see what arrives, before privacy and robust rules. See `stages.stage` for
        what a stage is, and `stages.pipeline` for what is done with them.
        """
        noised = self.client_privacy.active
        return [
            self.optimizer_stages,
            self.attack.stage,
            self.compression.downloads,
            self.compression.uploads,
            clock_stage,
            functools.partial(self.faults.stage, checked=self.checked),
            *self.own_stages,
            self.client_privacy.stage,
            functools.partial(self.server.summing, attack=self.attack, noised=noised),
            self.server.sampling,
            functools.partial(self.server.combining, attack=self.attack),
            latecomers_stage,
        ]

    @functools.cached_property
    def optimizer_stages(self) -> OptimizerStages:
        """What makes the stage that keeps optimizers."""
        clients = tree.shapes_of_rows(self.federation.client_data, self.problem.num_clients)
        return OptimizerStages(clients)

    def built(self, problem: Problem, method: Any, learning_rate: Any = None) -> Algorithm:
        """The method without stages, for one network or several."""
        if problem.groups is not None:
            return self.mixed(problem, method, learning_rate).algorithm()
        return fine_tuned(problem, method.build(problem), self.fine_tune_epochs)

    def mixed(self, problem: Problem, method: Any, learning_rate: Any = None) -> Mixed:
        """The method without stages, for several networks."""
        assert problem.groups is not None and self.local is not None
        local = self.local
        if learning_rate is not None:
            local = dataclasses.replace(local, learning_rate=learning_rate)

        # The problem of each network alone; what the networks have in common is the first one's.
        one_network_problem = problem._replace(groups=None)
        problems: list[Problem] = []
        for model in problem.groups.models:
            problems.append(one_network_problem._replace(model=model, solver=local.bind(model)))
        problems = [network._replace(common=problems[0]) for network in problems]

        algorithms: list[Algorithm] = []
        for network in problems:
            algorithm = method.build(network)
            algorithms.append(fine_tuned(network, algorithm, self.fine_tune_epochs))
        clients = tree.shapes_of_rows(self.federation.client_data, problem.num_clients)
        return Mixed(problem, tuple(problems), tuple(algorithms), clients, outputs)

    def keys(self, key: Key, secret: Key) -> Key:
        """Returns the keys of the rounds: (2,) with private noise, where only the ledger's cohorts use `key`."""
        return jnp.stack([key, secret]) if self.noise_seeds else key

    @property
    def noise_seeds(self) -> list[int | None]:
        """The `noise_seed` of each mechanism with private noise."""
        mechanisms = (self.problem.solver.privacy, self.client_privacy)
        return [mechanism.noise_seed for mechanism in mechanisms if mechanism.noise_multiplier]

    def with_rounds(self, rounds: int) -> Experiment:
        """Returns the same run with another number of rounds.

        Raises:
            ArgumentError: if fewer rounds are planned, or the noise of client privacy does not cover them.
        """
        if self.planned_rounds is not None and rounds > self.planned_rounds:
            text = f"accepted: {rounds}, the number of rounds that are trained, or more"
            raise ArgumentError("planned_rounds", text, self.planned_rounds)
        self.client_privacy.check_rounds(rounds)
        return dataclasses.replace(self, problem=self.problem._replace(rounds=rounds))

    @property
    def steps(self) -> np.ndarray:
        """Number of steps of each client in a round. Shape (K,). All equal if only the data's shapes are known."""
        sizes = self.federation.train.size
        n_max = self.federation.train.y.shape[1]
        if not isinstance(sizes, np.ndarray):
            sizes = np.full(sizes.shape, n_max)
        return np.asarray(self.problem.solver.num_steps(sizes, n_max))

    def gradients(self, algorithm: Algorithm) -> float:
        """Mean number of gradients of mini-batches that a client computes in a round, as the ledger counts them.

        The mean is over all clients; those outside of a round's cohort compute none.
        """
        problem = self.problem
        ledger = algorithm.ledger
        mean_steps = float(self.steps.mean())
        per_client = mean_steps * ledger.passes * max(ledger.gradients, 1)
        turns = problem.clock.turns if problem.clock else 0
        clients_a_round = turns or problem.expected_clients
        return per_client * clients_a_round / problem.num_clients


def entries(name: str, value: Any) -> dict[str, Any]:
    """A value's fields by name, at any depth, if it declares some; otherwise the value itself."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        names: Sequence[str] = getattr(value, "_fields", ())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and not callable(value):
        names = [field.name for field in dataclasses.fields(value) if not derived(field)]
    else:
        return {name: value}
    values = {name: type(value)}
    for field_name in names:
        values |= entries(f"{name}.{field_name}", getattr(value, field_name))
    return values


def differences(a: Experiment, b: Experiment) -> list[str]:
    """Names what two runs differ in, though it must agree for them to share a kernel; see `Experiment.fixed`."""
    values = a.fixed
    other_values = b.fixed
    names: list[str] = []
    for name, value in values.items():
        # A field of something that differs is not named again.
        if any(name.startswith(f"{outer}.") for outer in names):
            continue
        if name not in other_values or not alike(value, other_values[name]):
            names.append(name)
    return names


def groups_alike(experiments: Sequence[Experiment]) -> list[list[int]]:
    """The numbers of runs that can share a kernel, group by group."""
    groups: list[list[int]] = []
    for number, experiment in enumerate(experiments):
        for group in groups:
            if not differences(experiments[group[0]], experiment):
                group.append(number)
                break
        else:
            groups.append([number])
    return groups
