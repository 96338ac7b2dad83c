"""A method on clients as pure functions of a key and a state."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pfljax.api.run import Clients, Run
from pfljax.contract.errors import ArgumentError
from pfljax.contract.fields import checked
from pfljax.contract.types import Array, ClientData, Key, State
from pfljax.exchange import lifting
from pfljax.exchange.in_python import PythonPlan, calling
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import Record, make_round
from pfljax.local.training import LocalTraining
from pfljax.stores.compiled import Jitted
from pfljax.stores.serving import scores
from pfljax.training import mixing
from pfljax.training.loop import Rounds


class Simulation:
    """Rounds of a method without a schedule, files or progress: `Run` without its loop.

    `init`, `step` and `evaluate` are pure, so that they can be called within `jax.jit`, `jax.lax.scan` or a loop of
    your own:

        sim = pfl.Simulation(pfl.Ditto(), clients, model, local)
        state = sim.init(jax.random.key(0))
        for _ in range(100):
            state, info = sim.step(jax.random.key(1), state)
        print(sim.evaluate(state)["test"]["accuracy"].mean())

    Attributes:
        experiment: The method, clients and settings.
    """

    @checked(options=[Run], without=["seed", "unseen", "fine_tune_epochs", "eval_clients", "metrics", "stop", "config"])
    def __init__(
        self,
        method: Any,
        clients: Clients,
        model: Any,
        local: LocalTraining | None = None,
        *,
        rounds: Rounds = 100,
        **options: Any,
    ):
        """Checks all arguments, and puts the clients' data on the devices.

        Args:
            method, clients, model, local: As in `Run`.
            rounds: Number of rounds that are planned, which some methods' schedules read.
            options: `participation`, `server`, `attack`, `compression`, `faults`, `client_privacy`, `clock` and
                `execution` of `Run`; clients are stored on the devices.

        Raises:
            ArgumentError: see `Run`.
        """
        self.experiment = Run(method, clients, model, local, **options).experiment.with_rounds(rounds)
        if self.experiment.client_store != "device":
            raise ArgumentError("client_store", "accepted for a Simulation: device", self.experiment.client_store)
        mixing.check(self.experiment)
        problem, federation = self.experiment.problem, self.experiment.federation
        plan, num = problem.plan, problem.num_clients
        algorithm = self.experiment.algorithm(plan)
        self._clients: ClientData = place(plan, federation.client_data, num)
        splits = {name: getattr(federation, name) for name in ("train", "validation", "test")}
        self._splits = place(plan, {name: part for name, part in splits.items() if part.y.size}, num)
        one_round = make_round(algorithm, plan, problem.cohort_size)
        use = scores(problem, algorithm)
        compiled = calling if isinstance(plan, PythonPlan) else functools.partial(Jitted, problem.model.network, plan)
        self._init = compiled(functools.partial(lifting.init, algorithm, plan))
        self._step = compiled(lambda key, state, clients: one_round(key, state.round, state, clients))
        self._serve = compiled(functools.partial(lifting.serve, algorithm, plan, use))

    def init(self, key: Key) -> State:
        """Returns the initial state: server, models, optimizer and clients' rows, all arrays."""
        return self._init(key, self._clients)

    def step(self, key: Key, state: State) -> tuple[State, Record]:
        """Plays a round.

        Args:
            key: The same for all rounds; the number of the round is folded in.
            state: The state before the round.

        Returns:
            The state after it; and its training loss, traffic in bytes and the method's own metrics.
        """
        return self._step(key, state, self._clients)

    def evaluate(self, state: State, key: Key | None = None) -> dict[str, dict[str, Array]]:
        """Returns every client's scores (K,), by split and name.

        Args:
            state: Any state.
            key: Key of predictions that train first.
        """
        key = jax.random.key(0) if key is None else key
        ids = jnp.arange(self.experiment.problem.num_clients, dtype=jnp.int32)
        return self._serve(key, state, ids, self._clients, self._splits).found
