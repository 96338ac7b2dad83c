"""The protocol of the client stores: where clients' state and data are between rounds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from pfljax.contract.types import Algorithm, ClientData, PyTree, State
from pfljax.exchange import lifting
from pfljax.exchange.lifting import Use
from pfljax.exchange.plan import ExecutionPlan
from pfljax.run.compiled import Compiled, Lowered
from pfljax.run.experiment import Experiment, Numbers
from pfljax.run.replicates import Replicates
from pfljax.stores import stacks
from pfljax.stores.initial_rows import completed

Build = Callable[[Numbers], Algorithm]
UseOf = Callable[[Algorithm], Use]


class Store(Protocol):
    """Where clients' state and data are between rounds.

    Attributes:
        home: Where they are, in words.
        on_devices: Whether they are on the devices. Otherwise runs in one kernel are `Apart`.
        on_disk: Whether the clients' rows are in files.
    """

    home: str
    on_devices: bool = False
    on_disk: bool = False

    def check(self, experiment: Experiment, algorithm: Algorithm) -> None:
        """Raises `ArgumentError` if the store does not support the run."""

    def put(
        self, plan: ExecutionPlan, replicates: Replicates, runs: Sequence[Any], num: int
    ) -> Any:
        """Puts the data of each run, of `num` clients, where the store keeps them."""

    def join_states(
        self, compiled: Compiled, replicates: Replicates, states: Sequence[State]
    ) -> State:
        """Joins the restored states of all runs."""
        ...

    def restorable(self, compiled: Compiled, replicates: Replicates) -> State:
        """Returns the shapes, dtypes and locations of one run's state."""
        ...

    def lower_segment(
        self,
        experiment: Experiment,
        clients: ClientData,
        plan: ExecutionPlan,
        length: int,
        replicates: Replicates,
    ) -> Lowered:
        """Lowers the rounds that `compile_segment` compiles; of the data, only shapes and locations are read."""
        ...

    def compile_segment(
        self,
        experiment: Experiment,
        clients: ClientData,
        plan: ExecutionPlan,
        length: int,
        replicates: Replicates,
    ) -> Compiled:
        """Compiles rounds, of which one dispatch plays up to `length`.

        Args:
            experiment: The run.
            clients: Data of all replicates, from `put`.
            plan: How clients are mapped to devices.
            length: Maximum number of rounds per dispatch.
            replicates: The runs.
        """
        ...

    def make_evaluation(
        self, experiments: Sequence[Experiment], compiled: Compiled, replicates: Replicates
    ) -> Callable:
        """Returns a function (key, state, clients, splits, trained) -> (metrics by split and name, who uses whom).

        `trained` (K,) bool says which clients have ever trained; None: all have.
        """
        ...

    def serve(
        self, experiment: Experiment, build: Build, plan: ExecutionPlan, use: UseOf, *args: Any
    ) -> PyTree:
        """What clients `ids` (n,) do with their predictions, as NumPy arrays (n, ...).

        Args:
            experiment: The run.
            build: Builds the method.
            plan: How clients are mapped to devices.
            use: The built method -> what clients do with their predictions.
            args: The clients' numbers `ids`, key of the predictions, state and data of all clients, as the store
                keeps them, and which of them have ever trained, (K,) bool, or None: all have.
        """

    def read_saved(
        self, experiment: Experiment, read: Callable[[Any], Any], clients: ClientData
    ) -> State:
        """Reads a run's saved state, for predictions: arrays are on the host.

        Args:
            experiment: The run.
            read: Reads a checkpoint: shapes -> arrays.
            clients: Data of all clients.
        """
        key = jax.random.fold_in(jax.random.key(experiment.seed), 0)
        replicates = Replicates.from_experiments([experiment])
        state = read(shapes_of(experiment, clients))
        return stacks.in_memory(completed(experiment, replicates, 0, key, state))


def shapes_of(experiment: Experiment, clients: ClientData) -> State:
    """Shapes of the initial state of all clients."""
    plan = experiment.problem.plan
    init = functools.partial(lifting.init, experiment.algorithm(plan), plan)
    return jax.eval_shape(init, jax.random.key(0), clients)
