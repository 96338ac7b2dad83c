"""A method on clients as pure functions of a key and a state."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfljax.api.run import Clients, Run
from pfljax.contract.errors import ArgumentError
from pfljax.contract.types import Array, ClientData, Key, State
from pfljax.exchange import lifting
from pfljax.exchange.in_python import PythonPlan, calling
from pfljax.exchange.pools import place
from pfljax.exchange.rounds import Record, make_round
from pfljax.local.training import LocalTraining
from pfljax.run.compiled import Jitted
from pfljax.settings.fields import checked
from pfljax.stores.serving import scores
from pfljax.training import mixing
from pfljax.training.loop import Rounds

# Options of `Run` that a simulation does not have: it is neither evaluated by a schedule nor written.
OF_RUNS = (
    "unseen",
    "fine_tune_epochs",
    "eval_clients",
    "never_trained",
    "metrics",
    "score",
    "stop",
    "planned_rounds",
    "config",
)


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

    @checked(options=[Run], without=["seed", *OF_RUNS])
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
        self.experiment = Run(method, clients, model, local, **options).experiment.with_rounds(
            rounds
        )
        if self.experiment.client_store != "device":
            raise ArgumentError(
                "client_store", "accepted for a Simulation: device", self.experiment.client_store
            )
        mixing.check(self.experiment)
        problem = self.experiment.problem
        federation = self.experiment.federation
        plan = problem.plan
        num = problem.num_clients
        algorithm = self.experiment.algorithm(plan)
        self._clients: ClientData = place(plan, federation.client_data, num)
        splits = {name: getattr(federation, name) for name in ("train", "validation", "test")}
        self._splits = place(
            plan, {name: part for name, part in splits.items() if part.y.size}, num
        )
        one_round = make_round(algorithm, plan, problem.cohort_size)
        use = scores(problem, algorithm)
        compiled = (
            calling
            if isinstance(plan, PythonPlan)
            else functools.partial(Jitted, problem.model.network, plan)
        )
        self._init = compiled(functools.partial(lifting.init, algorithm, plan))
        # The shapes of a state; None: functions are called in Python, which shows what is wrong.
        self._like = None
        if not isinstance(plan, PythonPlan):
            first = functools.partial(lifting.init, algorithm, plan)
            self._like = jax.eval_shape(first, jax.random.key(0), self._clients)
        self._step = compiled(
            lambda key, state, clients: one_round(key, state.round, state, clients)
        )

        def serve(
            key: Key, state: State, ids: Array, clients: ClientData, splits: Any, trained: Any
        ) -> lifting.Served:
            return lifting.serve(
                algorithm, plan, use, key, state, ids, clients, splits, trained=trained
            )

        self._serve = compiled(serve)

    def init(self, key: Key) -> State:
        """Returns the initial state: what the server and what the clients hold, all arrays.

        Args:
            key: A key such as `jax.random.key(0)`.

        Raises:
            ArgumentError: if it is no key.
        """
        check_key(key)
        return self._init(key, self._clients)

    def step(self, key: Key, state: State) -> tuple[State, Record]:
        """Plays a round.

        Args:
            key: The same for all rounds; the number of the round is folded in.
            state: The state before the round.

        Returns:
            The state after it; and its training loss, traffic in bytes and the method's own metrics.

        Raises:
            ArgumentError: if `key` is no key, or `state` is not a state of this simulation.
        """
        check_key(key)
        self._check_state(state)
        return self._step(key, state, self._clients)

    def evaluate(
        self, state: State, key: Key | None = None, trained: Array | None = None
    ) -> dict[str, dict[str, Array]]:
        """Returns every client's scores (K,), by split and name.

        Args:
            state: Any state.
            key: Key of predictions that train first.
            trained: (K,) bool, which clients have trained so far; `step` tells who does, in `info.trained`.
                The others predict with the global model, if the method has one. None: all have.

        Raises:
            ArgumentError: see `step`.
        """
        key = jax.random.key(0) if key is None else key
        check_key(key)
        self._check_state(state)
        ids = jnp.arange(self.experiment.problem.num_clients, dtype=jnp.int32)
        return self._serve(key, state, ids, self._clients, self._splits, trained).outputs

    def _check_state(self, state: Any) -> None:
        """Raises `ArgumentError` for anything but a state with this simulation's arrays."""
        accepted = "accepted: a state that init or step of this simulation has returned"
        if not isinstance(state, State):
            raise ArgumentError("state", accepted, type(state).__name__)
        if self._like is None:
            return
        found, structure = jax.tree.flatten(state)
        expected, own_structure = jax.tree.flatten(self._like)
        if structure != own_structure or [np.shape(leaf) for leaf in found] != [
            leaf.shape for leaf in expected
        ]:
            raise ArgumentError(
                "state", f"has other arrays than those of {self.experiment.name}; {accepted}"
            )


def check_key(key: Any) -> None:
    """Raises `ArgumentError` for anything but one key."""
    is_key = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_key or key.shape != ():
        raise ArgumentError(
            "key", "accepted: one key, such as jax.random.key(0)", type(key).__name__
        )
