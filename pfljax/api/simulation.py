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
from pfljax.exchange.pools import place as put_on_devices
from pfljax.exchange.rounds import Record, make_round
from pfljax.local.training import LocalTraining
from pfljax.run.compiled import Jitted
from pfljax.settings.fields import checked
from pfljax.stores.serving import scores
from pfljax.training import mixing
from pfljax.training.loop import Rounds

SPLITS = ("train", "validation", "test")
# Options of `Run` that a simulation does not have: it is neither evaluated by a schedule nor written.
ONLY_RUNS = (
    "unseen",
    "fine_tune_epochs",
    "eval_clients",
    "never_trained",
    "metrics",
    "score",
    "stop",
    "drift",
    "planned_rounds",
    "config",
)


class Simulation:
    """Rounds of a method without a schedule, files or progress: `Run` without its loop.

    `init`, `step` and `evaluate` are pure, so that they can be called within `jax.jit`, `jax.lax.scan` or your own
    loop.

    Attributes:
        experiment: The method, clients and settings.

    Examples:
        >>> import jax
        >>> import pfljax as pfl
        >>> clients = pfl.data.digits(num_clients=4, train_examples=8)
        >>> simulation = pfl.Simulation(pfl.Ditto(), clients, pfl.models.MLP(hidden=(4,)))
        >>> state = simulation.init(jax.random.key(0))
        >>> for _ in range(2):
        ...     state, info = simulation.step(jax.random.key(1), state)
        >>> int(state.round)
        2
        >>> simulation.evaluate(state)["test"]["accuracy"].shape
        (4,)
    """

    @checked(options=[Run], without=["seed", *ONLY_RUNS])
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
        run = Run(method, clients, model, local, **options)
        self.experiment = run.experiment.with_rounds(rounds)
        store = self.experiment.client_store
        if store != "device":
            raise ArgumentError("client_store", "accepted for a Simulation: device", store)
        mixing.check(self.experiment)

        # The clients' data on the devices.
        problem = self.experiment.problem
        federation = self.experiment.federation
        plan = problem.plan
        num = problem.num_clients
        splits = {name: getattr(federation, name) for name in SPLITS}
        with_examples = {name: split for name, split in splits.items() if split.y.size}
        self._clients: ClientData = put_on_devices(plan, federation.client_data, num)
        self._splits = put_on_devices(plan, with_examples, num)

        # The functions; with plan="python", they are called as they are.
        algorithm = self.experiment.algorithm(plan)
        play_round = make_round(algorithm, plan, problem.cohort_size)
        use = scores(problem, algorithm)
        first = functools.partial(lifting.init, algorithm, plan)

        def step(key: Key, state: State, clients: ClientData) -> tuple[State, Record]:
            return play_round(key, state.round, state, clients)

        def serve(
            key: Key, state: State, ids: Array, clients: ClientData, splits: Any, trained: Any
        ) -> lifting.Served:
            return lifting.serve(
                algorithm, plan, use, key, state, ids, clients, splits, trained=trained
            )

        # The shapes of a state; None: functions are called in Python, which shows what is wrong.
        if isinstance(plan, PythonPlan):
            compiled = calling
            self._like = None
        else:
            compiled = functools.partial(Jitted, problem.model.network, plan)
            self._like = jax.eval_shape(first, jax.random.key(0), self._clients)
        self._init = compiled(first)
        self._step = compiled(step)
        self._serve = compiled(serve)

    def init(self, key: Key) -> State:
        """Returns the initial state of the server and the clients, a tree of arrays.

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
            trained: Which clients have trained so far, (K,) bool; `info.trained` of `step` says it of a round. The
                others predict with the global model, if the method has one. Default: all have.

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
        leaves, structure = jax.tree.flatten(state)
        expected_leaves, expected_structure = jax.tree.flatten(self._like)
        shapes = [np.shape(leaf) for leaf in leaves]
        expected_shapes = [leaf.shape for leaf in expected_leaves]
        if structure != expected_structure or shapes != expected_shapes:
            text = f"has other arrays than those of {self.experiment.name}; {accepted}"
            raise ArgumentError("state", text)


def check_key(key: Any) -> None:
    """Raises `ArgumentError` for anything but one key."""
    is_key = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_key or key.shape != ():
        text = "accepted: one key, such as jax.random.key(0)"
        raise ArgumentError("key", text, type(key).__name__)
