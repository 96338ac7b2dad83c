"""What one run is: a method on a federation with a model and its local training, and how it is executed."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from pfljax.algorithms.common.attacks import Attack
from pfljax.algorithms.common.server import Server
from pfljax.core.types import Algorithm, Array
from pfljax.data import Federation
from pfljax.data.sources.source import generator
from pfljax.engine.plan import ExecutionPlan, make_plan
from pfljax.evaluation.fine_tuning import fine_tuned
from pfljax.local.problem import Problem
from pfljax.local.training import LocalTraining


@dataclasses.dataclass(frozen=True)
class Execution:
    """Where clients live and in which order they are worked on; every choice gives the same numbers.

    Attributes:
        plan: How a device works on its clients: one after the other ("map"), all at once ("vmap"), `chunk` at a time
            ("chunk"); "auto" is map on CPUs and vmap elsewhere.
        chunk: Number of clients at a time under "chunk".
        devices: Number of devices to use; 0 uses all.
        exchange: How clients' models reach other devices: copied to all ("gather"), or around the ring of devices
            ("ring"); "auto" takes what fits.
        client_store: Where clients' state and data are between rounds: on the "device", or for more clients than the
            devices hold in the memory of the "host", or on "disk", which holds the state of those that have taken part.
    """

    plan: Literal["auto", "vmap", "map", "chunk"] = "auto"
    chunk: int = 8
    devices: int = 0
    exchange: Literal["auto", "gather", "ring"] = "auto"
    client_store: Literal["device", "host", "disk"] = "device"

    def make_plan(self) -> ExecutionPlan:
        """The execution plan on the devices that are there."""
        return make_plan(self.plan, self.chunk, self.devices, self.exchange)


class Numbers(NamedTuple):
    """The numbers of a run that may differ between runs in one kernel, there as traced arrays.

    Attributes:
        learning_rate: The rate of local training; None where it is not known or the experiment's own.
        knobs: The method's knobs that are floats, by name.
    """

    learning_rate: Any
    knobs: dict[str, Any]


OWN = Numbers(None, {})


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One run.

    Attributes:
        method: A registered method with its knobs.
        problem: What the method is built for.
        federation: The clients that train.
        local: How clients train; `problem.solver` is made of it. None: no other learning rate can be asked for.
        seed: Decides initial models, cohorts, mini-batches and sampling.
        unseen: Clients that are kept out of training, or None.
        fine_tune_epochs: Passes over its data with which each client tunes what is evaluated.
        client_store: "device", "host" or "disk", as in `Execution`.
        directory: Folder for the clients' rows under "disk"; None: a temporary one.
        eval_clients: Number of clients that are scored, the same ones in every evaluation; 0: all.
        server: How cohorts are drawn and models are aggregated.
        attack: What attackers among the clients do; the federation says who they are.
        config: Content of config.json; its "settings" must agree where a run is resumed.
    """

    method: Any
    problem: Problem
    federation: Federation
    local: LocalTraining | None = None
    seed: int = 0
    unseen: Federation | None = None
    fine_tune_epochs: int = 0
    client_store: str = "device"
    directory: Path | None = None
    eval_clients: int = 0
    server: Server = dataclasses.field(default_factory=Server)
    attack: Attack = dataclasses.field(default_factory=Attack)
    config: dict = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The method's registered name."""
        return self.method.info.name

    @functools.cached_property
    def scored(self) -> np.ndarray | None:
        """(n,) int32 the clients that are scored, ascending: a uniform sample that the seed decides; None: all."""
        num = self.federation.num_clients
        if not 0 < self.eval_clients < num:
            return None
        drawn = generator(self.seed, "evaluation").choice(num, self.eval_clients, replace=False)
        return np.sort(drawn).astype(np.int32)

    @property
    def numbers(self) -> Numbers:
        """What `algorithm` takes in other values."""
        names = [field.name for field in dataclasses.fields(self.method) if field.type in (float, "float")]
        rate = self.local.learning_rate if self.local else None
        return Numbers(rate, {name: getattr(self.method, name) for name in names})

    @property
    def structure(self) -> tuple:
        """What must agree for runs to share a kernel: the method, its other knobs, and what surrounds it."""
        knobs = dataclasses.asdict(self.method)
        fixed = {name: value for name, value in knobs.items() if name not in self.numbers.knobs}
        return type(self.method), fixed, self.server, self.attack

    def algorithm(self, plan: ExecutionPlan, numbers: Numbers = OWN, part: Array | None = None) -> Algorithm:
        """The method, built for this run under an execution plan.

        Args:
            plan: How clients are mapped.
            numbers: Where any are given they are used in place of the run's own.
            part: As in `Problem`.
        """
        problem, method = self.problem._replace(plan=plan), self.method
        if numbers.learning_rate is not None:
            assert self.local is not None
            local = dataclasses.replace(self.local, learning_rate=numbers.learning_rate)
            problem = problem._replace(solver=local.bind(problem.model), learning_rate=numbers.learning_rate)
        if numbers.knobs:
            method = dataclasses.replace(method, **numbers.knobs)

        def build(part: Array | None) -> Algorithm:
            of_part = problem._replace(part=part)
            tuned = fine_tuned(of_part, method.build(of_part), self.fine_tune_epochs)
            return self.attack.on(of_part, tuned)

        return self.server.of(problem, lambda given: build(part if given is None else given))

    def with_rounds(self, rounds: int) -> Experiment:
        """The same run, planned for another number of rounds."""
        return dataclasses.replace(self, problem=self.problem._replace(rounds=rounds))

    @property
    def steps(self) -> np.ndarray:
        """(K,) steps that each client takes in a round; all alike where only shapes of the data are known."""
        size, n_max = self.federation.train.size, self.federation.train.y.shape[1]
        size = size if isinstance(size, np.ndarray) else np.full(size.shape, n_max)
        return np.asarray(self.problem.solver.num_steps(size, n_max))
